"""What each rank last reported to be doing, where the others can read it without that rank's help.

On one machine every rank writes into a page of shared memory of its own:

    [ length | checksum ][ report ]

Over several machines the reports are in the group's store. A rank that is stopped writes no more, and the age
of its last report shows it.
"""

import json
import mmap
import os
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

BEAT_SECONDS = 0.5  # how often a rank reports
SILENT_SECONDS = 2.0  # a rank that has reported nothing for so long does not answer
STORE_SECONDS = 2.0  # how often a report goes into a store, at least
FEW = 8  # ranks that may put theirs there at every beat while they wait
TEXT_LIMIT = 300  # characters of one field

_HEAD = struct.Struct("!II")


@dataclass(frozen=True)
class Wait:
    """An exchange that a rank waits in: the topic, for whom, and all that can tell if it will ever end.

    ``posts`` counts the frames that it has sent, ``heard`` those that it has got, by rank.
    """

    number: int
    epoch: int
    topic: str
    place: str
    missing: Sequence[int] = ()
    posts: int = 0
    heard: Sequence[int] = ()
    trace: int = 0
    is_sure: bool = True  # nobody else in that process could post meanwhile


@dataclass(frozen=True)
class Report:
    """What a rank is doing. ``busy`` is what it said itself; ``where`` a line of the user's code."""

    at: float
    phase: str
    where: str = ""
    busy: str = ""
    wait: Wait | None = None

    def pack(self) -> bytes:
        wait = None if self.wait is None else list(vars(self.wait).values())
        texts = [text[:TEXT_LIMIT] for text in (self.phase, self.where, self.busy)]
        return json.dumps([self.at, *texts, wait]).encode()

    @classmethod
    def unpack(cls, frame: bytes) -> "Report":
        at, phase, where, busy, wait = json.loads(frame)
        return cls(at, phase, where, busy, None if wait is None else Wait(*wait))

    @property
    def words(self) -> str:
        """What the rank does, and where."""
        return ", ".join(part for part in (self.busy or self.phase, self.where) if part)


class Reports(ABC):
    """The reports of all ranks of a group."""

    silent_seconds = SILENT_SECONDS

    @abstractmethod
    def now(self) -> float:
        """Tell the time by the clock that all ranks' reports go by."""

    @abstractmethod
    def write(self, report: Report) -> None:
        """Put this rank's report where the others find it. Does not wait."""

    @abstractmethod
    def read(self) -> dict[int, Report]:
        """Return the others' latest reports, of those that have left one. Does not wait."""

    @abstractmethod
    def beat(self) -> None:
        """Do what may have to wait. Called on a thread of its own."""


class SharedReports(Reports):
    """A page of shared memory for each rank."""

    def __init__(self, mine: "Page", theirs: dict[int, "Page"]) -> None:
        self._mine = mine
        self._theirs = theirs
        self._seen: dict[int, Report] = {}

    def now(self) -> float:
        return time.monotonic()

    def write(self, report: Report) -> None:
        self._mine.write(report.pack())

    def read(self) -> dict[int, Report]:
        for rank, page in self._theirs.items():
            if (frame := page.read()) is not None:
                self._seen[rank] = Report.unpack(frame)
        return dict(self._seen)

    def beat(self) -> None:
        pass


class Page:
    """One rank's report, as a view of shared memory."""

    def __init__(self, file: int, size: int) -> None:
        nbytes = 4096 * (1 + size // 64)
        os.ftruncate(file, nbytes)
        self._memory = mmap.mmap(file, nbytes)

    def write(self, frame: bytes) -> None:
        """Write a report; one that is too long is left out."""
        whole = _HEAD.pack(len(frame), zlib.crc32(frame)) + frame
        if len(whole) <= len(self._memory):
            self._memory[: len(whole)] = whole

    def read(self) -> bytes | None:
        """Return the report, or None if there is none, or if it is being written right now."""
        for _ in range(3):
            length, checksum = _HEAD.unpack_from(self._memory)
            frame = self._memory[_HEAD.size : _HEAD.size + length]
            if length and zlib.crc32(frame) == checksum:
                return frame
        return None


class StoreReports(Reports):
    """The reports in a store. Only ``beat()`` talks to it, so that nobody who trains waits for it.

    The clocks of several machines differ, so a report is as old as the last change that was seen of it here.
    """

    silent_seconds = SILENT_SECONDS + 2 * STORE_SECONDS  # on its way in, and out again

    def __init__(self, store: Any, rank: int, size: int, name: str = "") -> None:
        self._store = store
        self._name = f"paceline/report/{name}"
        self._rank = rank
        self._size = size
        self._latest: Report | None = None
        self._seen: dict[int, Report] = {}
        self._written: dict[int, float] = {}  # when, by the clock of the other rank
        self._last = -STORE_SECONDS  # when this rank's report was put there, and how busy it was
        self._busy = ""
        self._wanted_until = 0.0

    def now(self) -> float:
        return time.monotonic()

    def write(self, report: Report) -> None:
        self._latest = report

    def read(self) -> dict[int, Report]:
        self._wanted_until = time.monotonic() + 2 * STORE_SECONDS
        return dict(self._seen)

    def beat(self) -> None:
        now, report = time.monotonic(), self._latest
        # Whether a rank is busy stops the clock of the others, so they hear of it at once.
        if report is None or (now < self._last + self._pause(now) and report.busy == self._busy):
            return
        self._last, self._busy = now, report.busy
        self._store.set(self._key(self._rank), report.pack())
        if now < self._wanted_until:
            for rank in range(self._size):
                if rank != self._rank and self._store.check([self._key(rank)]):
                    self._take(rank, Report.unpack(self._store.get(self._key(rank))))

    def _pause(self, now: float) -> float:
        """Return how long to leave the store alone. Few ranks that wait may look at each other often."""
        if now >= self._wanted_until:
            return STORE_SECONDS
        return min(STORE_SECONDS, BEAT_SECONDS * (self._size / FEW) ** 2)  # every pair is a request

    def _take(self, rank: int, report: Report) -> None:
        if report.at != self._written.get(rank):
            self._written[rank] = report.at
            self._seen[rank] = replace(report, at=self.now())

    def _key(self, rank: int) -> str:
        return f"{self._name}{rank}"
