"""What hooks with a memory share: whose it is, and which step it is."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.hooks import in_dtype, local_sgd, powersgd, quantized
from tests.hooks.world import World, bucket_of, drawn, reduce

MAKERS = [powersgd, quantized, local_sgd]

each_hook = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


def inside(make: Any) -> Any:
    """Put a hook into others, which have to pass everything on."""
    return lambda: in_dtype(torch.bfloat16, in_dtype(torch.float32, make()))


each_wrapped = pytest.mark.parametrize(
    "make",
    [*MAKERS, *map(inside, MAKERS)],
    ids=[*(make.__name__ for make in MAKERS), *(f"{make.__name__} inside" for make in MAKERS)],
)


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
def test_steps_are_counted_by_backwards_whatever_they_send(make: Any) -> None:
    hook, comm = make(), World(1).comms[0]
    buckets = [bucket_of(drawn(i, **{f"p{i}": (3,)}), i) for i in range(3)]

    for sent in ([0, 1, 2], [0], [1], [2], [], [0, 2]):  # some are left out when nobody uses them
        hook.begin()
        for index in sent:
            hook(buckets[index], comm).wait()
    assert hook.step == 6

    hook.forget()
    hook.begin()
    assert hook.step == 7


@each_wrapped
def test_a_hook_that_refuses_a_model_is_as_it_was(make: Any, bind: Any) -> None:
    comms, model = World(2).comms, named()
    saved, loaded = make(), make()
    bind(saved, named(), comms[0])
    state = saved.state_dict()
    loaded.load_state_dict(state)

    with pytest.raises(ValueError, match=r"was saved by rank 0 of 2"):
        loaded.bind(model, comms[1])

    assert loaded.state_dict() == state
    bind(loaded, model, comms[0])  # it serves nobody yet, and is still rank 0's
    with pytest.raises(ValueError, match=r"serves another model already"):
        loaded.bind(named(), comms[0])
    bind(loaded, model, comms[0])


# ---- the order that the plan was made from ------------------------------------------------------------


@each_wrapped
def test_a_saved_state_brings_its_plan_along(make: Any, bind: Any, tmp_path: Path) -> None:
    comm, model = World(1).comms[0], list(nn.Linear(2, 2).named_parameters())
    saved, loaded = make(), make()
    bind(saved, model, comm)
    assert saved.state_dict()["planned"] == []
    saved.planned = ("weight", "bias")  # as the engine does
    torch.save(saved.state_dict(), tmp_path / "state")
    saved.unbind()

    loaded.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    bind(loaded, model, comm)

    assert loaded.plan_to_take == ("weight", "bias")
    assert loaded.state_dict()["planned"] == ["weight", "bias"]  # saved again before the first backward
    loaded.plan_to_take = None
    assert copy.deepcopy(loaded).plan_to_take is None


@each_wrapped
def test_a_state_without_a_plan_is_loaded_too(make: Any) -> None:
    hook, state = make(), make().state_dict()
    without = {key: value for key, value in state.items() if key != "planned"}

    for each in (state, without):
        hook.load_state_dict(each)
        assert (hook.planned, hook.plan_to_take) == ((), None)


@each_wrapped
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_plan_of_another_model_is_refused(make: Any, bind: Any, is_bound: bool) -> None:
    hook, comm = make(), World(1).comms[0]
    state = {**make().state_dict(), "planned": ["head.weight", "weight"]}

    with pytest.raises(ValueError, match=r"is of other parameters than this model's: head\.weight\. Load"):
        if is_bound:
            bind(hook, named(), comm)
        hook.load_state_dict(state)
        bind(hook, named(), comm)


def test_a_plan_that_another_model_has_taught_is_forgotten(bind: Any) -> None:
    hook, comm = quantized(), World(1).comms[0]
    bind(hook, named(), comm)
    hook.planned = ("weight",)
    hook.unbind()
    assert hook.state_dict()["planned"] == ["weight"]  # it may be saved after the replica was detached

    bind(hook, list(nn.Sequential(nn.Linear(2, 2)).named_parameters()), comm)

    assert hook.state_dict()["planned"] == []
