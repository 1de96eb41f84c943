"""An interrupt (Ctrl-C) while a rank waits for others: what they were told stands, nothing is mixed up."""

import copy
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import Pending
from paceline.errors import PeerFailed, PeerLost, RanksDisagree
from paceline.hooks import average, local_sgd, powersgd
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


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(LATE)
        raise ValueError("boom")


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    paceline.replicate(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(rank: int, step: int) -> torch.Tensor:
    torch.manual_seed(10 * step + rank)
    return torch.randn(6, 4, requires_grad=True)


def interrupted(act: Callable[[], object], every: float = 0.0) -> BaseException | None:
    """Act, with an interrupt in the middle, or one after the other; return what was raised."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("stop")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, AFTER, every)
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
def test_an_interrupt_at_the_end_of_backward_comes_when_the_gradients_are_there(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    late = LateGradient.apply(batch(rank, 3), LATE * rank)
    loss = model(late).square().sum()

    error = interrupted(loss.backward) if rank == 0 else raised_by(loss.backward)

    assert type(error) is (type(None) if rank else KeyboardInterrupt)
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
def test_who_does_not_step_after_an_interrupt_is_told_so_until_state_is_taken(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    late = LateGradient.apply(batch(rank, 3), LATE * rank)
    loss = model(late).square().sum()
    if rank == 0:
        assert isinstance(interrupted(loss.backward), KeyboardInterrupt)
    else:
        loss.backward()
        optimizer.step()

    error = raised_by(model(batch(rank, 4)).square().sum().backward)

    assert isinstance(error, RanksDisagree)
    assert "rank 0 has made 3, rank 1 has made 4" in str(error)
    paceline.replica(model).take_state(1)
    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
def test_an_interrupt_in_the_first_step_leaves_all_ranks_with_the_same_plan(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    paceline.replicate(model)
    late = LateGradient.apply(batch(rank, 0), LATE * rank)
    loss = model(late).square().sum()
    if rank == 0:
        assert isinstance(interrupted(loss.backward), KeyboardInterrupt)
    else:
        loss.backward()
    model.zero_grad()
    alone = copy.deepcopy(model)

    model(batch(rank, 1)).square().sum().backward()

    sum(alone(batch(r, 1)).square().sum() / 2 for r in range(2)).backward()
    for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad)


@ranks(2)
def test_a_second_interrupt_ends_the_connection_and_no_frame_is_taken_for_another(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    late = LateGradient.apply(batch(rank, 3), LATE * rank)
    loss = model(late).square().sum()

    error = interrupted(loss.backward, every=0.15) if rank == 0 else raised_by(loss.backward)

    assert type(error) is (type(None) if rank else KeyboardInterrupt)  # rank 0 had told that all is well
    assert isinstance(raised_by(model(batch(rank, 4)).square().sum().backward), PeerLost)


@ranks(2)
@pytest.mark.parametrize("hook", ["powersgd", "own"])
def test_an_interrupt_between_the_rounds_of_a_hook_is_put_off(rank: int, hook: str) -> None:
    class Late(Pending):
        def __init__(self, pending: Pending) -> None:
            self._pending = pending

        def wait(self) -> torch.Tensor:
            time.sleep(LATE * rank * is_late[0])
            return self._pending.wait()

        def advance(self) -> bool:
            return self._pending.advance()

    inner = powersgd(rank=1, start_step=1) if hook == "powersgd" else average
    is_late = [False]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if hook == "powersgd":
        paceline.replicate(model, hook=inner)
    else:
        paceline.replicate(model, hook=lambda bucket, comm: Late(inner(bucket, comm)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    is_late[0] = True
    late = LateGradient.apply(batch(rank, 3), LATE * rank if hook == "powersgd" else 0.0)
    loss = model(late).square().sum()

    error = interrupted(loss.backward) if rank == 0 else raised_by(loss.backward)

    assert type(error) is (type(None) if rank else KeyboardInterrupt)
    is_late[0] = False
    optimizer.step()
    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
@pytest.mark.parametrize("interrupts", [0, 1])
def test_an_interrupt_while_buffers_are_made_equal_is_put_off(rank: int, interrupts: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    wrapper = paceline.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(rank, wrapper, optimizer, 3)
    optimizer.zero_grad()

    def step() -> None:
        wrapper(batch(rank, 3)).square().sum().backward()

    if rank == interrupts:
        assert isinstance(interrupted(lambda: wrapper(batch(rank, 3))), KeyboardInterrupt)
    else:
        time.sleep(LATE)

    assert isinstance(raised_by(step), RanksDisagree)  # one rank is a forward ahead
    optimizer.zero_grad()
    train(rank, wrapper, optimizer, 3)
    paceline.replica(model).sync_buffers()  # the wrapper does so before the next forward
    assert_alike(model)


@ranks(2)
def test_an_interrupt_while_new_parameters_are_agreed_on_is_put_off(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()
    model.append(nn.Linear(2, 2))
    if rank == 0:
        assert isinstance(interrupted(lambda: model(batch(rank, 3))), KeyboardInterrupt)
    else:
        time.sleep(LATE)
        model(batch(rank, 3))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(rank, model, optimizer, 3)
    assert_alike(model)


@ranks(2)
def test_an_interrupt_at_the_end_of_join_is_put_off_until_the_state_is_taken(rank: int) -> None:
    model, optimizer = model_and_optimizer()

    def epoch() -> None:
        with paceline.join(model):
            train(rank, model, optimizer, 2)
            time.sleep(LATE * rank)

    error = interrupted(epoch) if rank == 0 else raised_by(epoch)

    assert type(error) is (type(None) if rank else KeyboardInterrupt)
    assert_alike(model)


@ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_interrupt_in_an_average_of_local_sgd_is_put_off(rank: int, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    paceline.replicate(model, hook=local_sgd(every=2, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        if rank == 0 and step in (1, 5):
            assert isinstance(interrupted(optimizer.step), KeyboardInterrupt)
        else:
            time.sleep(LATE * (step in (1, 5)))
            optimizer.step()

    assert_alike(model)


@ranks(2)
def test_a_step_of_the_optimizer_that_raises_is_not_counted(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 2)
    real = optimizer.param_groups[0]["lr"]
    model(batch(rank, 2)).square().sum().backward()
    if rank == 0:
        optimizer.param_groups[0]["lr"] = "high"  # torch raises in the middle of the step
        assert raised_by(optimizer.step) is not None
        optimizer.param_groups[0]["lr"] = real
    else:
        optimizer.step()

    error = raised_by(model(batch(rank, 3)).square().sum().backward)

    assert isinstance(error, RanksDisagree)
    assert "rank 0 has made 2, rank 1 has made 3" in str(error)


@ranks(2)
def test_who_comes_after_a_failed_rank_has_given_up_hears_what_happened(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 2)
    optimizer.zero_grad()
    loss = model(batch(rank, 2)).square().sum()
    with mock.patch("paceline.backward.TELL_SECONDS", 0.5):
        if rank == 0:
            error = raised_by(Boom.apply(loss).backward)
            assert isinstance(error, ValueError)
            time.sleep(2 * LATE)
        else:
            time.sleep(2 * LATE)
            error = raised_by(loss.backward)
            assert isinstance(error, PeerFailed)
            assert "boom" in str(error)


@ranks(2)
def test_an_interrupt_while_another_rank_fails_leaves_nothing_behind(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    train(rank, model, optimizer, 3)
    optimizer.zero_grad()

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
