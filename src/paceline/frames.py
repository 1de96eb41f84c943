"""The control frames of one backward, as bytes and back.

opening   when the first gradient arrives: which step, which plan, or why this rank cannot take part
closing   when all buckets are out: which parameters got a gradient here, or what went wrong since
"""

import struct
from array import array
from dataclasses import dataclass, field

_OPENING = struct.Struct("!Q8s")
_CLOSING = struct.Struct("!II")


@dataclass(frozen=True)
class Opening:
    """Sent before the first bucket. A rank with a ``failure`` sends no bucket in this backward."""

    step: int
    digest: bytes
    failure: str = ""

    def pack(self) -> bytes:
        return _OPENING.pack(self.step, self.digest) + self.failure.encode()

    @classmethod
    def unpack(cls, frame: bytes) -> "Opening":
        step, digest = _OPENING.unpack_from(frame)
        return cls(step, digest, frame[_OPENING.size :].decode(errors="replace"))


@dataclass(frozen=True)
class Closing:
    """Sent after the last bucket.

    ``used`` has a byte per parameter, 1 where this rank has a gradient to add; empty means all of them.
    ``arrival`` is the order in which gradients came, where it is asked for.
    """

    used: bytes = b""
    arrival: tuple[int, ...] = field(default=())
    failure: str = ""

    def pack(self) -> bytes:
        order = array("I", self.arrival).tobytes()
        return _CLOSING.pack(len(self.used), len(order)) + self.used + order + self.failure.encode()

    @classmethod
    def unpack(cls, frame: bytes) -> "Closing":
        used, order = _CLOSING.unpack_from(frame)
        start = _CLOSING.size
        middle = start + used
        end = middle + order
        arrival = tuple(array("I", frame[middle:end]))
        return cls(frame[start:middle], arrival, frame[end:].decode(errors="replace"))
