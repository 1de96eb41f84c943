"""What every control plane offers, and the one of a process alone."""

import contextlib
import struct
import zlib
from abc import ABC, abstractmethod
from collections import deque

from paceline.control.lost import ClosedHere, gone
from paceline.errors import PacelineError
from paceline.interrupts import interrupts
from paceline.reporter import Desk
from paceline.waiting import Waiter

Topic = bytes

HEAR_SECONDS = 60.0  # how long a rank that was interrupted waits for the others' frames


class Control(ABC):
    """Frames among all ranks of a comm."""

    posts_alone = False  # post() needs no other rank, not even later
    is_local = False  # all ranks are on this machine
    label = b""  # the same on all ranks, different for each group
    desk: Desk | None = None  # where the ranks report what they do
    epoch = 0  # how often all ranks have dropped every exchange that was under way

    def __init__(self) -> None:
        self._replicas = 0
        self.ended: Exception | None = None  # why no collective beside this control plane can be trusted
        self.collectives = 0  # that were started beside this control plane
        self.trace = 0  # stands for the order of everything that was sent beside this control plane

    def new_name(self) -> bytes:
        """Name a replica: the same on every rank, because replicas are made by all ranks together."""
        self._replicas += 1
        return b"%b#%d" % (self.label, self._replicas)

    def note(self, sent: bytes) -> None:
        """Note that a bucket goes out, so that ranks with another order are found out."""
        self.trace = zlib.crc32(sent, self.trace)

    @abstractmethod
    def post(self, topic: Topic, frame: bytes) -> None:
        """Send this rank's frame to every rank. Does not wait for anybody."""

    @abstractmethod
    def ready(self, topic: Topic) -> bool:
        """Tell whether ``collect()`` would return at once, or raise. Does not wait."""

    def peek(self, topic: Topic) -> list[bytes]:
        """Return the next frames of a topic that are there already. Ranks that cannot look return none."""
        return []

    @abstractmethod
    def collect(self, topic: Topic, seconds: float, waiter: Waiter | None = None) -> list[bytes]:
        """Return every rank's frame of a topic that this rank has posted, by rank.

        Raises PeerLost naming a rank that is gone, PeerTimeout if one is missing for longer than ``seconds``.
        ``waiter`` can say what is waited for, and after how many seconds a line has to tell it.
        """

    def exchange(
        self, topic: Topic, frame: bytes, seconds: float, waiter: Waiter | None = None
    ) -> list[bytes]:
        """Post a frame and collect everybody's.

        Who is interrupted meanwhile hears the others out before it goes on: they have heard this rank, and
        its next exchange would be answered by the frames of this one.
        """
        self.post(topic, frame)
        try:
            return self.hear(topic, seconds, waiter)
        except PacelineError:  # there is nothing to hear
            raise
        except BaseException:
            with contextlib.suppress(PacelineError):
                self.collect(topic, min(seconds, HEAR_SECONDS), waiter)
            raise

    def hear(self, topic: Topic, seconds: float, waiter: Waiter | None = None) -> list[bytes]:
        """Collect; where interrupts are put off, one does not end the wait, but makes it shorter."""
        try:
            return self.collect(topic, seconds, waiter)
        except PacelineError:  # no interrupt
            raise
        except BaseException as error:
            interrupts.keep(error)
            return self.collect(topic, min(seconds, HEAR_SECONDS), waiter)

    def close(self, why: str) -> None:
        """Say nothing to any rank any more. ``why`` is what this process says of it later."""
        self.ended = self.ended or gone(-1, ClosedHere(why))


class SoloControl(Control):
    """A world of one talks to itself."""

    is_local = True

    def __init__(self) -> None:
        super().__init__()
        self._frames: dict[Topic, deque[bytes]] = {}

    def post(self, topic: Topic, frame: bytes) -> None:
        self._frames.setdefault(topic, deque()).append(frame)

    def ready(self, topic: Topic) -> bool:
        return True

    def collect(self, topic: Topic, seconds: float, waiter: Waiter | None = None) -> list[bytes]:
        return [self._frames[topic].popleft()]


_LENGTH = struct.Struct("!H")


def pack(topic: Topic, frame: bytes) -> bytes:
    """Put a topic before a frame."""
    return _LENGTH.pack(len(topic)) + topic + frame


def unpack(message: bytes) -> tuple[Topic, bytes]:
    """Part them again."""
    (length,) = _LENGTH.unpack_from(message)
    return message[2 : 2 + length], message[2 + length :]
