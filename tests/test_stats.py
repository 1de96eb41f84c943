"""``replica(model).stats()``: what real steps cost. Counts are exact, of times only the order is known."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DistributedDataParallel, accumulate, no_sync, replica, replicate
from paceline.hooks import in_dtype, noop, quantized
from paceline.stats import Stats, Times
from paceline.testing import ranks

PARAMETERS = 6 * 8 + 8 + 8 * 4 + 4


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def x() -> torch.Tensor:
    return torch.arange(24.0).view(4, 6) / 10


def step(model: nn.Module) -> None:
    model(x()).square().mean().backward()
    model.zero_grad()


def assert_in_order(times: Times) -> None:
    values = [value for value in dataclasses.astuple(times) if value is not None]
    assert all(value >= 0 for value in values), times
    assert times.communication_seconds > 0
    assert times.exposed_seconds > 0
    assert times.computation_seconds > 0
    assert times.overlapped_seconds <= times.communication_seconds
    # What has landed late was waited for, and what was waited for is at most from bucket to handing out.
    assert times.communication_seconds <= times.overlapped_seconds + times.exposed_seconds


@ranks(2)
def test_times_are_in_order_and_within_the_backward(rank):
    model = replicate(net())
    for _ in range(3):
        step(model)

    stats = replica(model).stats()
    assert_in_order(stats.last)
    assert_in_order(stats.mean)
    assert (stats.step, stats.timed_step, stats.timed_steps, stats.clock) == (2, 2, 3, "host")
    assert stats.last.forward_seconds is None  # nobody sees the forward of a module that is only watched


@ranks(2)
def test_a_wrapper_sees_the_forward(rank):
    model = DistributedDataParallel(net())
    step(model)

    stats = replica(model).stats()
    assert stats.last.forward_seconds > 0
    assert_in_order(stats.last)


@ranks(2)
def test_a_forward_without_gradients_is_not_timed(rank):
    model = DistributedDataParallel(net())
    step(model)
    with torch.no_grad():
        model(x())
    output = model.module(x())
    output.sum().backward()

    assert replica(model).stats().last.forward_seconds is None


@ranks(2)
def test_a_slow_rank_shows_as_waiting_on_the_other(rank):
    model = replicate(net())
    step(model)
    if rank == 1:
        dist.recv(torch.zeros(1), src=0, tag=9)  # rank 0 is sure to wait: it is there before this is sent
    else:
        replica(model).reducer.recorder._clocks[0].now = until_waiting(replica(model))
    step(model)

    times = replica(model).stats().last
    if rank == 0:
        assert times.waiting_seconds >= 1000.0
        assert times.computation_seconds < 1000.0
        assert times.exposed_seconds < 1000.0


def until_waiting(handle):
    """Return a clock that lets rank 1 go when it is read for the first time in a wait, and jumps then."""
    record = {"offset": 0.0}
    original = handle.reducer._wiring.control.collect

    def collect(topic, seconds, waiter=None):
        if topic.endswith(b"opening") and not record["offset"]:
            dist.send(torch.ones(1), dst=1, tag=9)
            record["offset"] = 1000.0
        return original(topic, seconds, waiter)

    handle.reducer._wiring.control.collect = collect
    return lambda: time.perf_counter() + record["offset"]


@ranks(2)
def test_a_step_is_counted_exactly(rank):
    model = replicate(net())
    step(model)
    step(model)

    stats = replica(model).stats()
    assert (stats.rank, stats.size, stats.hook) == (rank, 2, "average")
    assert (stats.collectives, stats.sent_nbytes, stats.buckets_reduced) == (1, 4 * PARAMETERS, 1)
    assert stats.bucket_nbytes == (4 * PARAMETERS,)
    assert (stats.unused, stats.unused_somewhere) == ((), ())
    assert (stats.local_backwards, stats.failed_backwards) == (0, 0)


@ranks(2)
def test_the_order_of_arrival_is_one_collective_more_in_the_first_step(rank):
    model = replicate(net())
    step(model)

    stats = replica(model).stats()
    # Four parameters, each with a number of four bytes.
    assert (stats.collectives, stats.sent_nbytes, stats.buckets_reduced) == (2, 4 * PARAMETERS + 4 * 4, 1)


@ranks(1)
def test_a_group_of_one_sends_no_order_of_arrival(rank):
    model = replicate(net())
    step(model)

    assert replica(model).stats().collectives == 1


@ranks(2)
def test_small_buckets_are_small_collectives(rank):
    model = replicate(net(), bucket_mb=1e-6)  # every parameter by itself
    step(model)
    step(model)

    stats = replica(model).stats()
    assert (stats.collectives, stats.buckets_reduced, stats.sent_nbytes) == (4, 4, 4 * PARAMETERS)
    assert sorted(stats.bucket_nbytes) == sorted(4 * n for n in (6 * 8, 8, 8 * 4, 4))


@ranks(2)
@pytest.mark.parametrize(
    ("hook", "collectives", "nbytes"),
    [
        (in_dtype(torch.bfloat16), 1, 2 * PARAMETERS),
        (noop, 0, 0),
        (quantized(bits=8, block=16), 1, 6 * (16 + 4)),  # 92 numbers are 6 blocks, each with its step
    ],
    ids=["bfloat16", "noop", "quantized"],
)
def test_what_a_hook_sends_is_what_is_counted(rank, hook, collectives, nbytes):
    model = replicate(net(), hook=hook)
    step(model)
    step(model)

    stats = replica(model).stats()
    assert (stats.collectives, stats.sent_nbytes) == (collectives, nbytes)
    assert (stats.last.communication_seconds > 0) == (collectives > 0)


@ranks(2)
def test_a_hook_in_torchs_form_is_not_counted_but_timed(rank):
    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    model = DistributedDataParallel(net())
    model.register_comm_hook(None, hook)
    step(model)

    stats = replica(model).stats()
    assert (stats.collectives, stats.sent_nbytes, stats.buckets_reduced) == (None, None, 1)
    assert stats.last.communication_seconds > 0
    assert "unknown bytes in unknown collectives" in str(stats)


@ranks(2)
def test_buffers_are_one_collective_more(rank):
    torch.manual_seed(0)
    model = replicate(nn.BatchNorm1d(6))
    step(model)
    step(model)

    stats = replica(model).stats()
    # Weight and bias; running mean, running variance, and a counter of 8 bytes.
    assert (stats.collectives, stats.sent_nbytes) == (2, 4 * 12 + 4 * 12 + 8)


@ranks(2)
def test_local_backwards_are_counted_beside_the_step(rank):
    model = replicate(net())
    with no_sync(model):
        model(x()).sum().backward()
        model(x()).sum().backward()
    assert replica(model).stats().step is None

    model(x()).sum().backward()

    stats = replica(model).stats()
    assert (stats.step, stats.local_backwards, stats.timed_steps, stats.buckets_reduced) == (0, 2, 1, 1)


@ranks(2)
def test_accumulation_is_one_step(rank):
    model = replicate(net())
    with accumulate(model, micro_batches=4):
        for _ in range(4):
            model(x()).sum().backward()

    stats = replica(model).stats()
    assert (stats.step, stats.local_backwards, stats.timed_steps) == (0, 3, 1)


@ranks(2)
def test_a_reduction_at_the_end_of_a_block_overlaps_with_nothing(rank):
    model = replicate(net())
    with accumulate(model, micro_batches=4):
        model(x()).sum().backward()

    stats = replica(model).stats()
    assert (stats.step, stats.local_backwards) == (0, 1)
    assert stats.last.overlapped_seconds == 0.0
    assert stats.last.communication_seconds > 0


@ranks(2)
def test_a_backward_that_fails_counts_as_failed_on_every_rank(rank):
    model = replicate(net())
    step(model)
    before = replica(model).stats()

    with pytest.raises((ZeroDivisionError, paceline.PeerFailed)):
        output = model(x())
        if rank == 1:
            output.register_hook(lambda gradient: 1 // 0)
        output.sum().backward()

    failed = replica(model).stats()
    assert failed == dataclasses.replace(before, failed_backwards=1)

    step(model)
    after = replica(model).stats()
    assert (after.step, after.failed_backwards, after.timed_steps) == (2, 1, 2)
    assert_in_order(after.last)


@ranks(2)
def test_unused_parameters_are_named(rank):
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes, self.never = (nn.Linear(6, 2, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.always(x) + self.sometimes(x) if rank == 0 else self.always(x)

    torch.manual_seed(0)
    model = replicate(Branches())
    step(model)

    stats = replica(model).stats()
    assert stats.unused == ("never.weight",)
    assert stats.unused_somewhere == ("sometimes.weight",)


@ranks(2)
def test_changes_of_the_plan_are_counted(rank):
    model = replicate(net(), bucket_mb=1e-6)
    assert replica(model).stats().plan_changes == 0
    step(model)
    learned = replica(model).stats().plan_changes
    assert learned <= 1  # if gradients did not come last registered first

    model[0].weight.requires_grad_(False)
    step(model)
    step(model)  # the first one found it unused
    assert replica(model).stats().plan_changes == learned + 1

    model[0].weight.requires_grad_(True)
    step(model)
    assert replica(model).stats().plan_changes == learned + 2


@ranks(2)
def test_a_rank_without_batches_keeps_the_count(rank):
    model = replicate(net())
    with paceline.join(model):
        for _ in range(1 + rank):
            step(model)

    stats = replica(model).stats()
    assert (stats.step, stats.collectives) == (1, 1)
    assert (stats.unused, stats.unused_somewhere) == ((), ())


@ranks(2)
def test_the_rate_of_timed_steps_can_be_set(rank):
    model = replicate(net())
    replica(model).sample_stats(every=5)
    for _ in range(13):
        step(model)

    stats = replica(model).stats()
    assert (stats.step, stats.timed_step, stats.timed_steps) == (12, 10, 11)
    with pytest.raises(ValueError, match="for a whole number n of 1 or more, got 0"):
        replica(model).sample_stats(every=0)


@ranks(2)
def test_an_optimizer_inside_backward_is_timed_like_any_other(rank):
    model = replicate(net())
    replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model)

    assert_in_order(replica(model).stats().last)


@ranks(1)
def test_a_group_of_one_rank_has_figures_too(rank):
    model = replicate(net())
    step(model)

    stats = replica(model).stats()
    assert (stats.step, stats.size, stats.buckets_reduced) == (0, 1, 1)


def test_a_process_alone_has_nothing_to_tell():
    model = replicate(net())
    step(model)

    stats = replica(model).stats()
    assert stats == Stats(0, 1, bucket_nbytes=(4 * PARAMETERS,), hook="average")
    assert stats.last == Times()
    assert str(stats) == "rank 0 of 1: no reduced backward yet"
    with pytest.raises(ValueError, match="got 0"):
        replica(model).sample_stats(every=0)


@ranks(2)
def test_a_module_with_nothing_to_train_has_nothing_to_tell(rank):
    model = replicate(nn.ReLU())

    assert replica(model).stats() == Stats(rank, 2, hook="average")


@ranks(2)
def test_after_detach_the_figures_are_gone(rank):
    model = replicate(net())
    step(model)
    handle = replica(model)
    handle.detach()

    assert handle.stats().step is None


@ranks(2)
def test_a_record_cannot_be_changed(rank):
    stats = replica(replicate(net())).stats()

    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.step = 3
