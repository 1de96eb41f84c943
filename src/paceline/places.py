"""Where a thread works: in the process at large, or as one rank of a rehearsal.

What the engine keeps for a whole process (who listens to backwards, who is guarded) it keeps by place, so
that ranks that are threads of one process do not hear of each other.
"""

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from operator import call, is_not
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_IS_THERE = partial(is_not, None)


class Place:
    """Somewhere that training runs. ``comm`` is what is reduced over there, if it is no process group."""

    comm: Any = None
    is_pretended = False  # one rank of a world that is not there: no other rank, no device, no values

    def __init__(self) -> None:
        self.items: dict[Any, tuple[weakref.ref[Any], ...]] = {}  # see ByPlace, which keeps its own here

    def over(self, group: Any) -> Any:
        """Return the comm over a process group, where this place has one of its own."""
        return None

    def has_come(self, listener: Any) -> None:
        """Hear that something listens to the backwards of this place from now on."""

    def has_gone(self, listener: Any) -> None:
        """Hear that it does no more."""


class _Here(threading.local):
    place: Place = Place()  # the process's own, of every thread that is nowhere else


_here = _Here()


def here() -> Place:
    """Return the place of this thread."""
    return _here.place


@contextlib.contextmanager
def working_at(place: Place) -> Iterator[None]:
    """Have this thread work at a place."""
    before, _here.place = _here.place, place
    try:
        yield
    finally:
        _here.place = before


class ByPlace(Generic[T]):
    """Items by place, held weakly. An item belongs to the place of the thread that adds it.

    They are asked for in every step and hardly ever change, so a change makes a new tuple, and who asks needs
    no lock.
    """

    def __init__(self) -> None:
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._lock = threading.RLock()  # the collector of garbage may discard while its thread is in here

    def add(self, item: T) -> None:
        """Put an item to this thread's place."""
        with self._lock:
            self._places.add(here())
            self._set(here(), item, weakref.ref(item))

    def discard(self, item: T) -> Place | None:
        """Take an item out, from whatever thread; return the place that it was at, if it was at any."""
        with self._lock:
            for place in list(self._places):
                if any(other is item for other in self._at(place)):
                    self._set(place, item)
                    return place
        return None

    def _set(self, place: Place, item: T, *refs: "weakref.ref[T]") -> None:
        """Have an item only by these references. The collector may discard others in the middle of it."""
        while True:
            before = place.items.get(self, ())
            after = (*map(weakref.ref, self._at(place, without=item)), *refs)
            if place.items.get(self, ()) is before:
                place.items[self] = after
                return

    def here(self) -> list[T]:
        """Return the items of this thread's place."""
        found: list[Any] = [*filter(_IS_THERE, map(call, _here.place.items.get(self, ())))]
        return found

    def at(self, place: Place) -> list[T]:
        """Return the items of a place, whatever thread asks."""
        return self._at(place)

    def _at(self, place: Place, without: T | None = None) -> list[T]:
        refs = place.items.get(self, ())
        return [item for ref in refs if (item := ref()) is not None and item is not without]

    def __bool__(self) -> bool:
        """Tell whether there is an item at any place."""
        with self._lock:
            return any(self._at(place) for place in list(self._places))


class Sentry(ABC, Generic[T]):
    """Stands somewhere in torch for as long as there is an item at any place, or a block asks for it."""

    def __init__(self) -> None:
        self._items: ByPlace[T] = ByPlace()
        self._is_held = False

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Stand for as long as the block runs, whoever comes and goes on other threads."""
        self._is_held = True
        self._stand()
        try:
            yield
        finally:
            self._is_held = False
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self._is_held and not self._items:
            self._leave()

    @abstractmethod
    def _stand(self) -> None:
        """Take the place, if it is not taken."""

    @abstractmethod
    def _leave(self) -> None:
        """Leave it, if it is taken."""
