"""Gradients that are in no bucket: sparse ones, which travel by rows when everything else is out."""

from collections.abc import Mapping, Sequence

import torch

from paceline.outbox import Outbox
from paceline.shelf import Layout
from paceline.sparse import Share, gather_rows
from paceline.tally import Tally
from paceline.wiring import Wiring


class Apart:
    """This rank's share of them, in one backward."""

    def __init__(self, wiring: Wiring, layout: Layout, outbox: Outbox) -> None:
        self._wiring = wiring
        self._layout = layout
        self._outbox = outbox
        self._shares: dict[int, Share] = {}

    def collect(self, factor: float) -> None:
        """Bring this rank's sparse gradients into the form in which they travel, times ``factor``."""
        sparse, aside = self._layout.plan.sparse, self._outbox.aside
        if not (sparse or aside):
            return
        parameters = self._layout.parameters
        # Those of earlier backwards as well: if another rank has added to one, all of it is reduced anew.
        there = {index: parameters[index].grad for index in sparse if parameters[index].grad is not None}
        self._shares = {
            index: Share(gradient, parameters[index], factor)
            for index, gradient in {**there, **aside}.items()
        }

    def told(self) -> tuple[int, ...]:
        """Return what the other ranks have to know of it."""
        if not self._shares:
            return ()
        return tuple(n for i, share in self._shares.items() for n in (i, share.count, share.came_dense))

    def show(self, late: set[int]) -> None:
        """Let the riders see what is in no bucket, and what came too ``late`` for its own."""
        if not (self._shares or late) or not self._wiring.hearing["goes_apart"]:
            return
        own: Mapping[int, torch.Tensor] = {index: share.values for index, share in self._shares.items()}
        tardy = {index: self._layout.parameters[index].grad for index in late}
        for index, gradient in (*own.items(), *tardy.items()):
            if gradient is not None:
                for _, rider in self._wiring.hearing["goes_apart"]:
                    rider.goes_apart(self._layout.plan.specs[index].name, gradient)

    def gather(self, tally: Tally) -> Mapping[int, torch.Tensor]:
        """Return the reduced gradients of all parameters that had a sparse one on some rank."""
        comm, way = self._outbox.comm, self._wiring.way
        if way == "own" or not any(tally.rows):
            return dict(self._outbox.aside)
        divisor = comm.divisor if way == "mean" else 1
        told = [
            {index: rows for index, rows in rank.items() if index not in tally.outcome.missing_everywhere}
            for rank in tally.rows
        ]
        rows = gather_rows(self._shares, told, self._layout.parameters, comm, divisor)
        self._shares = {}  # they are as large as the gradients
        for index in rows.keys() & set(self._layout.plan.order):
            if not self._was_sparse(index, tally):
                # Somebody has put a dense gradient into the slot.
                place, position = self._layout.place_of(index)
                rows[index] = self._outbox.packets[place].views[position].add(rows[index])
        return rows

    @staticmethod
    def _was_sparse(index: int, tally: Tally) -> bool:
        """Tell whether a gradient was sparse on all ranks that have one."""
        users: Sequence[int] = [rank for rank in range(len(tally.closings)) if tally.is_used(index, rank)]
        return all(index in tally.rows[rank] for rank in users)
