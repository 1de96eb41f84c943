"""Times several variants of the same work so that their ratios can be trusted on a noisy machine.

    cycle   every variant once, in an order that is shuffled anew each time and is the same on all ranks
    slot    one variant's turn: everybody meets, one step to warm up, then a few timed steps
    quiet   a cycle in which processes that are not ours used next to nothing

Ratios are taken within a cycle and then their median, so slow drifts cancel out.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf

QUIET_CORES = 0.08  # what others may use in a quiet cycle
FEW = 6  # samples, below which even their whole range says less than 95 %
ENOUGH = 8  # quiet cycles, below which all cycles are taken
JIFFIES_PER_SECOND = 100  # the unit of /proc/stat, on every Linux that matters


@dataclass
class Variant:
    """One way to do a step. ``active`` surrounds its turns, for what must not disturb the other variants."""

    name: str
    step: Callable[[], None]
    active: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass
class Cycle:
    """What one rank saw of one cycle: seconds per step by variant, and who used the machine."""

    steps: dict[str, float]  # on the clock
    cpu: dict[str, float]  # of this process's threads, waiting not counted
    wall: float
    own_cpu: float
    all_cpu: float


@dataclass
class Samples:
    """Seconds per step by variant, cycle by cycle, over all ranks."""

    steps: dict[str, list[float]]  # quiet cycles only, if there are enough
    cpu: dict[str, list[float]]  # all cycles
    cycles: int  # how many were run
    quiet: int  # how many of them were quiet

    @property
    def is_quiet(self) -> bool:
        """Whether the times come from quiet cycles."""
        return self.quiet >= ENOUGH or self.quiet == self.cycles

    @property
    def kept(self) -> str:
        """Say how many cycles the times come from."""
        if self.is_quiet:
            return f"{self.quiet} of {self.cycles} cycles"
        return f"all {self.cycles} cycles, {self.quiet} quiet"

    def median(self, name: str) -> float:
        return statistics.median(self.steps[name])

    def ratio(self, name: str, other: str) -> "Estimate":
        """Compare the time of two variants cycle by cycle."""
        return estimate([a / b for a, b in zip(self.steps[name], self.steps[other], strict=True)])

    def cpu_ratio(self, name: str, other: str) -> "Estimate":
        """Compare the CPU seconds of two variants cycle by cycle: blind for waiting, but hardly disturbed."""
        return estimate([a / b for a, b in zip(self.cpu[name], self.cpu[other], strict=True)])

    @property
    def medians(self) -> dict[str, dict[str, float]]:
        """Every variant's median seconds per step, on the clock and of the CPU."""
        kinds = {"median_seconds": self.steps, "median_cpu_seconds": self.cpu}
        return {kind: {n: statistics.median(v) for n, v in of.items()} for kind, of in kinds.items()}


@dataclass(frozen=True)
class Estimate:
    """A median and the interval in which the true median lies with 95 % probability; endless if unknown."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high == self.median:
            return f"{self.median:g}"  # a count
        if self.high == inf:
            return f"{self.median:.3f} (few samples)"
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def estimate(values: Sequence[float]) -> Estimate:
    """Take the median, with an interval from the order of the values alone."""
    ordered = sorted(values)
    if len(ordered) < FEW:
        return Estimate(statistics.median(ordered), -inf, inf)
    half = 0.98 * len(ordered) ** 0.5
    low = max(0, int(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, int(len(ordered) / 2 + half))
    return Estimate(statistics.median(ordered), ordered[low], ordered[high])


def exactly(number: float) -> Estimate:
    """Give a count, which has no noise, as an estimate."""
    return Estimate(number, number, number)


def run_cycles(
    variants: Sequence[Variant],
    *,
    seconds: float,
    slot_seconds: float,
    share: Callable[[float], float],
    minimum: int = 3,
) -> list[Cycle]:
    """Run cycles for about ``seconds``. Every rank calls it with the same variants.

    ``share`` returns rank 0's number on every rank, and so keeps them together.
    """
    for variant in variants:
        with variant.active():
            for _ in range(3):  # torch's DDP and paceline settle on their buckets in the first steps
                variant.step()
    steps = max(1, int(share(slot_seconds / _slowest(variants))))
    order = list(variants)
    shuffle = random.Random(0).shuffle
    cycles: list[Cycle] = []
    end = time.monotonic() + seconds
    gc.collect()
    gc.disable()
    try:
        while share(len(cycles) < minimum or time.monotonic() < end):
            shuffle(order)
            cycles.append(_cycle(order, steps, share))
            gc.collect()
    finally:
        gc.enable()
    return cycles


def _slowest(variants: Sequence[Variant]) -> float:
    times = []
    for variant in variants:
        with variant.active():
            start = time.perf_counter()
            variant.step()
            times.append(time.perf_counter() - start)
    return max(times)


def _cycle(order: Sequence[Variant], steps: int, share: Callable[[float], float]) -> Cycle:
    spent: dict[str, float] = {}
    cpu: dict[str, float] = {}
    wall, own, everyone = time.perf_counter(), time.process_time(), busy_seconds()
    for variant in order:
        with variant.active():
            share(0)
            variant.step()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                variant.step()
            spent[variant.name] = (time.perf_counter() - start) / steps
            cpu[variant.name] = (time.process_time() - cpu_start) / steps
    share(0)
    wall, own = time.perf_counter() - wall, time.process_time() - own
    return Cycle(spent, cpu, wall, own, busy_seconds() - everyone)


def busy_seconds() -> float:
    """Read how much CPU time all processes of this machine have used, stolen time included."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, *rest = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(rest)) / JIFFIES_PER_SECOND


def merge(by_rank: Sequence[Sequence[Cycle]]) -> Samples:
    """Join what the ranks saw, and keep the quiet cycles: a step takes as long as its ranks do on average."""
    rows = list(zip(*by_rank, strict=True))
    quiet = [row for row in rows if _others(row) < QUIET_CORES]
    kept = quiet if len(quiet) >= ENOUGH else rows
    return Samples(_columns(kept, "steps"), _columns(rows, "cpu"), len(rows), len(quiet))


def _columns(rows: Sequence[Sequence[Cycle]], kind: str) -> dict[str, list[float]]:
    names = getattr(rows[0][0], kind)
    return {
        name: [statistics.mean(getattr(cycle, kind)[name] for cycle in row) for row in rows] for name in names
    }


def _others(row: Sequence[Cycle]) -> float:
    """How many cores were used by processes that are not ours."""
    return (row[0].all_cpu - sum(cycle.own_cpu for cycle in row)) / row[0].wall
