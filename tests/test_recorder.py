"""The arithmetic of a step's figures, on a clock that only goes when it is told to."""

import pytest
import torch

from paceline.clocks import CudaClock, HostClock, clocks_for
from paceline.comm import SoloComm
from paceline.hooks import FromTorch, average, in_dtype, sends_by_comm
from paceline.recorder import CountedComm, Recorder, StepRecord
from paceline.stats import Stats, Times, mean_of


class Hand:
    """A clock's hand: reading it changes nothing, going on does."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def goes(self, seconds: float) -> None:
        self.time += seconds


class StreamClock:
    """A GPU's clock: its readings can be used when ``reached`` is as far."""

    def __init__(self, hand: Hand) -> None:
        self.now = hand
        self.reached = float("inf")
        self.is_stopped = False

    def seconds(self, start: float, end: float) -> float:
        assert self.has_passed(end), "the host would have waited here"
        return end - start

    def has_passed(self, reading: float) -> bool:
        return reading <= self.reached

    def is_running(self) -> bool:
        return not self.is_stopped


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def recorder(hand: Hand) -> Recorder:
    return Recorder([HostClock(hand)])


def run(recorder: Recorder, hand: Hand, step: int = 0, slowness: int = 1, *, buckets: int = 2) -> None:
    """Run a step: forward 1 s, backward 2 s to the first bucket and 3 s more, then 4 s and 5 s."""
    recorder.forward_begins()
    hand.goes(1 * slowness)
    recorder.forward_ends()
    hand.goes(100)  # the loss: nobody's time
    recorder.backward_begins()
    hand.goes(2 * slowness)
    record = recorder.start(step, in_backward=True)
    send(record, buckets)
    hand.goes(3 * slowness)
    record.has_computed()
    record.has_computed()
    hand.goes(4 * slowness)
    record.has_landed()
    hand.goes(5 * slowness)
    record.is_handed_out()
    hand.goes(100)  # what an optimizer inside backward does
    recorder.finish(record, step)


def send(record: StepRecord, buckets: int) -> None:
    comm = CountedComm(SoloComm(), record)
    for _ in range(buckets):
        record.hands_over()
        comm.average(torch.zeros(10))


def test_a_step_is_cut_where_the_picture_says(recorder, hand):
    run(recorder, hand)

    assert recorder.stats().last == Times(
        forward_seconds=1.0,
        computation_seconds=5.0,
        waiting_seconds=0.0,
        communication_seconds=7.0,
        overlapped_seconds=3.0,
        exposed_seconds=9.0,
    )


def test_means_are_over_the_timed_steps(recorder, hand):
    run(recorder, hand, 0, slowness=1)
    run(recorder, hand, 1, slowness=2)
    run(recorder, hand, 2, slowness=6)

    stats = recorder.stats()
    assert (stats.mean.computation_seconds, stats.last.computation_seconds) == (15.0, 30.0)
    assert (stats.mean.forward_seconds, stats.timed_steps, stats.timed_step) == (3.0, 3, 2)


def test_means_forget_what_is_more_than_a_hundred_steps_ago(recorder, hand):
    run(recorder, hand, 0, slowness=1000)
    for step in range(1, 101):
        run(recorder, hand, step)

    stats = recorder.stats()
    assert (stats.timed_steps, stats.mean.computation_seconds) == (100, 5.0)


def test_a_mean_is_over_the_steps_that_have_the_figure():
    seen = [Times(forward_seconds=1.0), Times(), Times(forward_seconds=3.0)]

    assert mean_of(seen) == Times(forward_seconds=2.0)
    assert mean_of([]) == Times()


def test_waiting_for_a_rank_that_comes_late_is_not_computation(recorder, hand):
    recorder.backward_begins()
    hand.goes(2)
    record = recorder.start(0, in_backward=True)
    since = record.waits()
    hand.goes(50)
    record.has_waited(since)
    send(record, 1)
    hand.goes(3)
    record.has_computed()
    hand.goes(4)
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 0)

    times = recorder.stats().last
    assert (times.computation_seconds, times.waiting_seconds, times.exposed_seconds) == (5.0, 50.0, 4.0)


def test_waiting_after_the_computation_is_not_exposed_communication(recorder, hand):
    recorder.backward_begins()
    record = recorder.start(0, in_backward=True)
    hand.goes(2)
    record.has_computed()
    since = record.waits()
    hand.goes(50)
    record.has_waited(since)
    send(record, 1)
    hand.goes(3)
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 0)

    times = recorder.stats().last
    assert (times.computation_seconds, times.waiting_seconds, times.exposed_seconds) == (2.0, 50.0, 3.0)
    assert (times.communication_seconds, times.overlapped_seconds) == (3.0, 0.0)


