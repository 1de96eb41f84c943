"""What surrounds ``backward()``, which decides whether it is reduced, and what its gradients stand for.

Nothing is decided in forward: a backward asks here when its first gradient arrives.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Protocol

from paceline.trouble import Trouble
from paceline.weights import Ledger
from paceline.wiring import Wiring


class _Forks:
    """Counts from how many forks this process has come. A number, as traced code does not ask the system."""

    count = 0

    def note(self) -> None:
        """Hear that this is a new process. Called in the child."""
        self.count += 1


_forks = _Forks()
os.register_at_fork(after_in_child=_forks.note)


class Engine(Protocol):
    """What reduces the gradients of a replica, as far as the blocks around its backwards are concerned."""

    step: int
    trouble: Trouble

    @property
    def wiring(self) -> Wiring: ...

    @property
    def reduced(self) -> int: ...

    def reduce_now(self) -> None: ...


class Surroundings:
    """The blocks that this rank's backwards are in."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine = weakref.ref(engine)
        self._ledger = ledger
        self.sync = True  # no_sync() switches it off
        self._forks = _forks.count
        self._micro_batches = 0  # of accumulate(): backwards to come, the reduced one included

    @property
    def wants_sync(self) -> bool:
        """Whether a backward started now would be reduced."""
        return self.sync and self._micro_batches <= 1 and not self._is_cut_off

    @property
    def is_fork(self) -> bool:
        """Whether this is a child of the rank's process: a worker that loads data, say. It is no rank."""
        return _forks.count != self._forks

    @property
    def _is_cut_off(self) -> bool:
        """Whether there are no other ranks, for this process."""
        engine = self._engine()
        return self.is_fork or (engine is not None and engine.wiring.comm.is_over)

    def count_backward(self) -> None:
        """Note that a backward has been run, or left out."""
        self._micro_batches = max(0, self._micro_batches - 1)

    @contextlib.contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Keep the gradients of the backwards inside local to this rank."""
        before, self.sync = self.sync, self.sync and not enabled
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def accumulate(self, micro_batches: int) -> Iterator[None]:
        """Reduce in the last of ``micro_batches`` backwards, or when the block ends with fewer."""
        engine = self._held()
        if self._micro_batches:
            raise RuntimeError("accumulate() inside accumulate(): end the outer block first")
        self._micro_batches = micro_batches
        try:
            yield
        except BaseException as error:
            if self._ends_early():
                engine.trouble.tell(error)  # the others are going to wait for this rank's share
            raise
        if self._ends_early():
            engine.reduce_now()

    def _held(self) -> Engine:
        """Return the engine, to be held for the length of a block."""
        engine = self._engine()
        assert engine is not None  # it owns this
        return engine

    def _ends_early(self) -> bool:
        """End accumulate(); tell whether its reduced backward has not been run."""
        is_due, self._micro_batches = self._micro_batches > 0 and self.sync, 0
        return is_due and not self._is_cut_off

    @contextlib.contextmanager
    def weight(self, weight: float) -> Iterator[None]:
        """Let the gradients of the backwards inside stand for this many samples."""
        before, self._ledger.now = self._ledger.now, weight
        try:
            yield
        finally:
            self._ledger.now = before

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Hold this rank to one reduced backward, or a skip(), inside; tell the others what comes of it."""
        engine = self._held()
        before = engine.reduced
        try:
            yield
            if engine.reduced == before and self.wants_sync:
                raise RuntimeError(
                    f"step {engine.step}: batch() has ended without a reduced backward. Call skip() in place "
                    "of the backward of a batch that is left out, and step the optimizer as the other ranks "
                    "do"
                )
        except BaseException as error:
            if engine.reduced == before and self.wants_sync:
                engine.trouble.tell(error)
            raise
