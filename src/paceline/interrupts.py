"""Interrupts that come while the ranks talk to each other: Ctrl-C, or a signal handler that raises.

What this rank has told the others stands, and they count on what it does next. So an interrupt is put off
until the ranks are through with what they do together, and is raised then. A second one is not put off.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import PacelineError

T = TypeVar("T")


class _Interrupts(threading.local):
    """The interrupts of one thread. As a context: what comes inside is raised when the outermost one ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._kept: BaseException | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._depth -= 1
        if not self._depth and self._kept is not None:
            kept, self._kept = self._kept, None
            if error is None or isinstance(error, Exception):
                raise kept from error

    def keep(self, error: BaseException) -> None:
        """Put an interrupt off. Raises it, if this is outside of the context, or it is the second one."""
        if not self._depth or self._kept is not None:
            raise error
        self._kept = error

    def put_off(self, wait: Callable[[], T]) -> T:
        """Wait for other ranks, and do so again if that is interrupted inside the context."""
        try:
            return wait()
        except PacelineError:  # no interrupt
            raise
        except BaseException as error:
            self.keep(error)
        return wait()


interrupts = _Interrupts()
