"""Parameters that are swapped in place: the same objects, which autograd knows by other nodes."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def load(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def convert(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.double().float()


def stay(model: nn.Module) -> None:
    """Convert to what it is: swapped all the same, and the memory is where it was."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.float()


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() + 1))


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def step(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def batch() -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4) / 16


@pytest.mark.parametrize("how", [load, convert, stay, swap])
@ranks(2)
def test_swapped_parameters_are_reduced_from_the_next_backward_on(
    rank: int, how: Callable[[nn.Module], None]
) -> None:
    model, alone = built(), built()
    paceline.replicate(model)
    for number in range(5):
        if number == 2:
            how(model)
            how(alone)
        step(model, batch().chunk(2)[rank])
        step(alone, batch())

    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@ranks(2)
def test_parameters_that_a_conversion_replaces_are_reduced(rank: int) -> None:
    model, alone = built(), built()
    paceline.replicate(model)
    step(model, batch().chunk(2)[rank])
    step(alone, batch())
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
        alone.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    step(model, batch().double().chunk(2)[rank])
    step(alone, batch().double())

    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@ranks(2)
def test_the_wrapper_notices_as_well(rank: int) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    alone = built()
    model = paceline.DistributedDataParallel(built())
    step(model, batch().chunk(2)[rank])
    step(alone, batch())
    # As from a checkpoint.
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    alone.load_state_dict(copy.deepcopy(alone.state_dict()))
    step(model.module, batch().chunk(2)[rank])
    step(alone, batch())

    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@ranks(2)
def test_what_is_swapped_on_one_rank_only_is_heard_of_on_all(rank: int) -> None:
    model = paceline.replicate(built())
    step(model, batch())
    if rank == 0:
        swap(model)

    with pytest.raises(paceline.RanksDisagree, match="other parameters on rank 0 only"):
        step(model, batch())


@ranks(2)
def test_not_even_where_the_memory_is_the_same(rank: int) -> None:
    model = paceline.replicate(built())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stay(model)
    with paceline.no_sync(model):
        model(batch()).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="cast or moved"):
        optimizer.step()


@ranks(2)
def test_gradients_of_swapped_parameters_from_no_sync_are_reduced_even_if_no_more_come(rank: int) -> None:
    model = paceline.replicate(built())
    swap(model)
    with paceline.no_sync(model):
        model(batch() + rank).sum().backward()
    model[2](torch.ones(1, 3)).sum().backward()

    for parameter in model.parameters():
        theirs = [torch.empty_like(parameter) for _ in range(2)]
        torch.distributed.all_gather(theirs, parameter.grad)
        torch.testing.assert_close(*theirs)


def test_after_a_check_swaps_are_still_noticed_and_in_a_check_on_every_rank() -> None:
    def cast() -> None:
        model = paceline.replicate(built())
        swap(model)
        step(model, batch())

    paceline.check(cast, ranks=4)

    assert hasattr(torch.utils.swap_tensors, "__wrapped__")


@ranks(2)
def test_gradients_that_nobody_heard_of_are_not_stepped_on(rank: int) -> None:
    model = paceline.replicate(built())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swap(model)
    with paceline.no_sync(model):
        model(batch()).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="cast or moved"):
        optimizer.step()
