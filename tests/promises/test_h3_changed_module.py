"""H3: parameters added to, replaced in or removed from the module after it was wrapped."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing import ranks
from tests.promises.libraries import Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, small_model


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


def replace(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 5)


def replace_parameter(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.randn(3, 8))


def remove(model: nn.Sequential) -> None:
    del model[2]


def replace_with_buffers(model: nn.Sequential) -> None:
    model.append(nn.BatchNorm1d(3))
    model[-1].running_mean.normal_()


CHANGES = [add, replace, replace_parameter, remove]


def own_seed() -> None:
    torch.manual_seed(100 + dist.get_rank())


def assert_trains(wrapped: nn.Module, bare: nn.Module, forward: Callable[[nn.Module], nn.Module]) -> None:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(forward(wrapped), share(batch()))  # this forward notices
        expected = reference(bare, lambda m: loss_of(m, batch()).backward())
        loss.backward()
        assert verdict(wrapped, expected) == EQUAL
        optimizer.step()
    everyone = gather([p.detach() for p in bare.parameters()])
    assert all(map(torch.equal, everyone[0], everyone[1]))


@on_both
@pytest.mark.parametrize("change", CHANGES)
@ranks(2)
def test_a_changed_module_is_noticed_and_trains(
    library: Library, change: Callable[[nn.Module], None]
) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    assert_trains(wrapped, model, lambda m: m)
    own_seed()  # new parameters differ between the ranks, until they are noticed
    change(model)
    assert_trains(wrapped, model, lambda m: m)


@ranks(2)
def test_new_buffers_start_equal_too(rank: int) -> None:
    model = paceline.replicate(small_model())
    own_seed()
    replace_with_buffers(model)
    loss_of(model, share(batch())).backward()
    means = gather(model[-1].running_mean)
    assert torch.equal(*means)


@ranks(2)
def test_what_is_noticed_only_in_backward_is_reduced(rank: int) -> None:
    """The forward of the module itself, which notices first, is not run."""
    model = paceline.replicate(small_model())
    torch.manual_seed(5)
    add(model)
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    x = share(batch())
    for layer in model:
        x = layer(x)
    x.square().mean().backward()
    assert verdict(model, expected) == EQUAL


@on_both
@pytest.mark.parametrize("changing", [0, 1])
@ranks(2)
def test_a_module_that_changes_on_one_rank_only_raises_on_every_rank(library: Library, changing: int) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    loss_of(wrapped, share(batch())).backward()
    if dist.get_rank() == changing:
        add(model)
    with pytest.raises(paceline.RanksDisagree) as caught:
        loss_of(wrapped, share(batch())).backward()
    assert f"the module has got other parameters on rank {changing} only: 3." in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1


@ranks(2)
def test_modules_that_change_differently_raise_on_every_rank(rank: int) -> None:
    model = paceline.replicate(small_model())
    model.append(nn.Linear(3, 3 + rank))
    with pytest.raises(paceline.RanksDisagree, match="would send different buckets"):
        loss_of(model, share(batch())).backward()


@ranks(2)
def test_an_evaluation_on_one_rank_notices_nothing_and_waits_for_nobody(rank: int) -> None:
    model = paceline.replicate(small_model())
    own_seed()
    add(model)
    if rank:
        model.eval()
        with torch.no_grad():
            model(batch())
        model.train()
    assert_trains(model, model, lambda m: m)


@ranks(2)
def test_modules_that_are_made_elsewhere_cost_nothing(rank: int) -> None:
    model = paceline.replicate(small_model())
    loss_of(model, share(batch())).backward()
    before = paceline.replica(model).step
    nn.Linear(2, 2)
    loss_of(model, share(batch())).backward()
    assert paceline.replica(model).step == before + 1


@ranks(2)
def test_a_new_part_computes_in_the_precision_that_was_asked_for(rank: int) -> None:
    precision = paceline.Precision(torch.bfloat16, reduce=torch.float32)
    model = paceline.replicate(small_model(), precision=precision)
    loss_of(model, share(batch())).backward()
    own_seed()
    add(model)
    for _ in range(2):
        model.zero_grad()
        out = model(share(batch()))
        out.square().mean().backward()
    assert out.dtype is torch.bfloat16
    everyone = gather([p.detach() for p in model.parameters()] + [p.grad for p in model.parameters()])
    assert all(map(torch.equal, *everyone))


@ranks(2)
def test_tensors_that_stand_in_for_one_forward_are_no_change(rank: int) -> None:
    model = paceline.replicate(small_model())
    nn.Linear(2, 2)  # so that there is a reason to look
    others = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, share(batch()))
    loss_of(model, share(batch())).backward()
    assert paceline.replica(model).step == 1


@ranks(2)
def test_a_backward_whose_parameters_were_replaced_after_its_forward_is_reduced(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    paceline.replicate(model)
    old, batch = model[0].weight, torch.tensor([[1.0, 2.0], [3.0, 5.0]])

    loss = model(batch[rank : rank + 1]).sum()
    model[0].weight = nn.Parameter(old.detach().clone())
    loss.backward()

    seen = [torch.empty_like(old) for _ in range(2)]
    dist.all_gather(seen, old.grad.contiguous())
    assert torch.equal(seen[0], seen[1])


@ranks(2)
def test_a_backward_of_old_and_new_parameters_at_once_is_refused(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    paceline.replicate(model)
    first = model(torch.ones(1, 2)).sum()
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    second = model[0](torch.ones(1, 2)).sum()

    with pytest.raises(RuntimeError, match=r"given other parameters \(0.weight\) in place of some"):
        (first + second).backward()


@ranks(2)
def test_hooks_of_others_on_the_nodes_of_old_parameters_outlive_a_change(rank: int) -> None:
    model = paceline.replicate(small_model())
    weight = next(model.parameters())
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    heard: list[int] = []
    node.register_hook(lambda *_: heard.append(1))
    del node  # from here on only the engine holds it
    loss_of(model, share(batch())).backward()
    model.append(nn.Linear(3, 3))
    for count in (2, 3):
        loss_of(model, share(batch())).backward()

        assert len(heard) == count
