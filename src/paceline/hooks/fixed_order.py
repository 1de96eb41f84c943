"""Sums over the ranks in a fixed order, whatever the backend's own order is.

    a pair     two numbers have one sum, so two ranks take the backend's own
    whole      every rank gets every rank's tensor, and adds them up by itself: one collective
    in parts   rank j gets everybody's j-th part, adds them up, and sends the sum to all: two collectives, and
               as little traffic as a ring has

All add the ranks pairwise, neighbours first: (0+1)+(2+3). These are the upper levels of the tree whose lower
ones are the micro-batches of a rank (``paceline.tree``).
"""

import torch

from paceline.comm import Comm, Pending
from paceline.hooks.staged import Staged, Stages

WHOLE_NBYTES = 64 * 1024  # up to here a second collective costs more than what it saves


class InOrder(Comm):
    """A comm whose sums have the same bits whatever else travels in the same message."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.rank, self.size, self.divisor = inner.rank, inner.size, inner.divisor
        self.seconds = inner.seconds
        self.factor = 1 / self.size  # what makes a mean of a sum

    def total(self, flat: torch.Tensor) -> Pending:
        return self._sum(flat, 1.0)

    def average(self, flat: torch.Tensor) -> Pending:
        # After the sum: before it, the rounding would depend on the number of ranks.
        return self._sum(flat, self.factor)

    def _sum(self, flat: torch.Tensor, factor: float) -> Pending:
        if self.size == 1:
            return Pending(_scaled(flat, factor))
        if self.size == 2:
            return Staged(self._of_a_pair(flat, factor))
        if flat.nbytes <= WHOLE_NBYTES:
            return Staged(self._whole(flat, factor))
        return Staged(self._in_parts(flat, factor))

    def _of_a_pair(self, flat: torch.Tensor, factor: float) -> Stages:
        return _scaled((yield self._inner.total(flat)), factor)

    def _whole(self, flat: torch.Tensor, factor: float) -> Stages:
        rows = yield self._inner.gather(flat)
        return _scaled(torch.add(*_last_two(rows), out=flat), factor)

    def _in_parts(self, flat: torch.Tensor, factor: float) -> Stages:
        length = -(-flat.numel() // self.size)
        padded = flat
        if flat.numel() != length * self.size:
            padded = flat.new_zeros(length * self.size)
            padded[: flat.numel()] = flat
        rows = yield self._inner.exchange(padded)
        left, right = _last_two(rows)
        parts = yield self._inner.gather(_scaled(left.add_(right), factor))
        return flat.copy_(parts.view(-1)[: flat.numel()])

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return self._inner.broadcast(flat, source)

    def gather(self, flat: torch.Tensor) -> Pending:
        return self._inner.gather(flat)

    def exchange(self, flat: torch.Tensor) -> Pending:
        return self._inner.exchange(flat)

    def split(self, size: int) -> Comm:
        return InOrder(self._inner.split(size))

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return self._inner.gather_bytes(payload)


def _last_two(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows pairwise, in place, until two are left; an odd one waits for its turn at the end."""
    while len(rows) > 2:
        pairs = len(rows) // 2
        rows[0 : 2 * pairs : 2].add_(rows[1 : 2 * pairs : 2])
        rows = rows[0::2]
    return rows[0], rows[1]


def _scaled(flat: torch.Tensor, factor: float) -> torch.Tensor:
    return flat if factor == 1 else flat.mul_(factor)
