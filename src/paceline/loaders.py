"""A batch that one rank leaves out: its next one must not be averaged with the others' present one.

No backward tells which batch it is of. But every torch DataLoader can be watched, and ranks that train alike
draw alike: so each rank tells how many batches it has drawn, since its last reduction, from the loader that
it trains from, and for how many of them it has run a backward. Where ranks that were alike so far differ, one
has left a batch out, or trains on one again.
"""

import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RanksDisagree
from paceline.riders import Rider
from paceline.watches.loaders import Drawn, loader_watch

USUAL_STEPS = 2  # in a row that the ranks have to have drawn alike, before a difference means anything

_TOLD = struct.Struct("!IiI")


@dataclass(frozen=True)
class Draws:
    """What a rank has drawn since its last reduction."""

    batch: int  # the how-manieth batch of its loader was drawn last
    idle: int  # how many more were drawn than backwards were run
    usual: int  # for how many steps in a row the ranks have been alike

    def pack(self) -> bytes:
        return _TOLD.pack(self.batch, self.idle, self.usual)

    @classmethod
    def unpack(cls, told: bytes) -> "Draws":
        return cls(*_TOLD.unpack(told))


class SameBatch(Rider):
    """Watches that no rank leaves a batch out without saying so."""

    is_for_join = False

    def __init__(self) -> None:
        self._drawn: Sequence[Drawn] = ()  # by the thread that has started the present backward
        self._seen: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._used = 0  # backwards since the last reduction
        self._usual = 0

    def enters(self) -> None:
        self._drawn = loader_watch.drawn()

    def begins(self) -> None:
        self._used += 1

    def opens(self, step: int) -> bytes:
        if not self._drawn:
            self._used = 0
            return b""
        told = self._position()
        self._take_all()
        return b"" if told is None else told.pack()

    def _position(self) -> Draws | None:
        """Return where this rank is in the loader that it trains from; None if that cannot be told."""
        # A loader that was not there in the last step may be another one on each rank: it is not compared.
        known = [each for each in self._drawn if each.iterator in self._seen]
        fresh = [each for each in known if each.count != self._seen[each.iterator]]
        if not known or len(fresh) > 1 or (not fresh and len(known) < len(self._drawn)):
            return None
        now = fresh[0] if fresh else max(known, key=lambda each: each.at)
        return Draws(now.count, now.count - self._seen[now.iterator] - self._used, self._usual)

    def _take_all(self) -> None:
        """Count from here."""
        if self._drawn:
            self._seen.update((each.iterator, each.count) for each in self._drawn)
        self._used = 0

    def opened(self, step: int, told: Sequence[bytes], present: Sequence[int]) -> None:
        if not any(told):
            return
        draws = {rank: Draws.unpack(told[rank]) for rank in present if told[rank]}
        if len(draws) < len(present) or not draws:
            return  # some cannot say; nothing follows from that
        was_usual = min(each.usual for each in draws.values()) >= USUAL_STEPS
        is_alike = len({each.idle for each in draws.values()}) == 1
        self._usual = self._usual + 1 if is_alike else 0
        if was_usual and not is_alike:
            raise _not_alike(step, draws)

    def dropped(self) -> None:
        # Of a batch whose step has failed nothing is left, whether its backward had begun or not.
        self._drawn = loader_watch.drawn() or self._drawn
        self._take_all()


def _not_alike(step: int, draws: dict[int, Draws]) -> RanksDisagree:
    usual = sorted(each.idle for each in draws.values())[0]
    where = ", ".join(f"rank {rank} is at batch {each.batch - 1}" for rank, each in draws.items())
    odd = {rank: each.idle - usual for rank, each in draws.items() if each.idle > usual}
    who = ", ".join(f"rank {rank} has drawn {count} more than it has used" for rank, count in odd.items())
    return RanksDisagree(
        f"step {step}: the ranks are not at the same batch of their DataLoader: {where}; since the last step "
        f"{who}. Call skip() in place of the backward of a batch that is left out, and step the optimizer as "
        "the other ranks do; or, if ranks may draw as they like, use loader_check=False. The gradients were "
        "dropped on every rank."
    )
