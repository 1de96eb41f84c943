"""In whatever order a model is compiled and replicated, its gradients are the reference's."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks
from tests.compile.models import MODELS, WHOLE, batch, check_gradients, loss_of, made, reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

Forward = Callable[[torch.Tensor], torch.Tensor]
Order = Callable[[nn.Module, dict[str, Any]], Forward]
STEPS = 3


def compile_replicated(model: nn.Module, how: dict[str, Any]) -> Forward:
    return torch.compile(paceline.replicate(model), **how)


def replicate_compiled(model: nn.Module, how: dict[str, Any]) -> Forward:
    return paceline.replicate(torch.compile(model, **how))


def compile_in_place_after(model: nn.Module, how: dict[str, Any]) -> Forward:
    paceline.replicate(model).compile(**how)
    return model


def compile_in_place_before(model: nn.Module, how: dict[str, Any]) -> Forward:
    model.compile(**how)
    return paceline.replicate(model)


def compile_wrapped(model: nn.Module, how: dict[str, Any]) -> Forward:
    return torch.compile(paceline.DistributedDataParallel(model, find_unused_parameters=True), **how)


def wrap_compiled(model: nn.Module, how: dict[str, Any]) -> Forward:
    return paceline.DistributedDataParallel(torch.compile(model, **how), find_unused_parameters=True)


def compile_wrapper_in_place(model: nn.Module, how: dict[str, Any]) -> Forward:
    wrapper = paceline.DistributedDataParallel(model, find_unused_parameters=True)
    wrapper.compile(**how)
    return wrapper


ORDERS: list[Order] = [
    compile_replicated,
    replicate_compiled,
    compile_in_place_after,
    compile_in_place_before,
    compile_wrapped,
    wrap_compiled,
    compile_wrapper_in_place,
]


def train_and_check(rank: int, name: str, order: Order, **how: Any) -> None:
    torch._dynamo.reset()
    model = made(name)
    forward = order(model, how)
    for step in range(STEPS):
        want = reference(_plain(model), [batch(each, step) for each in range(2)])
        model.zero_grad()
        loss_of(forward(batch(rank, step))).backward()
        check_gradients(model, want)


def _plain(model: nn.Module) -> nn.Module:
    """Return a copy without anything compiled."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        module._compiled_call_impl = None
    return plain


@ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_reference_in_every_order(rank: int, name: str) -> None:
    for order in ORDERS:
        train_and_check(rank, name, order, backend="aot_eager", fullgraph=name in WHOLE)


@ranks(2, timeout=180)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_reference_with_inductor(rank: int, name: str) -> None:
    """In two of the orders; ``make orders`` runs all of them."""
    for order in ORDERS if os.environ.get("PACELINE_ALL_ORDERS") else (compile_replicated, compile_wrapped):
        train_and_check(rank, name, order, fullgraph=name in WHOLE)


@ranks(2)
def test_a_compiled_train_step_gives_the_weights_of_an_eager_one(rank: int) -> None:
    torch._dynamo.reset()
    weights = []
    for is_compiled in (False, True):
        model = paceline.replicate(made("MLP"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            return loss

        run = torch.compile(step, backend="aot_eager") if is_compiled else step
        for number in range(4):
            run(batch(rank, number))
        weights.append(list(model.parameters()))

    for eager, compiled in zip(*weights, strict=True):
        torch.testing.assert_close(compiled, eager)


@ranks(2)
def test_a_compiled_train_step_does_not_step_on_unsynced_gradients(rank: int) -> None:
    torch._dynamo.reset()
    model = paceline.replicate(made("MLP"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = [p.detach().clone() for p in model.parameters()]

    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()

    with paceline.no_sync(model), pytest.raises(paceline.UnsyncedGradients):
        torch.compile(step, backend="aot_eager")(batch(rank))

    assert all(map(torch.equal, before, model.parameters()))


@ranks(2)
def test_a_compiled_optimizer_does_not_step_on_unsynced_gradients(rank: int) -> None:
    torch._dynamo.reset()
    model = paceline.replicate(made("MLP"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="aot_eager")
    loss_of(model(batch(rank))).backward()
    step()
    with paceline.no_sync(model):
        loss_of(model(batch(rank))).backward()
    with pytest.raises(paceline.UnsyncedGradients):
        step()


@ranks(2)
@pytest.mark.parametrize("wrap", [compile_wrapped, compile_replicated])
def test_buffers_of_a_compiled_model_are_rank_0s_before_each_forward(rank: int, wrap: Order) -> None:
    torch._dynamo.reset()
    model = made("convnet with BatchNorm")
    forward = wrap(model, {"backend": "aot_eager", "fullgraph": True})
    alone = copy.deepcopy(made("convnet with BatchNorm"))
    for step in range(3):
        loss_of(forward(batch(rank, step))).backward()
        alone(batch(0, step))  # the weights do not change
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, alone.get_buffer(name), msg=f"{name} in step {step}")


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise ValueError("one row is not enough")
        return self.norm(self.layer(x))


@ranks(2)
def test_what_a_compiled_forward_raises_is_the_users_own_exception(rank: int) -> None:
    torch._dynamo.reset()
    model = Picky()
    forward = compile_wrapped(model, {"backend": "aot_eager"})

    # Dynamo leaves the forward to eager code, and goes on with whatever that calls: the engine, for one.
    with pytest.raises(ValueError, match="one row is not enough"):
        forward(batch(rank)[:1])

    want = reference(_plain(model), [batch(each) for each in range(2)])
    loss_of(forward(batch(rank))).backward()
    check_gradients(model, want)


@ranks(2)
def test_a_compiled_step_may_use_the_handle_as_an_eager_one_does(rank: int) -> None:
    torch._dynamo.reset()
    model = made("convnet with BatchNorm")
    want = reference(model, [batch(0)])
    replica = paceline.replica(paceline.replicate(model))

    def step(x: torch.Tensor) -> torch.Tensor:
        with replica.busy("looking at the batch"):
            x = x + 0
        if rank:
            replica.skip()
        else:
            with replica.batch():
                loss_of(model(x)).backward()
        replica.sync_buffers()
        return replica.grad_norm()

    norm = torch.compile(step, backend="aot_eager")(batch(rank))

    check_gradients(model, want)
    torch.testing.assert_close(norm, torch.stack([p.grad.norm() for p in model.parameters()]).norm())


@ranks(2)
@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_a_model_may_be_made_and_replicated_in_compiled_code(rank: int, wrap: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    want = reference(made("MLP"), [batch(each) for each in range(2)])

    @torch.compile(backend="aot_eager")
    def run(x: torch.Tensor) -> nn.Module:
        model = wrap(made("MLP"))
        loss_of(model(x)).backward()
        return model

    check_gradients(run(batch(rank)), want)
