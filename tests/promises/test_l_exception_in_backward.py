"""L: an exception inside backward, caught, training goes on; or not caught, and the rank is gone."""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.testing import ranks
from tests.promises.libraries import REPLICATE, Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import Boom, MayFail, loss_of, small_model

WHERE = pytest.mark.parametrize("where", ["in the middle", "at the loss"])
FAILING = pytest.mark.parametrize("failing", [0, 1], ids=["rank 0 fails", "rank 1 fails"])


def fail_once(model: torch.nn.Module, where: str, failing: tuple[int, ...]) -> paceline.PeerFailed | None:
    """Run a backward that raises on some ranks; return what a rank that did not raise itself got to know."""
    if dist.get_rank() in failing:
        with pytest.raises(ValueError, match="boom in the attention") as own:
            model(share(batch()), where).backward()
        assert not getattr(own.value, "__notes__", [])
        return None
    with pytest.raises(paceline.PeerFailed) as caught:
        model(share(batch())).backward()
    return caught.value


def assert_trains(wrapped: torch.nn.Module, bare: torch.nn.Module, steps: int = 2) -> None:
    """Train on, and compare each step with one process on the whole batch."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        expected = reference(bare, lambda m: m(batch()).backward())
        wrapped(share(batch())).backward()
        assert verdict(wrapped, expected) == EQUAL
        optimizer.step()


@on_both
@WHERE
@FAILING
@ranks(2)
def test_peers_hear_of_an_exception_and_training_goes_on_everywhere(
    library: Library, where: str, failing: int
) -> None:
    model = MayFail()
    wrapped = library.wrap(model, bucket_cap_mb=1e-6)
    assert_trains(wrapped, model)

    error = fail_once(wrapped, where, (failing,))

    assert all(p.grad is None for p in model.parameters())
    if error is not None:
        assert error.rank == failing
        assert error.text == "ValueError: boom in the attention"
        assert f"step 2: rank {failing} raised during its backward: ValueError: boom" in str(error)
        assert "go on with the next step" in str(error)
    assert_trains(wrapped, model)


@WHERE
@ranks(3)
def test_the_very_first_backward_may_fail(rank: int, where: str) -> None:
    model = MayFail()
    REPLICATE.wrap(model)

    error = fail_once(model, where, (1,))

    texts = [text for text in gather(str(error or "")) if text]
    assert len(texts) == 2
    assert len(set(texts)) == 1
    assert_trains(model, model)


@WHERE
@ranks(3)
def test_ranks_that_fail_together_raise_their_own_and_the_rest_hears_of_the_first(where: str) -> None:
    model = MayFail()
    REPLICATE.wrap(model)

    error = fail_once(model, where, (0, 2))

    if error is not None:
        assert error.rank == 0
        assert "rank 2 failed too" in str(error)
    assert_trains(model, model)


@ranks(2)
def test_every_rank_may_fail_at_once_and_again() -> None:
    model = MayFail()
    REPLICATE.wrap(model)

    for failing in ((0, 1), (0,), (1,), (0, 1)):
        fail_once(model, "in the middle", failing)

    assert_trains(model, model)


@on_both
@ranks(2)
def test_a_step_after_a_failed_backward_moves_nothing(library: Library) -> None:
    model = MayFail()
    wrapped = library.wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    fail_once(wrapped, "in the middle", (1,))
    optimizer.step()

    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@ranks(2)
def test_an_exception_in_a_backward_that_is_not_ours_disturbs_nobody(rank: int) -> None:
    model = MayFail()
    REPLICATE.wrap(model)
    if rank == 0:
        other = torch.nn.Linear(4, 4)
        with pytest.raises(ValueError, match="boom"):
            Boom.apply(loss_of(other, batch())).backward()

    assert_trains(model, model)


@ranks(2)
def test_an_exception_inside_no_sync_is_the_rank_s_own_affair(rank: int) -> None:
    model = MayFail()
    REPLICATE.wrap(model)
    if rank == 0:
        with paceline.no_sync(model), pytest.raises(ValueError, match="boom"):
            model(share(batch()), "in the middle").backward()

    assert_trains(model, model)


# ---- not caught: the process is gone -----------------------------------------------------------------------


class Die(torch.autograd.Function):
    """End the process in backward, without a word."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient


def die_in_the_middle(model: torch.nn.Sequential) -> None:
    model[2](torch.tanh(Die.apply(model[0](share(batch()))))).sum().backward()


def die_at_the_loss(model: torch.nn.Sequential) -> None:
    Die.apply(loss_of(model, share(batch()))).backward()


def die_between_steps(model: torch.nn.Sequential) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_uncaught(model: torch.nn.Sequential) -> None:
    Boom.apply(loss_of(model, share(batch()))).backward()


def in_a_child(rank: int, size: int, folder: Path, body: Callable[[], None]) -> int:
    """Run a rank in a process of its own that may die; return its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# The timeout is the proof that it is quick: the group itself would wait for half an hour.
@pytest.mark.parametrize("die", [die_in_the_middle, die_at_the_loss, die_between_steps])
@ranks(3, timeout=30, backend=None)
def test_a_rank_that_dies_is_named_on_the_others(
    rank: int, size: int, tmp_path: Path, die: Callable[..., None]
) -> None:
    def body() -> None:
        model = REPLICATE.wrap(small_model(), bucket_cap_mb=1e-6)
        loss_of(model, share(batch())).backward()
        if rank == 1:
            die(model)
        with pytest.raises(paceline.PeerLost, match="rank 1 is gone") as caught:
            loss_of(model, share(batch())).backward()
        assert caught.value.rank == 1
        with pytest.raises(paceline.PeerLost, match="no reduction is possible any more: rank 1 is gone"):
            loss_of(model, share(batch())).backward()

    code = in_a_child(rank, size, tmp_path, body)

    assert code == (-signal.SIGKILL if rank == 1 else 0)


@on_both
@ranks(2, timeout=30, backend=None)
def test_an_uncaught_exception_is_told_first_and_then_the_rank_is_lost(
    rank: int, size: int, tmp_path: Path, library: Library
) -> None:
    def body() -> None:
        model = small_model()
        wrapped = library.wrap(model)
        loss_of(wrapped, share(batch())).backward()
        if rank == 1:
            raise_uncaught(model)
        with pytest.raises(paceline.PeerFailed, match="rank 1 raised during its backward: ValueError: boom"):
            loss_of(wrapped, share(batch())).backward()
        with pytest.raises(paceline.PeerLost, match="rank 1 is gone"):
            loss_of(wrapped, share(batch())).backward()

    code = in_a_child(rank, size, tmp_path, body)

    assert code == rank


@on_both
@ranks(2, timeout=30, backend=None)
def test_no_optimizer_moves_after_a_rank_is_lost(
    rank: int, size: int, tmp_path: Path, library: Library
) -> None:
    def body() -> None:
        model = small_model()
        wrapped = library.wrap(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        loss_of(wrapped, share(batch())).backward()
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        if rank == 1:
            die_in_the_middle(model)
        for _ in range(2):
            with pytest.raises(paceline.PeerLost):
                loss_of(wrapped, share(batch())).backward()
            optimizer.step()
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))

    code = in_a_child(rank, size, tmp_path, body)

    assert code == (-signal.SIGKILL if rank == 1 else 0)
