"""What a step costs, as a record that cannot change: seconds, bytes and counts.

    backward() begins                                          gradients are handed out
    │                                                                                 │
    ├─ gradients ──── first bucket out ──── ... ──── autograd has ended ─── landed ───┤
    │                 ├──────────── communication_seconds ─────────────────────┤      │
    │                 ├── overlapped_seconds ────────────┤                            │
    ├──────────────── computation_seconds ───────────────┼───── exposed_seconds ──────┤

waiting_seconds, for ranks that have not begun this backward yet, are part of neither computation nor exposed.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import name_some

Seconds = float | None
ClockName = Literal["host", "cuda"]


@dataclass(frozen=True)
class Times:
    """Seconds of one step, or their means over several. None: not seen here, or not yet."""

    forward_seconds: Seconds = None  # the last forward before this backward, where a wrapper sees it
    computation_seconds: Seconds = None  # backward, until autograd has ended
    waiting_seconds: Seconds = None  # for ranks that had not begun this backward; always the host's
    communication_seconds: Seconds = None  # from the first bucket out until the last result has landed
    overlapped_seconds: Seconds = None  # of these, while autograd was still computing
    exposed_seconds: Seconds = None  # after autograd has ended, until the gradients are handed out


@dataclass(frozen=True)
class Stats:
    """Figures of the last reduced backward that succeeded, and means over those that were timed."""

    rank: int = 0
    size: int = 1
    step: int | None = None  # as messages count it; None before the first
    timed_step: int | None = None  # the step that ``last`` is about
    last: Times = Times()
    mean: Times = Times()
    timed_steps: int = 0  # how many the means are over
    clock: ClockName | None = None  # whose seconds these are; None: nothing can be timed
    collectives: int | None = 0  # of this step; None: the hook talks to torch.distributed by itself
    sent_nbytes: int | None = 0  # what this rank has put into them
    buckets_reduced: int = 0
    bucket_nbytes: tuple[int, ...] = ()  # of the plan as it is now
    plan_changes: int = 0  # since the module was replicated
    local_backwards: int = 0  # in no_sync() or accumulate(), before this step
    failed_backwards: int = 0  # reduced ones that raised, since the module was replicated
    skipped_steps: int = 0  # that all ranks have dropped: check_finite="skip", or an audit that healed
    unused: tuple[str, ...] = ()  # parameters that no rank used in this step
    unused_somewhere: tuple[str, ...] = ()  # used on some ranks only
    hook: str = ""

    def __str__(self) -> str:
        """Draw a table."""
        return "\n".join(_lines(self))


def mean_of(timed: Sequence[Times]) -> Times:
    """Take the mean of each figure over the steps that have it."""

    def mean(name: str) -> Seconds:
        seen = [value for times in timed if (value := getattr(times, name)) is not None]
        return statistics.fmean(seen) if seen else None

    return Times(**{field.name: mean(field.name) for field in dataclasses.fields(Times)})


def _lines(stats: Stats) -> list[str]:
    if stats.step is None:
        return [f"rank {stats.rank} of {stats.size}: no reduced backward yet"]
    return [
        f"step {stats.step} on rank {stats.rank} of {stats.size}",
        *_times_table(stats),
        f"  sent           {_number(stats.sent_nbytes)} bytes in {_number(stats.collectives)} collectives, "
        f"{stats.buckets_reduced} buckets",
        f"  hook           {stats.hook}",
        f"  plan           {len(stats.bucket_nbytes)} buckets, changes so far: {stats.plan_changes}",
        f"  backwards      {stats.local_backwards} local before it; failed so far: {stats.failed_backwards}",
        f"  unused         by every rank: {_names(stats.unused)}; by some: {_names(stats.unused_somewhere)}",
    ]


def _times_table(stats: Stats) -> list[str]:
    if stats.timed_step is None:
        return [
            "  time           not measured yet" if stats.clock else "  time           cannot be measured here"
        ]
    rows = [(f"{stats.clock} time", f"step {stats.timed_step}", f"mean of {stats.timed_steps}")]
    for field in dataclasses.fields(Times):
        last, mean = getattr(stats.last, field.name), getattr(stats.mean, field.name)
        rows.append((field.name.removesuffix("_seconds"), _ms(last), _ms(mean)))
    return [f"  {name:<15}{last:>13}{mean:>15}" for name, last, mean in rows]


def _ms(seconds: Seconds) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.3f} ms"


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _names(names: Sequence[str]) -> str:
    return name_some(names, limit=3) or "none"