def test_a_step_that_sends_nothing_has_no_communication(recorder, hand):
    recorder.backward_begins()
    record = recorder.start(0, in_backward=True)
    record.hands_over()  # to a hook that does nothing
    hand.goes(3)
    record.has_computed()
    hand.goes(3)
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 0)

    stats = recorder.stats()
    assert (stats.last.communication_seconds, stats.last.overlapped_seconds) == (0.0, 0.0)
    assert (stats.collectives, stats.sent_nbytes, stats.buckets_reduced) == (0, 0, 1)


def test_a_hook_that_sends_by_itself_is_timed_and_not_counted(recorder, hand):
    recorder.backward_begins()
    record = recorder.start(0, in_backward=True, is_counted=False)
    record.hands_over()
    record.has_computed()
    hand.goes(3)
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 0)

    stats = recorder.stats()
    assert (stats.last.communication_seconds, stats.collectives, stats.sent_nbytes) == (3.0, None, None)


def test_hooks_in_torchs_form_are_those_that_send_by_themselves():
    def hook(state, bucket):
        return torch.futures.Future()

    assert sends_by_comm(average)
    assert sends_by_comm(in_dtype(torch.bfloat16, average))
    assert not sends_by_comm(FromTorch(None, hook))
    assert not sends_by_comm(in_dtype(torch.bfloat16, FromTorch(None, hook)))


def test_collectives_and_bytes_are_counted(recorder, hand):
    run(recorder, hand, buckets=3)

    stats = recorder.stats()
    assert (stats.collectives, stats.sent_nbytes, stats.buckets_reduced) == (3, 120, 3)


def test_a_counted_comm_counts_every_kind_of_collective(recorder):
    record = recorder.start(0, in_backward=False)
    comm = CountedComm(SoloComm(), record)

    comm.total(torch.zeros(1))
    comm.average(torch.zeros(2))
    comm.broadcast(torch.zeros(4))
    comm.gather(torch.zeros(8, dtype=torch.bfloat16))

    assert (record.collectives, record.nbytes) == (4, 4 + 8 + 16 + 16)


def test_a_reduction_without_a_backward_has_no_computation(recorder, hand):
    recorder.backward_begins()  # of another model
    hand.goes(1000)
    record = recorder.start(0, in_backward=False)
    record.has_computed()
    send(record, 1)
    hand.goes(2)
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 0)

    times = recorder.stats().last
    assert (times.computation_seconds, times.communication_seconds, times.exposed_seconds) == (0.0, 2.0, 2.0)
    assert times.forward_seconds is None


def test_a_forward_counts_for_one_step_only(recorder, hand):
    run(recorder, hand, 0)
    record = recorder.start(1, in_backward=True)
    record.has_computed()
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 1)

    assert recorder.stats().last.forward_seconds is None


def test_a_forward_that_raised_is_not_counted(recorder, hand):
    recorder.forward_begins()
    hand.goes(7)
    record = recorder.start(0, in_backward=True)
    record.is_handed_out()
    recorder.finish(record, 0)

    assert recorder.stats().last.forward_seconds is None


def test_a_backward_that_failed_leaves_the_figures_as_they_were(recorder, hand):
    run(recorder, hand, 0)
    before = recorder.stats()
    recorder.backward_begins()
    hand.goes(1000)
    recorder.counts_local()
    record = recorder.start(1, in_backward=True)
    send(record, 5)
    recorder.fail(2, "RuntimeError: no")

    after = recorder.stats()
    assert (after.failed_backwards, before.failed_backwards) == (1, 0)
    assert (after.last, after.mean, after.step, after.collectives) == (before.last, before.mean, 0, 2)

    run(recorder, hand, 2)
    assert recorder.stats().last == before.last
    assert (recorder.stats().step, recorder.stats().local_backwards) == (2, 0)


def test_local_backwards_are_counted_until_the_next_step(recorder, hand):
    recorder.counts_local()
    recorder.counts_local()
    run(recorder, hand, 0)
    assert recorder.stats().local_backwards == 2

    run(recorder, hand, 1)
    assert recorder.stats().local_backwards == 0


def test_a_plan_that_stays_the_same_is_no_change(recorder):
    for digest in (b"a", b"a", b"b", b"b", b"a"):
        recorder.plans(digest)

    assert recorder.stats().plan_changes == 2


# ---- which steps are timed --------------------------------------------------------------------------


