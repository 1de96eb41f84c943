"""What hooks with a memory share: whose it is, and which step it is."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.hooks import local_sgd, powersgd, quantized
from tests.hooks.world import World, bucket_of, drawn, reduce

MAKERS = [powersgd, quantized, local_sgd]

each_hook = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def named(width: int = 8) -> list[tuple[str, torch.nn.Parameter]]:
    return list(torch.nn.Linear(width, 32, bias=False).named_parameters())


@pytest.fixture
def bind() -> Iterator[Callable[..., None]]:
    """Bind hooks, and let go of them after the test."""
    bound = []

    def bind(hook: Any, *arguments: Any) -> None:
        bound.append(hook)
        hook.bind(*arguments)

    yield bind
    for hook in bound:
        hook.unbind()


@each_hook
def test_a_hook_serves_one_model_at_a_time(make: Any, bind: Any) -> None:
    hook, comm, mine = make(), World(1).comms[0], named()
    bind(hook, mine, comm)
    bind(hook, mine, comm)  # the same one again: its group has changed

    with pytest.raises(ValueError, match=r"serves another model already, and its memory is of that one"):
        bind(hook, named(), comm)

    hook.unbind()
    bind(hook, named(), comm)


@each_hook
def test_a_copy_is_free_for_another_model(make: Any, bind: Any) -> None:
    hook, comm = make(), World(1).comms[0]
    bind(hook, named(), comm)

    bind(copy.deepcopy(hook), named(), comm)


@each_hook
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_state_belongs_to_the_rank_that_saved_it(make: Any, bind: Any, is_bound: bool) -> None:
    saved, loaded, comms = make(), make(), World(2).comms
    model = named()
    bind(saved, named(), comms[0])
    state = saved.state_dict()

    with pytest.raises(ValueError, match=r"was saved by rank 0 of 2, and this is rank 1 of 2"):
        if is_bound:
            bind(loaded, model, comms[1])
        loaded.load_state_dict(state)
        bind(loaded, model, comms[1])


@each_hook
def test_a_loaded_state_goes_along_when_the_group_changes(make: Any, bind: Any) -> None:
    saved, loaded, model = make(), make(), named()
    bind(saved, model, World(1).comms[0])
    loaded.load_state_dict(saved.state_dict())

    bind(loaded, model, World(1).comms[0])
    bind(loaded, model, World(2).comms[1])

    state = loaded.state_dict()
    assert (state["rank"], state["size"]) == (1, 2)


@each_hook
def test_a_state_of_another_hook_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"this is no state of .*: it says hook='Other'"):
        make().load_state_dict({"hook": "Other"})


@pytest.mark.parametrize("make", [powersgd, quantized])
def test_a_state_of_another_model_is_refused(make: Any, bind: Any) -> None:
    hook, comm = make(), World(1).comms[0]
    hook.step = 100
    reduce([hook], [{name: p.detach() for name, p in named(64)}])
    other = make()
    other.load_state_dict(hook.state_dict())

    with pytest.raises(
        ValueError, match=r"is of other parameters than this model's: weight\. Load the state"
    ):
        bind(other, named(8), comm)


@each_hook
def test_steps_are_counted_by_the_backwards_that_send(make: Any) -> None:
    hook, comm = make(), World(1).comms[0]
    buckets = [bucket_of(drawn(i, **{f"p{i}": (3,)}), i) for i in range(3)]

    for sent in ([0, 1, 2], [1, 2], [0, 2], [2], [2], [0]):  # some are left out when nobody uses them
        for index in sent:
            hook(buckets[index], comm).wait()
    assert hook.step == 6

    hook.forget()
    hook(buckets[1], comm).wait()
    assert hook.step == 7
