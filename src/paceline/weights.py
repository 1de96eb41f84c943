"""How much a rank's gradients count: the mean over the ranks is sum(w g) / sum(w).

The gradient of one backward is not scaled at all. What a rank has accumulated over several is in units of the
last weight: before a backward of another weight, what is there is multiplied. When the ranks have told each
other their weights, each multiplies what it sends by

    unit * ranks / total

so that a plain mean over all ranks, by whatever hook, is the weighted one. Leaving a batch out and having run
out of batches is a weight of nothing.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from paceline.errors import RanksDisagree, name_ranks, name_some
from paceline.frames import Kind, Opening

NOTHING = (Kind.SKIPPED, Kind.JOINED)


def read_weight(given: Any) -> float:
    """Read a weight as users give it: a number of samples or tokens, also as a tensor of one element."""
    if isinstance(given, bool) or not (isinstance(given, numbers.Real) or hasattr(given, "item")):
        raise TypeError(f"a weight has to be a number, got {type(given).__name__}")
    weight = float(given)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"a weight has to be a finite number that is not negative, got {weight:g}")
    return weight


class Ledger:
    """What this rank's gradients stand for that were not reduced yet.

    With ``of_one`` they are in units of 1: who adds them up has multiplied each by its weight.
    """

    def __init__(self, *, of_one: bool = False) -> None:
        self.now: float | None = None  # inside weight()
        self._of_one = of_one
        self.clear()

    def clear(self) -> None:
        """Begin anew: what there was has been reduced or dropped."""
        self.unit = 1.0 if self._of_one else None  # what a gradient of 1 stands for
        self.total: float | None = None  # None: nothing yet, or nothing that was weighted
        self.is_plain = False  # a backward outside of weight() has added something

    @property
    def scale(self) -> float:
        """What each gradient of the present backward is multiplied by before it is added."""
        return self.now if self._of_one and self.now else 1.0

    def take_unit(self) -> float:
        """Make the present weight the unit; return what the gradients so far are to be multiplied by."""
        if self._of_one or not self.now:
            return 1.0
        before, self.unit = self.unit or self.now, self.now
        return before / self.now

    def add(self) -> None:
        """Note that a backward has begun."""
        if self.now is None:
            self.is_plain = True
        else:
            self.total = (self.total or 0.0) + self.now
        if self.is_plain and self.total is not None:
            raise ValueError(
                "some backwards of this step ran inside weight() and some outside; what they add up to has "
                "no meaning. Give each of them a weight, or none"
            )


@dataclass(frozen=True)
class Share:
    """How a rank's gradients count among the others'."""

    factor: float = 1.0  # what this rank multiplies its gradients by before the mean over all ranks
    scale: float = 1.0  # the part of it that is the same on every rank
    counted: Sequence[int] = ()  # the ranks whose gradients count


@cache
def even_share(size: int) -> Share:
    """Return the share of a rank among ranks that all have a batch, and have given no weight."""
    return Share(counted=range(size))


def share_of(
    rank: int, openings: Sequence[Opening], unit: float | None, *, divide_by_all: bool = False
) -> Share:
    """Work out a rank's share from what all ranks have told; raise if only some have given a weight.

    With ``divide_by_all`` those who have run out of batches count as if they added zeros.
    """
    weights = _weights(openings)
    size = len(weights)
    counted = [rank for rank, weight in enumerate(weights) if weight]
    total = math.fsum(weights)
    if divide_by_all:
        total += sum(opening.kind is Kind.JOINED for opening in openings)
    mine = 0.0 if not weights[rank] else (1.0 if unit is None else unit)
    return Share(mine * size / total if total else 1.0, size / total if total else 1.0, counted)


def _weights(openings: Sequence[Opening]) -> list[float]:
    given = [opening.weight for opening in openings if opening.kind is Kind.BACKWARD]
    if all(weight is None for weight in given):
        return [0.0 if opening.kind in NOTHING else 1.0 for opening in openings]
    if any(weight is None for weight in given):
        raise _only_some(openings)
    return [opening.weight or 0.0 for opening in openings]


def _only_some(openings: Sequence[Opening]) -> RanksDisagree:
    told = {r: o.weight for r, o in enumerate(openings) if o.kind is Kind.BACKWARD}
    without = [rank for rank, weight in told.items() if weight is None]
    shown = [f"rank {rank} has {weight:g}" for rank, weight in told.items() if weight is not None]
    return RanksDisagree(
        f"step {max(o.step for o in openings)}: only some ranks have given a weight: {name_some(shown)}, "
        f"{name_ranks(without)} none. Use weight() on every rank, or on none. The gradients were dropped on "
        "every rank."
    )
