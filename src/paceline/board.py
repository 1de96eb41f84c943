"""A board where ranks leave notes for each other without a collective: the store of their group.

For set-up and for faults. What a collective has garbled cannot be trusted to say so itself.
"""

import time
from collections.abc import Callable
from typing import Any

from paceline.comm import GroupComm
from paceline.torch_private import store_of


class Board:
    """The notes of one meeting. ``name`` is the same on every rank, and different for each meeting."""

    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size

    def mark(self, what: str) -> None:
        """Leave a mark that any rank may find."""
        self._store.set(f"{self._name}/{what}", b"1")

    def is_marked(self, what: str) -> bool:
        """Tell whether any rank has left this mark."""
        return bool(self._store.check([f"{self._name}/{what}"]))

    def come(self, point: str, note: bytes = b"") -> None:
        """Count this rank in at a point, and leave a note there. Does not wait for anybody."""
        self._store.set(self._key(point, self._rank), b"." + note)
        self._store.add(f"{self._name}/{point}", 1)

    def is_full(self, point: str) -> bool:
        """Tell whether every rank has come to a point."""
        return bool(self._store.add(f"{self._name}/{point}", 0) >= self._size)

    def notes(self, point: str) -> dict[int, bytes]:
        """Return the notes of the ranks that have come to a point."""
        there = [rank for rank in range(self._size) if self._store.check([self._key(point, rank)])]
        return {rank: bytes(self._store.get(self._key(point, rank)))[1:] for rank in there}

    def _key(self, point: str, rank: int) -> str:
        return f"{self._name}/{point}/{rank}"


def board_of(comm: GroupComm, name: str) -> Board | None:
    """Return the board of a comm's group, if it has a store."""
    store = store_of(comm.group)
    return None if store is None else Board(store, f"paceline/{name}", comm.rank, comm.size)


def wait_until(done: Callable[[], bool], seconds: Callable[[], float]) -> bool:
    """Ask again and again whether something is done; tell whether it was, in the seconds that are left.

    Rather than with ``Store.wait()``, which holds up every other thread that needs the store.
    """
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > seconds():
            return False
        time.sleep(min(max(waited / 8, 1e-4), 0.1))
    return True
