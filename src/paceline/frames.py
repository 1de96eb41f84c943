"""The control frames of one backward, as bytes and back.

opening   when the first gradient arrives: which step, which plan, or why this rank cannot take part
closing   when all buckets are out: which parameters got a gradient here, or what went wrong since
round     between the collectives of a hook that has several, or that may fail: whether all is well
"""

import struct
from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise

_OPENING = struct.Struct("!Q8sI?")
_CLOSING = struct.Struct("!?7I")


@dataclass(frozen=True)
class Opening:
    """Sent before the first bucket. A rank with a ``failure`` sends no bucket in this backward.

    ``terms`` stands for what else has to be the same: the hook and its settings. A rank that has ``joined``
    has run out of batches, and only keeps the others company.
    """

    step: int
    digest: bytes
    terms: int = 0
    joined: bool = False
    failure: str = ""

    def pack(self) -> bytes:
        return _OPENING.pack(self.step, self.digest, self.terms, self.joined) + _encode(self.failure)

    @classmethod
    def unpack(cls, frame: bytes) -> "Opening":
        step, digest, terms, joined = _OPENING.unpack_from(frame)
        return cls(step, digest, terms, joined, frame[_OPENING.size :].decode(errors="replace"))


@dataclass(frozen=True)
class Closing:
    """Sent after the last bucket.

    ``trace`` stands for everything that this rank has sent so far, and in which order.
    ``used`` has a byte per parameter, 1 where this rank has a gradient to add; empty means all of them.
    ``arrival`` is the order in which gradients came, where it is asked for. ``late`` are the parameters that
    got one more gradient after their bucket was out. ``sparse`` has three numbers for each gradient that
    travels by itself: the parameter, how many rows it has, and whether it came as a dense one. ``buffers``
    says which of them changed here (see paceline.buffers). A rank that is ``stuck`` has not sent everything,
    because its hook raised.
    """

    trace: int = 0
    used: bytes = b""
    arrival: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()
    failure: str = ""
    stuck: bool = False
    buffers: bytes = b""

    def pack(self) -> bytes:
        numbers = (_pack(self.arrival), _pack(self.late), _pack(self.sparse))
        parts = (self.used, *numbers, self.buffers, _encode(self.failure))
        return _CLOSING.pack(self.stuck, self.trace, *(len(part) for part in parts)) + b"".join(parts)

    @classmethod
    def unpack(cls, frame: bytes) -> "Closing":
        stuck, trace, *lengths = _CLOSING.unpack_from(frame)
        ends = accumulate(lengths, initial=_CLOSING.size)
        used, *numbers, buffers, failure = (frame[start:end] for start, end in pairwise(ends))
        arrival, late, sparse = map(_unpack, numbers)
        return cls(trace, used, arrival, late, sparse, failure.decode(errors="replace"), stuck, buffers)


@dataclass(frozen=True)
class Round:
    """Sent when this rank is through with one collective of each bucket. ``more``: and has started others."""

    more: bool = False
    failure: str = ""

    def pack(self) -> bytes:
        return bytes([self.more]) + _encode(self.failure)

    @classmethod
    def unpack(cls, frame: bytes) -> "Round":
        return cls(bool(frame[0]), frame[1:].decode(errors="replace"))


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _pack(numbers: tuple[int, ...]) -> bytes:
    return array("I", numbers).tobytes()


def _unpack(numbers: bytes) -> tuple[int, ...]:
    return tuple(array("I", numbers))
