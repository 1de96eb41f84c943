"""Counts the optimizer steps of some parameters: ranks that differ in it hold different weights."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Seen(NamedTuple):
    """What is known of an optimizer."""

    held: frozenset[int]  # the identities of all its parameters
    is_ours: bool  # some of them are ours
    counts: bool  # its steps are counted


class StepCount:
    """The steps that were made of some parameters, by whatever optimizers."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._seen: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()
        self.count = 0

    def move_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """Go on with other parameters."""
        self._parameters = parameters
        self._seen.clear()

    def begins(self, optimizer: Any) -> None:
        """Get to know an optimizer that is going to step."""
        if self._seen.get(optimizer) is None:
            self._seen[optimizer] = self._look_at(optimizer)

    def note(self, optimizer: Any) -> None:
        """Count a step that has been made, if it is one of these parameters'."""
        seen = self._seen.get(optimizer)
        self.count += seen is not None and seen.counts

    def _look_at(self, optimizer: Any) -> Seen:
        held = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        is_ours = any(id(parameter) in held for parameter in self._parameters)
        # One inside another, as ZeroRedundancyOptimizer has it for its shard, makes no step of its own. The
        # outer one comes first.
        is_inside = any(held <= other.held for other in self._seen.values())
        return Seen(held, is_ours, is_ours and not is_inside)

    @property
    def optimizers(self) -> Sequence[Any]:
        """Those that have stepped some of these parameters."""
        return [optimizer for optimizer, seen in self._seen.items() if seen.is_ours]
