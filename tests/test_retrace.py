"""A communication hook that raises on one rank: the others hear of it, and training goes on."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.comm import Comm, Pending
from paceline.hooks import GradBucket, in_dtype, powersgd
from paceline.testing import ranks
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, small_model


class Fails:
    """A hook of a user's that raises once, on one rank and at one bucket."""

    def __init__(self, inner: Callable[[GradBucket, Comm], Pending], place: str) -> None:
        self.inner = inner
        self.place = place
        self.is_due = False

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        if self.is_due and bucket.index == 1 and self.place == "before":
            raise ValueError("boom in the hook")
        pending = self.inner(bucket, comm)
        if self.is_due and bucket.index == 1 and self.place == "after":
            raise ValueError("boom in the hook")
        return Late(pending) if self.is_due and bucket.index == 1 and self.place == "wait" else pending

    __qualname__ = "fails"


class Late(Pending):
    def __init__(self, inner: Pending) -> None:
        self._inner = inner

    def wait(self) -> torch.Tensor:
        raise ValueError("boom in the hook")


def mean(bucket: GradBucket, comm: Comm) -> Pending:
    return comm.average(bucket.flat)


class MeanOfRows(Pending):
    def __init__(self, rows: Pending) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        return self._rows.wait().mean(0)


def gathered(bucket: GradBucket, comm: Comm) -> Pending:
    """Take the mean by another collective."""
    return MeanOfRows(comm.gather(bucket.flat))


def assert_trains(model: nn.Module) -> None:
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    for _ in range(2):
        model.zero_grad()
        loss_of(model, share(batch())).backward()
        assert verdict(model, expected) == EQUAL


@pytest.mark.parametrize("place", ["before", "after", "wait"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "inner", [mean, gathered, in_dtype(torch.float64, mean)], ids=["mean", "gather", "in_dtype"]
)
@ranks(3)
def test_a_hook_that_raises_on_one_rank_is_heard_of_and_training_goes_on(
    inner: Callable[[GradBucket, Comm], Pending], failing: int, place: str, rank: int
) -> None:
    hook = Fails(inner, place)
    model = paceline.replicate(small_model(), hook=hook, bucket_mb=1e-4)
    assert_trains(model)
    hook.is_due = rank == failing
    with pytest.raises(
        ValueError if rank == failing else paceline.PeerFailed, match="boom in the hook"
    ) as caught:
        loss_of(model, share(batch())).backward()
    hook.is_due = False
    if rank != failing:
        assert caught.value.rank == failing
        assert "the communication hook raised on rank" in str(caught.value)
        assert "go on with the next step" in str(caught.value)
    assert all(p.grad is None for p in model.parameters())
    assert_trains(model)
    total = torch.ones(1)
    dist.all_reduce(total)  # the user's own collectives match as well
    assert total.item() == 3


@ranks(2)
def test_powersgd_that_fails_on_one_rank_can_be_gone_on_with(rank: int) -> None:
    torch.manual_seed(1)
    hook = Fails(powersgd(rank=1, min_compression=1.0), "after")
    model = paceline.replicate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), hook=hook, bucket_mb=1e-4)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    hook.is_due = rank == 1
    with pytest.raises(ValueError if rank else paceline.PeerFailed, match="boom in the hook"):
        model(x).sum().backward()
    hook.is_due = False
    model(x).sum().backward()
    assert all(map(torch.equal, *gather([p.grad for p in model.parameters()])))


def past_the_comm(bucket: GradBucket, comm: Comm) -> Pending:
    dist.all_reduce(bucket.flat)
    return Pending(bucket.flat)


@ranks(2, timeout=30)
def test_collectives_that_do_not_go_through_the_comm_end_it(rank: int) -> None:
    model = paceline.replicate(small_model(), hook=mean)
    loss_of(model, share(batch())).backward()

    def odd(bucket: GradBucket, comm: Comm) -> Pending:
        if rank == 0:
            work = dist.all_reduce(bucket.flat, async_op=True)
            KEPT.append(work)
            return Pending(bucket.flat)
        raise ValueError("boom in the hook")

    odd.label = "odd"
    paceline.replica(model).set_hook(odd)
    with pytest.raises(ValueError if rank else paceline.PeerFailed, match="boom in the hook"):
        loss_of(model, share(batch())).backward()
    with pytest.raises(paceline.PeerLost, match="no reduction is possible any more"):
        loss_of(model, share(batch())).backward()
    if rank:
        dist.all_reduce(torch.zeros(sum(p.numel() for p in model.parameters())))


KEPT: list[object] = []
