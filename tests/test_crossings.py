"""Collectives of the script's own inside a backward: buckets come on the same side of them on every rank."""

import copy
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.backward import SyncedBackward
from paceline.crossings import Care
from paceline.errors import RanksDisagree
from paceline.frames import Closing
from paceline.plan import Spec, plan_buckets
from paceline.tally import Outcome, Tally
from paceline.testing import ranks

SIZE = 2
SMALL = 1e-5  # MiB: a bucket for each parameter


class Summed(torch.autograd.Function):
    """The sum over the ranks, forward and backward, as SyncBatchNorm takes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: Callable[[], None]) -> torch.Tensor:
        ctx.seen = seen
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen()
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient, None


class Gathered(torch.autograd.Function):
    """All ranks' rows; the gradient is what all ranks want of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(rows, x.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(SIZE)[dist.get_rank()]


def nothing() -> None:
    """See nothing."""


class Centred(nn.Module):
    """Layers, and between them the mean of the whole batch taken off. Alone it does without the others."""

    def __init__(self, width: int = 8, out: int = 8) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below = nn.Linear(6, width)
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.above = nn.Linear(width, out)
        self.alone = False
        self.expert = [0]  # for each part of the batch
        self.gathers = False
        self.seen: Callable[[], None] = nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.below(x)
        if self.gathers:
            everyones = x if self.alone else Gathered.apply(x)
            x = x - everyones.mean(0)
        else:
            total = x.sum(0) if self.alone else Summed.apply(x.sum(0), self.seen)
            x = x - total / (len(x) if self.alone else len(x) * SIZE)
        parts = zip(x.chunk(len(self.expert)), self.expert, strict=True)
        return self.above(torch.cat([torch.tanh(self.experts[number](part)) for part, number in parts]))


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rank: int, steps: int = 6, skew: float = 0.0, differ: bool = False) -> None:
    """Train a replica and the same model alone, and compare the weights."""
    module = getattr(model, "module", model)
    alone = copy.deepcopy(module)
    alone.alone = True
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(steps):
        module.expert = [(rank + step) % 2] if differ else [0, 1]
        alone.expert = [step % 2, (step + 1) % 2] if differ else [0, 1, 0, 1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(rows(step).chunk(SIZE)[rank]).square().mean()
        time.sleep(skew * ((step + rank) % 2))
        loss.backward()
        alone(rows(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, one), other in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@ranks(SIZE)
@pytest.mark.parametrize("gathers", [False, True], ids=["sum", "gather"])
@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_ranks_that_are_ahead_send_no_bucket_on_the_other_side(
    rank: int, wrap: Callable[..., nn.Module], gathers: bool
) -> None:
    model = Centred()
    model.gathers = gathers
    sizes = {"bucket_cap_mb": SMALL} if wrap is paceline.DistributedDataParallel else {"bucket_mb": SMALL}

    train(wrap(model, **sizes), rank, skew=0.05)


@ranks(SIZE)
@pytest.mark.parametrize("differ", [False, True])
def test_so_it_is_where_a_backward_reaches_two_replicas(rank: int, differ: bool) -> None:
    model = Centred()
    first = paceline.replicate(nn.Sequential(model.below), bucket_mb=SMALL)  # which reduces it for the model

    train(paceline.replicate(model, bucket_mb=SMALL), rank, differ=differ, skew=0.05)

    assert paceline.replica(first).reducer.care.is_crossed


@ranks(SIZE)
def test_a_bucket_of_the_size_of_such_a_collective_is_not_taken_for_it(rank: int) -> None:
    train(paceline.replicate(Centred(width=8, out=1), bucket_mb=SMALL), rank, skew=0.05)


@ranks(SIZE)
def test_parameters_that_ranks_use_differently_hold_no_bucket_up_across_it(rank: int) -> None:
    train(paceline.replicate(Centred(), bucket_mb=SMALL), rank, differ=True)


@ranks(SIZE)
@pytest.mark.parametrize("differ", [False, True])
def test_buckets_still_go_out_before_it_where_all_parameters_are_used(rank: int, differ: bool) -> None:
    model = paceline.replicate(Centred(), bucket_mb=SMALL)
    reducer: Any = paceline.replica(model).reducer
    sent: list[int] = []
    model.seen = lambda: sent.append(len(reducer.open_backward._flights))

    train(model, rank, steps=3, differ=differ)

    # The first backward finds out. Then both of `above` and both experts go out, if they are complete on all.
    assert sent == ([0, 0, 0] if differ else [0, 4, 4])


@ranks(SIZE)
def test_who_says_that_parameters_will_go_unused_need_not_show_it_first(rank: int) -> None:
    model = paceline.DistributedDataParallel(Centred(), bucket_cap_mb=SMALL, find_unused_parameters=True)

    train(model, rank, steps=2)
    train(model, rank, differ=True)


class Alike(nn.Module):
    """Two parameters, and between them a sum of just their size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.below, self.above = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.below
        return torch.tanh(x - Summed.apply(x.sum(0), nothing) / (len(x) * SIZE)) * self.above


@ranks(SIZE)
def test_a_bucket_that_has_crossed_such_a_collective_is_found_out(rank: int) -> None:
    model = paceline.replicate(Alike(), bucket_mb=SMALL)
    before = copy.deepcopy(model)
    late = mock.patch.object(SyncedBackward, "_send_complete")
    early = mock.patch.object(Care, "holds", return_value=False)

    loss = model(rows(0).chunk(SIZE)[rank]).square().mean()
    with (
        late if rank else early,
        pytest.raises(RanksDisagree, match="a bucket and a collective of the") as told,
    ):
        loss.backward()

    assert "process group of their own" in str(told.value)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    model(rows(0).chunk(SIZE)[rank]).square().mean().backward()
    gradients = [torch.empty(6) for _ in range(SIZE)]
    dist.all_gather(gradients, model.above.grad)
    assert torch.equal(*gradients)


@ranks(SIZE)
def test_messages_from_rank_to_rank_are_no_reason_to_raise(rank: int) -> None:
    model = paceline.replicate(Centred(), bucket_mb=SMALL)

    under_way: list[Any] = []

    def tell() -> None:
        if rank == 0:
            under_way.append(dist.isend(torch.ones(1), dst=1))

    for step in range(3):
        model.seen = tell
        model(rows(step).chunk(SIZE)[rank]).square().mean().backward()
        if rank == 1:
            dist.recv(torch.zeros(1), src=0)
    for work in under_way:
        work.wait()


def tally(*closings: Closing) -> Tally:
    plan = plan_buckets([Spec("w", (2,), torch.float32, torch.device("cpu"), (1,))])
    return Tally(closings, plan, 0, range(len(closings)))


def test_orders_are_compared_among_ranks_with_the_same_numbers() -> None:
    assert not tally(Closing(others=2, order=7), Closing(others=2, order=7)).is_mixed_up
    assert tally(Closing(others=2, order=7), Closing(others=2, order=8)).is_mixed_up
    assert not tally(Closing(others=2, order=7), Closing(others=3, order=8)).is_mixed_up
    assert tally(
        Closing(others=1, order=7), Closing(others=2, order=7), Closing(others=2, order=8)
    ).is_mixed_up


def test_that_a_script_has_collectives_of_its_own_is_news_once() -> None:
    news = Closing(trace=3, crossed=True, others=2, order=9)
    known = news._replace(crossed=False)

    assert not news.is_plain
    assert known.is_plain
    assert [Closing.unpack(closing.pack()) for closing in (news, known)] == [news, known]
    assert tally(news, known).outcome.is_crossed


def test_nothing_goes_out_early_in_the_first_backward_or_where_parameters_go_unused() -> None:
    care, crossed = Care(), Outcome(is_crossed=True)
    assert care.holds(is_first=True)
    assert not care.holds(is_first=False)

    care.learn(crossed)
    assert not care.holds(is_first=False)
    care.learn(Outcome({0: [0, 1]}, frozenset({0})))
    assert care.holds(is_first=False)