def timed_steps(recorder: Recorder, hand: Hand, steps: int) -> list[int]:
    seen = []
    for step in range(steps):
        run(recorder, hand, step)
        assert recorder.stats().step == step
        seen.append(recorder.stats().timed_step)
    return sorted(set(seen))


def test_on_a_cpu_every_step_is_timed(recorder, hand):
    assert timed_steps(recorder, hand, 25) == list(range(25))


def test_a_rate_leaves_out_steps_after_the_tenth(recorder, hand):
    recorder.sample(4)

    assert timed_steps(recorder, hand, 21) == [*range(10), 12, 16, 20]


def test_what_is_not_timed_is_counted(recorder, hand):
    recorder.sample(1000)
    for step in range(12):
        run(recorder, hand, step, buckets=step)

    stats = recorder.stats()
    assert (stats.step, stats.collectives, stats.timed_step) == (11, 11, 9)


@pytest.mark.parametrize("every", [0, -1, 1.5, "2", None])
def test_a_rate_below_one_is_refused(recorder, every):
    with pytest.raises(ValueError, match="every n-th step is timed, for a whole number n of 1 or more, got"):
        recorder.sample(every)


# ---- a GPU's clock ----------------------------------------------------------------------------------


@pytest.fixture
def stream(hand: Hand) -> StreamClock:
    return StreamClock(hand)


def test_a_stream_has_its_own_times_and_the_host_the_waiting(hand):
    stream_hand = Hand()
    recorder = Recorder([HostClock(hand), StreamClock(stream_hand)])
    recorder.backward_begins()
    record = recorder.start(0, in_backward=True)
    since = record.waits()
    hand.goes(10)
    record.has_waited(since)
    send(record, 1)
    stream_hand.goes(3)
    record.has_computed()
    stream_hand.goes(4)
    record.has_landed()
    record.is_handed_out()
    recorder.finish(record, 0)

    stats = recorder.stats()
    assert stats.clock == "cuda"
    assert stats.last == Times(None, 3.0, 10.0, 7.0, 3.0, 4.0)


def test_figures_of_a_stream_that_is_behind_come_later(hand, stream):
    recorder = Recorder([HostClock(hand), stream])
    run(recorder, hand, 0)
    stream.reached = hand.time - 150
    run(recorder, hand, 1)

    early = recorder.stats()
    assert (early.step, early.timed_step, early.timed_steps) == (1, None, 0)
    assert early.last == early.mean == Times()

    stream.reached = hand.time
    late = recorder.stats()
    assert (late.step, late.timed_step, late.timed_steps) == (1, 1, 2)


def test_on_a_gpu_every_hundredth_step_is_timed(hand, stream):
    assert timed_steps(Recorder([HostClock(hand), stream]), hand, 202) == [*range(10), 100, 200]


def test_a_step_on_a_stopped_clock_is_not_timed(hand, stream):
    recorder = Recorder([HostClock(hand), stream])
    stream.is_stopped = True

    run(recorder, hand, 0)

    assert (recorder.stats().step, recorder.stats().timed_step) == (0, None)


def test_the_clock_follows_the_devices():
    cpu, gpu, other = (torch.device(name) for name in ("cpu", "cuda:1", "cuda:2"))

    def kinds(*devices: torch.device) -> list[type]:
        return [type(clock) for clock in clocks_for([Placed(device) for device in devices])]

    assert kinds(cpu, cpu) == [HostClock]
    assert kinds(gpu, gpu) == [HostClock, CudaClock]
    assert kinds(gpu, other) == kinds(cpu, gpu) == kinds(torch.device("meta")) == []


class Placed:
    """Something on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def test_without_a_clock_nothing_is_timed_and_everything_counted(hand):
    recorder = Recorder([])
    run(recorder, hand, 0)

    stats = recorder.stats()
    assert (stats.clock, stats.timed_step, stats.step, stats.collectives) == (None, None, 0, 2)
    assert "cannot be measured here" in str(stats)


# ---- as a table -------------------------------------------------------------------------------------


def test_the_table_has_every_figure_in_milliseconds(recorder, hand):
    run(recorder, hand, 3)

    table = str(recorder.stats(rank=1, size=2, hook="average", unused=("a", "b", "c", "d", "e")))
    assert table.splitlines()[0] == "step 3 on rank 1 of 2"
    assert "  exposed         9,000.000 ms   9,000.000 ms" in table
    assert "80 bytes in 2 collectives, 2 buckets" in table
    assert "by every rank: a, b, c and 2 more; by some: none" in table
    assert max(map(len, table.splitlines())) <= 100


def test_the_table_says_so_before_the_first_step():
    assert str(Stats(0, 2)) == "rank 0 of 2: no reduced backward yet"
