"""Gradients that somebody else holds, too: what was reduced is in them, and they stay ``.grad``."""

import copy
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline.shelf import Shelf
from paceline.testing import ranks
from paceline.torch_private import flatten_crowd


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def gradients_alone(model: nn.Module, step: int) -> list[torch.Tensor]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss_of(alone, batch(step)).backward()
    return [parameter.grad for parameter in alone.parameters()]


def assert_all_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@ranks(2)
@pytest.mark.parametrize("bucket_mb", [1e-5, 25])
def test_an_optimizer_of_one_flat_parameter_steps_on_what_was_reduced(rank: int, bucket_mb: float) -> None:
    model = small()
    parameters = list(model.parameters())
    flat = nn.Parameter(torch.cat([parameter.data.flatten() for parameter in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for parameter in parameters:
        end = start + parameter.numel()
        parameter.data = flat.data[start:end].view_as(parameter)
        parameter.grad = flat.grad[start:end].view_as(parameter)
        start = end
    paceline.replicate(model, bucket_mb=bucket_mb)
    optimizer = torch.optim.SGD([flat], lr=0.1)

    for step in range(4):
        expected = gradients_alone(model, step)
        flat.grad.zero_()
        loss_of(model, batch(step).chunk(2)[rank]).backward()
        torch.testing.assert_close(flat.grad, torch.cat([gradient.flatten() for gradient in expected]))
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("learned", [False, True])
def test_a_list_of_gradients_that_was_gathered_once_holds_what_was_reduced(rank: int, learned: bool) -> None:
    model = small()
    paceline.replicate(model)
    for step in range(1 + 2 * learned):
        model.zero_grad()
        loss_of(model, batch(step).chunk(2)[rank]).backward()
    gradients = [parameter.grad for parameter in model.parameters()]

    for step in range(3, 6):
        for gradient in gradients:
            gradient.zero_()
        loss_of(model, batch(step).chunk(2)[rank]).backward()

        assert_all_close(gradients, gradients_alone(model, step))
        assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


@ranks(2)
def test_gradients_that_were_given_before_the_first_step_are_added_to_and_stay(rank: int) -> None:
    model = small()
    given = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), given, strict=True):
        parameter.grad = gradient
    paceline.replicate(model)

    loss_of(model, batch(0).chunk(2)[rank]).backward()

    assert_all_close(given, [gradient + 1 for gradient in gradients_alone(model, 0)])
    assert all(p.grad is g for p, g in zip(model.parameters(), given, strict=True))


@ranks(2)
def test_what_no_rank_has_used_is_left_alone(rank: int) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    held = torch.full((2, 2), 3.0)
    model[1].weight.grad = held.zero_().add_(3.0)
    paceline.replicate(model)

    model[0](batch(0)).sum().backward()

    assert model[1].weight.grad is held
    assert (held == 3.0).all()


@ranks(2)
def test_gradients_of_no_sync_that_nobody_holds_are_freed_when_they_are_reduced(rank: int) -> None:
    model = small()
    paceline.replicate(model)
    for step in range(3):
        model.zero_grad()
        with paceline.no_sync(model):
            loss_of(model, batch(step).chunk(2)[rank]).backward()
        local = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        loss_of(model, batch(step).chunk(2)[rank]).backward()

        assert all(gradient() is None for gradient in local)
        assert_all_close(
            [parameter.grad for parameter in model.parameters()],
            [2 * gradient for gradient in gradients_alone(model, step)],
        )


@ranks(2)
def test_zeroed_gradients_lie_in_one_flat_tensor_from_step_to_step(rank: int) -> None:
    model = small()
    paceline.replicate(model)
    for step in range(3):
        loss_of(model, batch(step).chunk(2)[rank]).backward()
        model.zero_grad(set_to_none=False)
    before = [parameter.grad.data_ptr() for parameter in model.parameters()]

    for step in range(3, 6):
        loss_of(model, batch(step).chunk(2)[rank]).backward()
        assert_all_close([parameter.grad for parameter in model.parameters()], gradients_alone(model, step))
        model.zero_grad(set_to_none=False)

    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == before


class Sum(nn.Module):
    """Two parameters whose gradients autograd puts into one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))

    def forward(self, more: float) -> torch.Tensor:
        both = self.a.view(-1) + self.b.view(-1)
        return (both * both).sum() + (3 * both).sum() + more * self.a.sum()


@ranks(2)
def test_gradients_that_share_memory_are_reduced_one_by_one(rank: int) -> None:
    model = Sum()
    paceline.replicate(model)

    model(5.0 * rank).backward()

    torch.testing.assert_close(model.a.grad, torch.full((4,), 7 + 2.5))
    torch.testing.assert_close(model.b.grad, torch.full((2, 2), 7.0))


@ranks(2)
def test_a_crowd_of_zeroed_gradients_lies_in_one_flat_tensor_from_step_to_step(rank: int) -> None:
    model = small()
    with mock.patch.object(Shelf, "flatten", lambda _shelf, gradients: flatten_crowd(gradients)):
        paceline.replicate(model)
        for step in range(3):
            loss_of(model, batch(step).chunk(2)[rank]).backward()
            model.zero_grad(set_to_none=False)
        before = [parameter.grad.data_ptr() for parameter in model.parameters()]
        loss_of(model, batch(3).chunk(2)[rank]).backward()

    assert_all_close([parameter.grad for parameter in model.parameters()], gradients_alone(model, 3))
    assert [parameter.grad.data_ptr() for parameter in model.parameters()] == before
