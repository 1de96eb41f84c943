"""Takes the figures of a replica while it trains. The engine says what happens, ``stats()`` reads.

A timed step costs some readings of a clock and nothing else: no operator, no lock, no waiting. Which steps
are timed depends on their number alone, so it is the same steps on every rank.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from paceline.clocks import Clock
from paceline.comm import Comm, Pending
from paceline.control import Control
from paceline.stats import ClockName, Stats, Times, mean_of

WINDOW = 100  # how many timed steps the means go over
ALWAYS_TIMED = 10  # the first steps
DEVICE_EVERY = 100  # and every n-th after them, where events have to be recorded on a stream


class Readings:
    """What one clock showed in one step."""

    def __init__(self, clock: Clock, began: Any, forward: tuple[Any, Any] | None) -> None:
        self.clock = clock
        self.forward = forward
        self.began = began
        self.handed: Any = None  # the first bucket to the hook
        self.computed: Any = None
        self.landed: Any = None
        self.done: Any = None

    def _seconds(self, start: Any, end: Any) -> float:
        return 0.0 if start is None or end is None else max(0.0, self.clock.seconds(start, end))

    def times(self, *, sent: bool, waited: tuple[float, float] = (0.0, 0.0)) -> Times:
        """Work out the figures. ``waited``: how long before autograd had ended, and after."""
        communication = self._seconds(self.handed, self.landed) if sent else 0.0
        return Times(
            forward_seconds=None if self.forward is None else self._seconds(*self.forward),
            computation_seconds=max(0.0, self._seconds(self.began, self.computed) - waited[0]),
            waiting_seconds=sum(waited),
            communication_seconds=communication,
            overlapped_seconds=min(communication, self._seconds(self.handed, self.computed)),
            exposed_seconds=max(0.0, self._seconds(self.computed, self.done) - waited[1]),
        )


class StepRecord:
    """One reduced backward, as the engine tells it. A step that is not timed only counts."""

    def __init__(self, step: int, readings: Sequence[Readings], *, is_counted: bool, local: int) -> None:
        self.step = step
        self.readings = readings  # of the host, then of the device if it has a clock; none if not timed
        self.is_counted = is_counted
        self.local_backwards = local
        self.buckets = 0
        self.collectives = 0
        self.beside: Control | None = None  # counts those of all replicas over a group
        self.nbytes = 0
        self.arrival: Mapping[int, None] = {}  # the parameters, in the order in which gradients came
        self.active: Sequence[int] = ()  # the ranks that had a batch
        self._waited = [0.0, 0.0]

    def waits(self) -> Any:
        """Note that the host is going to wait for other ranks; hand the result to ``has_waited()``."""
        return self.readings[0].clock.now() if self.readings else None

    def has_waited(self, since: Any) -> None:
        """Note that all of them are here."""
        if self.readings:
            host = self.readings[0]
            self._waited[host.computed is not None] += host.clock.seconds(since, host.clock.now())

    def hands_over(self) -> None:
        """Note that a bucket goes to the hook."""
        self.buckets += 1
        for each in self.readings:
            each.handed = each.clock.now() if each.handed is None else each.handed

    def sends(self, flat: torch.Tensor) -> None:
        """Note a tensor that goes out in one collective."""
        self._counts(1, flat.nbytes)

    def sends_numbers(self, count: int) -> None:
        """Note whole numbers that go out in one collective (see ``Comm.numbers_of``)."""
        self._counts(1, 4 * count)

    def counts(self, tensors: Iterable[torch.Tensor], collectives: int) -> None:
        """Note tensors that go out in some collectives."""
        self._counts(collectives, sum(tensor.nbytes for tensor in tensors))

    def _counts(self, collectives: int, nbytes: int) -> None:
        self.collectives += collectives
        self.nbytes += nbytes
        if self.beside is not None:
            self.beside.collectives += collectives

    def has_computed(self) -> None:
        """Note that autograd has ended; the first call counts."""
        for each in self.readings:
            each.computed = each.clock.now() if each.computed is None else each.computed

    def has_landed(self) -> None:
        """Note that everything has come that the ranks send each other."""
        for each in self.readings:
            each.landed = each.clock.now()

    def is_handed_out(self) -> None:
        """Note that the gradients are where the optimizer looks for them."""
        for each in self.readings:
            each.done = each.clock.now()

    def has_passed(self) -> bool:
        """Tell whether the figures can be worked out without waiting."""
        return all(each.clock.has_passed(each.done) for each in self.readings)

    @cached_property
    def times(self) -> Times:
        """The figures, by the device's clock if it has one. Only for what has passed."""
        sent = self.collectives > 0 or not self.is_counted
        host, *devices = self.readings
        before, after = self._waited
        if not devices:
            return host.times(sent=sent, waited=(before, after))
        # The stream goes on while the host waits, so nothing is to be taken off.
        return dataclasses.replace(devices[0].times(sent=sent), waiting_seconds=before + after)


