"""The control frames of one backward, as bytes and back.

opening   when the first gradient arrives: which step, which plan, or why this rank cannot take part
closing   when all buckets are out: which parameters got a gradient here, or what went wrong since
"""

import struct
from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise

_OPENING = struct.Struct("!Q8s")
_CLOSING = struct.Struct("!5I")


@dataclass(frozen=True)
class Opening:
    """Sent before the first bucket. A rank with a ``failure`` sends no bucket in this backward."""

    step: int
    digest: bytes
    failure: str = ""

    def pack(self) -> bytes:
        return _OPENING.pack(self.step, self.digest) + _encode(self.failure)

    @classmethod
    def unpack(cls, frame: bytes) -> "Opening":
        step, digest = _OPENING.unpack_from(frame)
        return cls(step, digest, frame[_OPENING.size :].decode(errors="replace"))


@dataclass(frozen=True)
class Closing:
    """Sent after the last bucket.

    ``trace`` stands for everything that this rank has sent so far, and in which order.
    ``used`` has a byte per parameter, 1 where this rank has a gradient to add; empty means all of them.
    ``arrival`` is the order in which gradients came, where it is asked for. ``late`` are the parameters that
    got one more gradient after their bucket was out.
    """

    trace: int = 0
    used: bytes = b""
    arrival: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    failure: str = ""

    def pack(self) -> bytes:
        parts = (self.used, _pack(self.arrival), _pack(self.late), _encode(self.failure))
        return _CLOSING.pack(self.trace, *(len(part) for part in parts)) + b"".join(parts)

    @classmethod
    def unpack(cls, frame: bytes) -> "Closing":
        trace, *lengths = _CLOSING.unpack_from(frame)
        ends = accumulate(lengths, initial=_CLOSING.size)
        used, arrival, late, failure = (frame[start:end] for start, end in pairwise(ends))
        return cls(trace, used, _unpack(arrival), _unpack(late), failure.decode(errors="replace"))


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _pack(numbers: tuple[int, ...]) -> bytes:
    return array("I", numbers).tobytes()


def _unpack(numbers: bytes) -> tuple[int, ...]:
    return tuple(array("I", numbers))
