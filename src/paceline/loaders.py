"""A batch that one rank leaves out: its next one must not be averaged with the others' present one.

No backward tells which batch it is of. But every torch DataLoader can be watched, and ranks that train alike
draw alike: so each rank tells how many batches it has drawn, from the loader that it drew from last, for
which it has run no backward. One that suddenly has drawn more than the others has left a batch out.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RanksDisagree
from paceline.riders import Rider
from paceline.torch_private import Drawn, loader_watch

USUAL_STEPS = 3  # that the ranks have to have drawn alike, before a difference means anything

_TOLD = struct.Struct("!III")


@dataclass(frozen=True)
class Draws:
    """What a rank has drawn since its last reduced backward."""

    loader: int  # the how-manieth iterator of a loader that was trained from
    batch: int  # the how-manieth batch of it was drawn last
    idle: int  # how many of them no backward has followed

    def pack(self) -> bytes:
        return _TOLD.pack(self.loader, self.batch, self.idle)

    @classmethod
    def unpack(cls, told: bytes) -> "Draws":
        return cls(*_TOLD.unpack(told))


class SameBatch(Rider):
    """Watches that no rank leaves a batch out without saying so."""

    def __init__(self) -> None:
        self._iterator: Any = None  # a token of the iterator that the last backward's batch came from
        self._drawn: Drawn | None = None  # by the thread that has started the present backward
        self._loaders = 0
        self._seen = 0
        self._idle = 0
        self._usual = 0  # steps in a row in which all ranks have drawn alike

    def enters(self) -> None:
        self._drawn = loader_watch.last

    def begins(self) -> None:
        drawn = self._drawn
        if drawn is None:
            return
        if drawn.iterator is not self._iterator:
            self._iterator, self._seen = drawn.iterator, 0
            self._loaders += 1
        self._idle += max(0, drawn.count - self._seen - 1)
        self._seen = drawn.count

    def opens(self, step: int) -> bytes:
        idle, self._idle = self._idle, 0
        return b"" if self._iterator is None else Draws(self._loaders, self._seen, idle).pack()

    def opened(self, step: int, told: Sequence[bytes], present: Sequence[int]) -> None:
        draws = {rank: Draws.unpack(told[rank]) for rank in present if told[rank]}
        # Who draws from another loader, or from none, cannot be compared.
        alike = len(draws) == len(present) and len({each.loader for each in draws.values()}) == 1
        if not alike or len({each.idle for each in draws.values()}) == 1:
            self._usual += alike
            return
        was_usual, self._usual = self._usual >= USUAL_STEPS, 0
        if was_usual:
            raise _left_out(step, draws)


def _left_out(step: int, draws: dict[int, Draws]) -> RanksDisagree:
    usual = min(each.idle for each in draws.values())
    where = ", ".join(f"rank {rank} is at batch {each.batch - 1}" for rank, each in draws.items())
    odd = {rank: each.idle - usual for rank, each in draws.items() if each.idle > usual}
    who = ", ".join(f"rank {rank} left out {count}" for rank, count in odd.items())
    return RanksDisagree(
        f"step {step}: the ranks are not at the same batch of their DataLoader: {where} ({who} since the "
        "last backward). Call skip() in place of the backward of a batch that is left out, and step the "
        "optimizer as the other ranks do; or, if ranks may draw as they like, replicate with "
        "loader_check=False. The gradients were dropped on every rank."
    )
