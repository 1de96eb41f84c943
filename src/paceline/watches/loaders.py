"""Batches: what is drawn from torch's DataLoaders, by thread."""

import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from paceline.torch_private import loader_iterators


@dataclass(frozen=True)
class Drawn:
    """What was drawn from an iterator of a DataLoader so far: how many batches, and when the last one."""

    iterator: object
    count: int
    at: int


class _LoaderWatch(threading.local):
    """Counts, by thread, what is drawn from DataLoaders."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._draws = 0

    def note(self, iterator: Any) -> None:
        self._draws += 1
        self._counts[iterator] = self._counts.get(iterator, (0, 0))[0] + 1, self._draws

    def drawn(self) -> list[Drawn]:
        """Return what was drawn from each iterator that is still there."""
        if not self._draws:
            return []
        return [Drawn(iterator, *told) for iterator, told in list(self._counts.items())]


@cache
def watch_loaders() -> None:
    """Look at each batch that a DataLoader hands out, for as long as the process lives."""
    kind = loader_iterators()
    draw = kind.__next__

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def draw_and_note(iterator: Any) -> Any:
        batch = draw(iterator)
        loader_watch.note(iterator)
        return batch

    kind.__next__ = draw_and_note


loader_watch = _LoaderWatch()
