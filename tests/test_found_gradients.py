"""Gradients that are there when a module is replicated: made on each rank by a backward before it."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import paceline
from paceline.testing import ranks
from tests.sharding import mesh_of


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def share(rank: int) -> torch.Tensor:
    return torch.full((3, 4), 1.0 + rank)


def stepper(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@ranks(2)
@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_a_step_on_gradients_from_before_is_refused(rank: int, wrap) -> None:
    model = built()
    model(share(rank)).sum().backward()
    wrapped = wrap(model)

    with pytest.raises(paceline.UnsyncedGradients, match="were there before the model was replicated"):
        stepper(model).step()

    wrapped.zero_grad()
    stepper(model).step()


@ranks(2)
def test_the_next_backward_reduces_them_along_with_what_it_adds_even_where_it_adds_nothing(rank: int) -> None:
    model, alone = built(), built()
    model(share(rank)).sum().backward()
    alone(torch.cat([share(0), share(1)])).sum().div(2).backward()
    paceline.replicate(model)

    model[1](torch.ones(1, 3)).sum().backward()
    alone[1](torch.ones(1, 3)).sum().backward()

    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@ranks(2)
def test_those_that_all_ranks_agree_on_may_be_stepped_on(rank: int) -> None:
    model = built()
    paceline.replicate(model)
    model(share(rank)).sum().backward()
    paceline.replica(model).detach()
    paceline.replicate(model)

    stepper(model).step()


@ranks(2)
def test_zeros_may_be_stepped_on_and_what_one_rank_alone_has_may_not(rank: int) -> None:
    zeros, odd = built(), built()
    for parameter in zeros.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if rank == 1:
        odd[0].weight.grad = torch.ones_like(odd[0].weight)
    paceline.replicate(zeros)
    paceline.replicate(odd)

    stepper(zeros).step()
    if rank == 1:
        with pytest.raises(paceline.UnsyncedGradients, match="only this rank has: 0.weight"):
            stepper(odd).step()
    else:
        stepper(odd).step()


@ranks(2)
def test_the_same_rows_in_another_order_are_not_the_same(rank: int) -> None:
    table = nn.Embedding(4, 2)
    table(torch.tensor([rank])).sum().backward()
    paceline.replicate(table)

    with pytest.raises(paceline.UnsyncedGradients, match="were there before"):
        stepper(table).step()


@ranks(2)
def test_gradients_of_no_sync_are_not_taken_for_those_from_before(rank: int) -> None:
    model = built()
    model(share(rank)).sum().backward()
    paceline.replicate(model)
    model(share(rank)).sum().backward()
    model.zero_grad()
    with paceline.no_sync(model):
        model(share(rank)).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="inside no_sync"):
        stepper(model).step()


@ranks(2)
def test_a_sparse_gradient_from_before(rank: int) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([rank])).sum().backward()
    paceline.replicate(table)

    with pytest.raises(paceline.UnsyncedGradients, match="were there before"):
        stepper(table).step()


@ranks(2)
def test_sums_in_a_fixed_order_start_without_them(rank: int) -> None:
    model = built()
    model(share(rank)).sum().backward()
    paceline.replicate(model, deterministic=True)

    with pytest.raises(paceline.UnsyncedGradients, match="were there before"):
        stepper(model).step()


@ranks(2)
def test_the_parts_of_a_sharded_gradient_from_before(rank: int) -> None:
    mesh = mesh_of(dp=2, tp=1)
    model = nn.Linear(4, 4)
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(
            name, nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [Shard(0)]))
        )
    inputs = DTensor.from_local(torch.full((3, 4), 1.0 + rank), mesh["tp"], [Replicate()])
    model(inputs).to_local().sum().backward()
    paceline.replicate(model, mesh=mesh["dp"])
    with pytest.raises(paceline.UnsyncedGradients, match="were there before"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model(inputs).to_local().sum().backward()
    torch.testing.assert_close(model.weight.grad.to_local(), torch.full((4, 4), 9.0))


@ranks(4)
def test_a_sharded_gradient_from_before_that_has_not_been_summed_up(rank: int) -> None:
    mesh = mesh_of(dp=2, tp=2)
    model = nn.Linear(4, 4, bias=False)
    model.register_parameter(
        "weight", nn.Parameter(distribute_tensor(model.weight.data, mesh["tp"], [Replicate()]))
    )
    inputs = DTensor.from_local(torch.full((3, 4), 1.0 + rank // 2), mesh["tp"], [Shard(0)])
    model(inputs).to_local().sum().backward()  # partial: each rank has its own rows
    paceline.replicate(model, mesh=mesh["dp"])
    with pytest.raises(paceline.UnsyncedGradients, match="were there before"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    model(inputs).to_local().sum().backward()

    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 18.0))