class Recorder:
    """Keeps the figures of one replica. To be read on the thread that trains."""

    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks = clocks  # as clocks_for() gives them
        self._every = DEVICE_EVERY if len(clocks) > 1 else 1
        self._next = 0  # the step to come
        self._forward: list[
            list[Any]
        ] = []  # of the last forward: the clocks when it began, and when it ended
        self._began: list[Any] = []  # the clocks when the present backward began
        self._local = 0
        self._digest = b""
        self._timed: deque[StepRecord] = deque(maxlen=WINDOW)
        self.last: StepRecord | None = None
        self.plan_changes = 0
        self.failed = 0
        self.skipped = 0
        self.error = ""  # what the last reduced backward that failed raised

    def sample(self, every: int) -> None:
        """Time only every n-th step after the first ten."""
        check_rate(every)
        self._every = every

    def _is_timed(self, step: int) -> bool:
        if not self._clocks or (step >= ALWAYS_TIMED and step % self._every):
            return False
        return len(self._clocks) == 1 or all(clock.is_running() for clock in self._clocks)

    def _now(self) -> list[Any]:
        return [clock.now() for clock in self._clocks]

    # ---- what the engine tells -------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Note that a forward begins whose gradients are wanted."""
        self._forward = [self._now()] if self._is_timed(self._next) else []

    def forward_ends(self) -> None:
        """Note that it is over."""
        if len(self._forward) == 1:
            self._forward.append(self._now())

    def backward_begins(self) -> None:
        """Note that a backward begins, of this replica or of another."""
        self._began = self._now() if self._is_timed(self._next) else []

    def counts_local(self) -> None:
        """Note a backward that is not reduced."""
        self._local += 1

    def start(self, step: int, *, in_backward: bool, is_counted: bool = True) -> StepRecord:
        """Begin a step.

        ``in_backward``: autograd runs, and had said so; ``is_counted``: the hook sends by the comm it is
        given.
        """
        readings: list[Readings] = []
        if self._is_timed(step):
            began = self._began if in_backward and self._began else self._now()
            forwards = list(zip(*self._forward, strict=True)) if len(self._forward) == 2 else []
            for place, clock in enumerate(self._clocks):
                readings.append(Readings(clock, began[place], forwards[place] if forwards else None))
        return StepRecord(step, readings, is_counted=is_counted, local=self._local)

    def finish(self, record: StepRecord, step: int, active: Sequence[int] = ()) -> None:
        """Keep a step that has succeeded, with the number that the ranks agreed on and who had a batch."""
        record.step, record.active = step, active
        if self.last is not None:
            self.last.arrival = {}
        self.last = record
        self._begin_anew(step + 1)
        if record.readings:
            self._timed.append(record)

    def fail(self, step: int, error: str) -> None:
        """Forget a step that has raised; the next one is ``step``."""
        self.failed += 1
        self.error = error
        self._begin_anew(step)

    def plans(self, digest: bytes) -> None:
        """Note the plan that holds from now on."""
        self.plan_changes += self._digest not in (b"", digest)
        self._digest = digest

    def _begin_anew(self, step: int) -> None:
        self._next, self._local, self._forward, self._began = step, 0, [], []

    # ---- what is asked ---------------------------------------------------------------------------

    def stats(self, **known: Any) -> Stats:
        """Return what was recorded, beside what is known from elsewhere."""
        timed = self._passed()
        stats = Stats(
            timed_step=timed[-1].step if timed else None,
            last=timed[-1].times if timed else Times(),
            mean=mean_of([record.times for record in timed]),
            timed_steps=len(timed),
            clock=self._clock_name(),
            plan_changes=self.plan_changes,
            failed_backwards=self.failed,
            skipped_steps=self.skipped,
            **known,
        )
        last = self.last
        if last is None:
            return stats
        return dataclasses.replace(
            stats,
            step=last.step,
            collectives=last.collectives if last.is_counted else None,
            sent_nbytes=last.nbytes if last.is_counted else None,
            buckets_reduced=last.buckets,
            local_backwards=last.local_backwards,
        )

    @property
    def last_timed(self) -> StepRecord | None:
        """The last step whose figures are there."""
        return next(iter(self._passed()[-1:]), None)

    def _passed(self) -> list[StepRecord]:
        return [record for record in self._timed if record.has_passed()]

    def _clock_name(self) -> ClockName | None:
        names: tuple[ClockName | None, ...] = (None, "host", "cuda")
        return names[len(self._clocks)]


class CountedComm(Comm):
    """A comm whose collectives are counted for a step."""

    def __init__(self, inner: Comm, record: StepRecord) -> None:
        self._inner = inner
        self._record = record
        self.rank, self.size, self.divisor = inner.rank, inner.size, inner.divisor
        self.seconds = inner.seconds

    def mean_factor(self, device: torch.device) -> float:
        return self._inner.mean_factor(device)

    def started_on(self) -> int:
        return self._inner.started_on()

    def total(self, flat: torch.Tensor) -> Pending:
        self._record.sends(flat)
        return self._inner.total(flat)

    def average(self, flat: torch.Tensor) -> Pending:
        self._record.sends(flat)
        return self._inner.average(flat)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        self._record.sends(flat)
        return self._inner.broadcast(flat, source)

    def gather(self, flat: torch.Tensor) -> Pending:
        self._record.sends(flat)
        return self._inner.gather(flat)

    def exchange(self, flat: torch.Tensor) -> Pending:
        self._record.sends(flat)
        return self._inner.exchange(flat)

    def split(self, size: int) -> Comm:
        return self._inner.split(size)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return self._inner.gather_bytes(payload)


def check_rate(every: int) -> None:
    """Refuse what cannot be a rate of timed steps."""
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every n-th step is timed, for a whole number n of 1 or more, got {every!r}")
