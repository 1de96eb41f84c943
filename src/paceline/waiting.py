"""A wait for other ranks that takes long: what is said about it, and when it is given up.

    0 s               stall_seconds              seconds
    └ nothing is said ┴ one line, and one again ──┴ PeerTimeout
                        when the picture changes

Whoever waits looks in here a few times a second. The time during which a missing rank is ``busy()`` does not
count.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from paceline.abandoned import cut_links_at_exit
from paceline.activity import where_now
from paceline.errors import PeerTimeout, name_ranks
from paceline.reporter import Desk, reporter
from paceline.reports import SILENT_SECONDS, Report, Wait

STALL_SECONDS = 10.0
LOOK_SECONDS = 0.5
LOOK_PAUSE = timedelta(seconds=LOOK_SECONDS)
AGAIN_SECONDS = 60.0
PAUSE_SECONDS = 1.0  # between two lines, whatever happens
SHOWN = 5  # missing ranks of which more is said than their number

logger = logging.getLogger("paceline")

Missing = Callable[[Mapping[int, Report]], Sequence[int]]  # the ranks that are waited for


class Waiter(Protocol):
    """Who waits, and can say what for. After ``stall_seconds`` a line says it."""

    @property
    def stall_seconds(self) -> float: ...

    def waits_for(self, topic: bytes) -> str:
        """Say it so that it can stand behind "has waited 10 s"."""


class Patience:
    """How long to wait for the other ranks of a comm, and where they report."""

    def __init__(self, rank: int, size: int, seconds: float, stall_seconds: float = STALL_SECONDS) -> None:
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.stall_seconds = stall_seconds
        self.look_seconds = min(LOOK_SECONDS, seconds, stall_seconds)  # how often a wait is looked at
        self.pause = timedelta(seconds=self.look_seconds)
        self.desk: Desk | None = None  # once the ranks are wired
        self.waiter: Waiter | None = None  # who waits for collectives

    def begins(self, topic: bytes = b"") -> "Waiting":
        """Return what to look into while a collective is waited for."""
        if self.waiter is not None:
            place = self.waiter.waits_for(topic)
        else:
            place = ", at ".join(filter(None, ["for a collective with the other ranks", where_now()]))
        return Waiting(self, place, self._not_waiting)

    def _not_waiting(self, reports: Mapping[int, Report]) -> Sequence[int]:
        """Return the ranks that hold a collective up, as far as can be seen: those that do not wait too."""
        others = (rank for rank in range(self.size) if rank != self.rank)
        return [rank for rank in others if rank not in reports or reports[rank].wait is None]


class Waiting:
    """One wait. Made when it has lasted a while; ``end()`` has to be called however it ends."""

    def __init__(
        self,
        patience: Patience,
        place: str,
        missing: Missing,
        began: float | None = None,
        wait: Wait | None = None,
    ) -> None:
        self._patience = patience
        self._missing = missing
        self.place = place
        self._wait = wait or Wait(0, 0, "", place)  # what the others are told of it
        self._began = self._last = time.monotonic() - patience.look_seconds if began is None else began
        self._spent = 0.0
        self._said_at = -AGAIN_SECONDS
        self._said: tuple[object, object] = ((), ())

    def look(self, wait: Wait | None = None) -> Mapping[int, Report]:
        """Say what there is to say, or raise PeerTimeout; return the others' reports.

        ``wait`` is what the others are to know of it by now.
        """
        desk = self._patience.desk
        if desk is not None:
            desk.wait = wait or self._wait
            reporter.report()
        reports = {} if desk is None else desk.reports.read()
        ages = {} if desk is None else {rank: desk.reports.now() - each.at for rank, each in reports.items()}
        missing, now = self._missing(reports), time.monotonic()
        silent = SILENT_SECONDS if desk is None else desk.reports.silent_seconds
        view = View(self._patience.rank, self._patience.size, self.place, missing, reports, ages, silent)
        if not view.someone_is_busy:
            self._spent += now - self._last
        self._last = now
        if self._spent >= self._patience.seconds:
            raise self._timeout(view)
        if now - self._began >= self._patience.stall_seconds and self._is_news(view, now):
            logger.warning("paceline: %s", view.line(now - self._began))
        return reports

    def _is_news(self, view: "View", now: float) -> bool:
        """Tell whether a line is due. What a slow rank does changes all the time; who is there does not."""
        since = now - self._said_at
        stall = self._patience.stall_seconds
        who, what = view.who, view.what
        is_due = (
            since >= AGAIN_SECONDS
            or (who != self._said[0] and since >= min(PAUSE_SECONDS, stall))
            or (what != self._said[1] and since >= stall)
        )
        if is_due:
            self._said_at, self._said = now, (who, what)
        return is_due

    def _timeout(self, view: "View") -> PeerTimeout:
        cut_links_at_exit()
        rank = view.missing[0] if view.missing else -1
        return PeerTimeout(
            f"{view.line(self._last - self._began)}. Ranks may keep each other waiting for "
            f"{self._patience.seconds:g} s: nothing can be reduced any more. Look at what the missing ranks "
            "are doing; put long work of one rank into busy(), or give replicate() more timeout_seconds.",
            rank,
        )

    def end(self) -> None:
        """Let the others know that this rank waits no more."""
        if (desk := self._patience.desk) is not None:
            desk.wait = None
            reporter.report()


class View:
    """Who is there and who is not, and what they do, at one moment."""

    def __init__(
        self,
        rank: int,
        size: int,
        place: str,
        missing: Sequence[int],
        reports: Mapping[int, Report],
        ages: Mapping[int, float],
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._rank = rank
        self._place = place
        self.missing = missing
        self._here = [each for each in range(size) if each not in set(missing)]
        self._reports = reports
        self._ages = ages
        self._silent_seconds = silent_seconds

    def _is_silent(self, rank: int) -> bool:
        return self._ages.get(rank, 0.0) > self._silent_seconds

    def _is_busy(self, rank: int) -> bool:
        # Who has stopped altogether is not busy.
        return rank in self._reports and bool(self._reports[rank].busy) and not self._is_silent(rank)

    @property
    def someone_is_busy(self) -> bool:
        """Whether a missing rank has said that it needs the time."""
        return any(self._is_busy(rank) for rank in self.missing)

    @property
    def who(self) -> object:
        """What makes a new line worth its place at once."""
        return [(rank, self._is_silent(rank), self._is_busy(rank)) for rank in self.missing]

    @property
    def what(self) -> object:
        """What makes a new line worth its place after a while."""
        reports = [self._reports.get(rank) for rank in self.missing]
        return [None if report is None else (report.busy or report.phase) for report in reports]

    def line(self, waited: float) -> str:
        """Put all of it into words."""
        here = f"{name_ranks(self._here)} {'is' if len(self._here) == 1 else 'are'} here"
        told = [self._about(rank) for rank in self.missing[:SHOWN]]
        more = [f"{len(self.missing) - SHOWN} more are missing"] if len(self.missing) > SHOWN else []
        clock = ["the clock stands still meanwhile"] if self.someone_is_busy else []
        parts = "; ".join([here, *told, *more, *clock])
        return f"rank {self._rank} has waited {_seconds(waited)} {self._place}: {parts}"

    def _about(self, rank: int) -> str:
        report, age = self._reports.get(rank), self._ages.get(rank, 0.0)
        if report is None:
            return f"rank {rank} is missing and has not reported yet"
        if self._is_silent(rank):
            return f"rank {rank} is missing: stopped answering {_seconds(age)} ago, last seen: {report.words}"
        state = "busy" if report.busy else "missing"
        return f"rank {rank} is {state}: {report.words} ({_seconds(max(0.0, age))} ago)"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
