"""Where the ranks of a rehearsal, which are threads of one process, wait for each other.

All waiting goes through one lock. So it is known at once that somebody waits in vain: because a rank has
left, or because all of them wait for each other. Nobody has to run into a time limit.
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from paceline.errors import (
    PacelineError,
    PeerFailed,
    PeerLost,
    PeerTimeout,
    RanksDisagree,
    name_ranks,
    words_of,
)

Echo = (PeerFailed, PeerLost)  # what a rank raises because of another one


@dataclass(frozen=True)
class Left:
    """How a rank has ended: by an exception, or by returning, perhaps with something left open."""

    error: BaseException | None = None
    open: str = ""


@dataclass(frozen=True)
class Wait:
    """What a rank waits in, and which ranks have not come there."""

    rank: int
    what: str
    missing: Callable[[], Collection[int]]


class Hub:
    """What all ranks of one rehearsal share. Whoever changes something others wait for holds ``changed``."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.seconds = seconds
        self.changed = threading.Condition()
        self.left: dict[int, Left] = {}  # in the order of time
        self._waits: list[Wait] = []
        self._verdict: Callable[[], PacelineError] | None = None  # why nobody needs to wait any more

    # ---- ranks wait ------------------------------------------------------------------------------

    def wait(self, wait: Wait, seconds: float) -> None:
        """Return when no rank is missing any more. Raise if that will not be, or lasts too long."""
        deadline = time.monotonic() + seconds
        with self.changed:
            self._waits.append(wait)
            try:
                while wait.missing():
                    self._refuse_vain(wait)
                    self._sleep(wait, deadline, seconds)
            finally:
                self._waits.remove(wait)

    def _sleep(self, wait: Wait, deadline: float, seconds: float) -> None:
        if not self.changed.wait(deadline - time.monotonic()) and wait.missing():
            missing = sorted(wait.missing())
            raise PeerTimeout(
                f"{name_ranks(missing)} did not come to {wait.what} within {seconds:g} s. Look at what is "
                "done there, or allow more time.",
                missing[0],
            )

    def is_vain(self, missing: Collection[int]) -> bool:
        """Tell whether it is known that some of the missing ranks will not come."""
        with self.changed:
            return self._verdict is not None or any(rank in self.left for rank in missing)

    def _refuse_vain(self, wait: Wait) -> None:
        if self._verdict is None and self._all_wait():
            where = ", ".join(f"rank {each.rank} in {each.what}" for each in _by_rank(self._waits))
            self._judge(lambda: _deadlock(where))
        if self._verdict is not None:
            raise self._verdict()
        gone = {rank: self.left[rank] for rank in sorted(wait.missing()) if rank in self.left}
        if gone:
            raise self._lost(gone, wait.what)

    def _all_wait(self) -> bool:
        """Tell whether every rank that is left waits for another that is left."""
        in_vain = [
            wait for wait in self._waits if (missing := wait.missing()) and not self._any_left(missing)
        ]
        return {wait.rank for wait in in_vain}.union(self.left) == set(range(self.size))

    def _any_left(self, ranks: Collection[int]) -> bool:
        return any(rank in self.left for rank in ranks)

    def _lost(self, gone: dict[int, Left], what: str) -> PacelineError:
        failed = {rank: left.error for rank, left in gone.items() if left.error is not None}
        if failed:
            rank, error = self.cause() or next(iter(failed.items()))
            return PeerFailed(
                f"rank {rank} raised, and its part in the rehearsal is over: {words_of(error)}",
                rank,
                words_of(error),
            )
        left_open = next((f", with {left.open}" for left in gone.values() if left.open), "")
        return RanksDisagree(
            f"the ranks did not run the same backwards: {name_ranks(list(gone))} returned from the step "
            f"function{left_open}, while others still wait in {what}. Run the same number of backwards on "
            "every rank, or train inside join()."
        )

    def _judge(self, verdict: Callable[[], PacelineError]) -> None:
        self._verdict = verdict
        self.changed.notify_all()

    # ---- ranks leave -----------------------------------------------------------------------------

    def leave(self, rank: int, left: Left) -> None:
        """Note that a rank has ended, for those that wait for it."""
        with self.changed:
            self.left[rank] = left
            self.changed.notify_all()

    def cause(self) -> tuple[int, BaseException] | None:
        """Return the first exception that was not raised because of another rank, and whose it is."""
        errors = [(rank, left.error) for rank, left in self.left.items()]
        return next(
            ((rank, error) for rank, error in errors if error is not None and not isinstance(error, Echo)),
            None,
        )

    def waiting(self) -> set[int]:
        """Return the ranks that wait for others."""
        with self.changed:
            return {wait.rank for wait in self._waits}

    def stop(self) -> None:
        """Let nobody wait any more."""
        with self.changed:
            self._judge(lambda: PeerLost("the rehearsal was ended while this rank waited for others."))


def _by_rank(waits: Collection[Wait]) -> list[Wait]:
    return sorted(waits, key=lambda wait: wait.rank)


def _deadlock(where: str) -> RanksDisagree:
    return RanksDisagree(
        f"the ranks wait for each other: {where}. Make every rank run the same backwards of the same models "
        "in the same order, and replicate the same models."
    )
