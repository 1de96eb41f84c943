"""The control frames of one backward, as bytes and back.

opening   when the first gradient arrives: which step, which plan, or why this rank cannot take part
closing   when all buckets are out: which parameters got a gradient here, or what went wrong since
round     between the collectives of a hook that has several, or that may fail: whether all is well
"""

import enum
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

_OPENING = struct.Struct("!Q8sIBdI8sH")
_NO_BUFFERS = bytes(8)
_LENGTH = struct.Struct("!H")
_CLOSING = struct.Struct("!??10I")
_NO_PARTS = (0,) * 7


class Kind(enum.IntEnum):
    """Why a rank takes part in a reduction."""

    BACKWARD = 0  # a backward runs here
    EMPTY = 1  # accumulate() has ended, and this rank has run no backward inside
    SKIPPED = 2  # skip(): this rank leaves its batch out
    JOINED = 3  # this rank has run out of batches, and only keeps the others company
    CHANGED = 4  # not a backward: the module has got other parameters
    LEFT = 5  # not a backward: this rank has ended its loop


class Opening(NamedTuple):
    """Sent before the first bucket. A rank with a ``failure`` sends no bucket in this backward.

    ``terms`` stands for what else has to be the same: the hook and its settings. ``weight`` is what this
    rank's gradients stand for, None outside of weight(). ``stepped`` counts the optimizer steps made so far.
    ``told`` has what each rider has to say. ``buffers`` stands for those that were written in this rank's
    forward, as in every one, and go out unasked if all ranks say the same.
    """

    step: int
    digest: bytes
    terms: int = 0
    kind: Kind = Kind.BACKWARD
    weight: float | None = None
    stepped: int = 0
    told: Sequence[bytes] = ()
    failure: str = ""
    where: str = ""  # it raised
    buffers: bytes = b""

    @property
    def is_plain(self) -> bool:
        """Whether a backward of no particular weight runs here, as it should."""
        return self.kind is Kind.BACKWARD and self.weight is None and not self.failure

    def pack(self) -> bytes:
        weight = -1.0 if self.weight is None else self.weight
        told = _pack_all(self.told)
        stepped = self.stepped & 0xFFFFFFFF
        head = _OPENING.pack(
            self.step, self.digest, self.terms, self.kind, weight, stepped, self.buffers, len(told)
        )
        return head + told + _encode(f"{self.where}\n{self.failure}" if self.failure else "")

    @classmethod
    def unpack(cls, frame: bytes) -> "Opening":
        step, digest, terms, kind, weight, stepped, buffers, length = _OPENING.unpack_from(frame)
        end = _OPENING.size + length
        told = _unpack_all(frame[_OPENING.size : end])
        where, _, failure = frame[end:].decode(errors="replace").partition("\n")
        given = None if weight < 0 else weight
        buffers = b"" if buffers == _NO_BUFFERS else buffers
        return cls(step, digest, terms, Kind(kind), given, stepped, told, failure, where, buffers)


class Closing(NamedTuple):
    """Sent after the last bucket.

    ``trace`` stands for everything that this rank has sent so far, and in which order.
    ``used`` has a byte per parameter, 1 where this rank has a gradient to add; empty means all of them.
    ``arrived`` counts the gradients that came, where their order is asked for. ``late`` are the parameters
    that got one more gradient after their bucket was out. ``sparse`` has three numbers for each gradient that
    travels by itself: the parameter, how many rows it has, and whether it came as a dense one. ``buffers``
    says which of them changed here (see paceline.buffers). ``told`` has what each rider has to say. A rank
    that is ``stuck`` has not sent everything, because its hook raised. ``crossed`` says, until all know it,
    that the script has started collectives of its own meanwhile; there were so many ``others``, and ``order``
    stands for where among the buckets.
    """

    trace: int = 0
    used: bytes = b""
    arrived: int = 0
    late: tuple[int, ...] = ()
    sparse: tuple[int, ...] = ()
    failure: str = ""
    stuck: bool = False
    buffers: bytes = b""
    told: Sequence[bytes] = ()
    crossed: bool = False
    others: int = 0
    order: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to tell but what was sent: every parameter got a gradient, all is well."""
        return not (self.stuck or self.crossed or any(self[1:6]) or self.buffers or any(self.told))

    def pack(self) -> bytes:
        if self.is_plain:
            return _CLOSING.pack(False, False, self.trace, self.others, self.order, *_NO_PARTS)
        numbers = (_pack(self.late), _pack(self.sparse))
        parts = (self.used, *numbers, self.buffers, _pack_all(self.told), _encode(self.failure))
        lengths = (len(part) for part in parts)
        sent = (self.trace, self.others, self.order)
        return _CLOSING.pack(self.stuck, self.crossed, *sent, self.arrived, *lengths) + b"".join(parts)

    @classmethod
    def unpack(cls, frame: bytes) -> "Closing":
        stuck, crossed, trace, others, order, arrived, *lengths = _CLOSING.unpack_from(frame)
        ends = accumulate(lengths, initial=_CLOSING.size)
        used, *numbers, buffers, told, failure = (frame[start:end] for start, end in pairwise(ends))
        late, sparse = map(_unpack, numbers)
        words = failure.decode(errors="replace")
        sent = (crossed, others, order)
        return cls(trace, used, arrived, late, sparse, words, stuck, buffers, _unpack_all(told), *sent)


class Round(NamedTuple):
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


def _pack_all(parts: Sequence[bytes]) -> bytes:
    """Put parts of different lengths behind each other; nothing if all are empty."""
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts]) if any(parts) else b""


def _unpack_all(frame: bytes) -> tuple[bytes, ...]:
    parts: list[bytes] = []
    start = 0
    while start < len(frame):
        (length,) = _LENGTH.unpack_from(frame, start)
        start += _LENGTH.size + length
        parts.append(frame[start - length : start])
    return tuple(parts)


def _pack(numbers: tuple[int, ...]) -> bytes:
    return array("I", numbers).tobytes()


def _unpack(numbers: bytes) -> tuple[int, ...]:
    return tuple(array("I", numbers))
