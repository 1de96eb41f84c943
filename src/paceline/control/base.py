"""What every control plane offers, and the one of a process alone."""

import struct
from abc import ABC, abstractmethod
from collections import deque

Topic = bytes


class Control(ABC):
    """Frames among all ranks of a comm."""

    def __init__(self) -> None:
        self._replicas = 0

    def new_name(self) -> bytes:
        """Name a replica: the same on every rank, because replicas are made by all ranks together."""
        self._replicas += 1
        return str(self._replicas).encode()

    @abstractmethod
    def post(self, topic: Topic, frame: bytes) -> None:
        """Send this rank's frame to every rank. Does not wait for anybody."""

    @abstractmethod
    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        """Return every rank's frame of a topic that this rank has posted, by rank.

        Raises PeerLost naming a rank that is gone, or silent for longer than ``seconds``.
        """


class SoloControl(Control):
    """A world of one talks to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: dict[Topic, deque[bytes]] = {}

    def post(self, topic: Topic, frame: bytes) -> None:
        self._frames.setdefault(topic, deque()).append(frame)

    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        return [self._frames[topic].popleft()]


def pack(topic: Topic, frame: bytes) -> bytes:
    """Put a topic before a frame."""
    return struct.pack("!H", len(topic)) + topic + frame


def unpack(message: bytes) -> tuple[Topic, bytes]:
    """Part them again."""
    (length,) = struct.unpack_from("!H", message)
    return message[2 : 2 + length], message[2 + length :]
