"""An interrupt (Ctrl-C) while a rank waits for others: what they were told stands, nothing is mixed up."""

import copy
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline
from paceline.errors import PeerFailed
from paceline.testing import ranks

LATE = 1.0  # seconds by which rank 1 makes rank 0 wait
AFTER = 0.3  # seconds of waiting after which rank 0 is interrupted


class LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    paceline.replicate(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    return torch.randn(6, 4, requires_grad=True)


def interrupted(act: Callable[[], object]) -> BaseException | None:
    """Act, with an interrupt in the middle; return what was raised."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("stop")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, AFTER)
    try:
        act()
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()


def assert_alike(model: nn.Module) -> None:
    """Hold the ranks to the same weights and buffers, bit for bit."""
    frames = paceline.replica(model).reducer.exchange(
        b"test", b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
    )
    assert frames[0] == frames[1]


def raised_by(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


@ranks(2)
def test_who_is_interrupted_at_the_end_of_backward_is_behind_and_says_so_until_state_is_taken(
    rank: int,
) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    late = LateGradient.apply(batch(rank, 3), LATE * rank)
    loss = model(late).square().sum()

    if rank == 0:
        assert isinstance(interrupted(loss.backward), KeyboardInterrupt)
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        loss.backward()
        optimizer.step()

    for _ in range(2):
        error = raised_by(model(batch(rank, 4)).square().sum().backward)
        assert isinstance(error, PeerFailed)
        assert error.rank == 0
        assert "its weights are behind: KeyboardInterrupt: stop" in str(error)
    paceline.replica(model).take_state(1)
    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
def test_the_step_after_an_interrupt_is_that_of_one_process(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    paceline.replicate(model)
    late = LateGradient.apply(batch(rank, 0), LATE * rank)
    loss = model(late).square().sum()
    if rank == 0:
        assert isinstance(interrupted(loss.backward), KeyboardInterrupt)
    else:
        loss.backward()
    paceline.replica(model).take_state(0)
    model.zero_grad()
    alone = copy.deepcopy(model)

    model(batch(rank, 1)).square().sum().backward()

    sum(alone(batch(r, 1)).square().sum() / 2 for r in range(2)).backward()
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad)


@ranks(2)
def test_an_interrupt_while_another_rank_fails_leaves_nothing_behind(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(LATE)
            raise ValueError("boom")

    inputs = batch(rank, 3)
    loss = model(Boom.apply(inputs) if rank else inputs).square().sum()
    error = interrupted(loss.backward) if rank == 0 else raised_by(loss.backward)

    assert type(error) is (ValueError if rank else KeyboardInterrupt)
    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
def test_an_interrupt_before_the_others_have_begun_drops_the_step_on_every_rank(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    loss = model(batch(rank, 3)).square().sum()

    if rank == 0:
        assert isinstance(interrupted(loss.backward), KeyboardInterrupt)
    else:
        time.sleep(LATE)
        error = raised_by(loss.backward)
        assert isinstance(error, PeerFailed)
        assert "KeyboardInterrupt: stop" in str(error)

    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
def test_an_interrupt_in_an_exchange_outside_of_backward_is_not_answered_by_the_next_one(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 2)
    replica = paceline.replica(model)
    if rank == 0:
        assert isinstance(interrupted(lambda: replica.reducer.exchange(b"test", b"0")), KeyboardInterrupt)
    else:
        time.sleep(LATE)
        assert replica.reducer.exchange(b"test", b"1") == [b"0", b"1"]

    assert replica.reducer.exchange(b"test", b"again") == [b"again", b"again"]
