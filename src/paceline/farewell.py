"""How a rank ends: the others hear whether it is through with its loop, or which exception has ended it."""

import atexit
import contextlib
import functools
import sys
from typing import Any

from paceline.quiet import wait_for_workers
from paceline.torch_private import engine_watch

EXIT_SECONDS = 2.0


@functools.cache
def rest_at_exit() -> None:
    """Say goodbye however this process ends, and let the threads of torch come to rest."""
    atexit.register(wait_for_workers, EXIT_SECONDS)
    atexit.register(say_goodbye)
    _tell_of_uncaught_exceptions()


def say_goodbye(error: BaseException | None = None) -> None:
    """Tell the ranks of every replica, without waiting, that this one ends; and of which error, if any."""
    for reducer in engine_watch.in_order():
        if error is None:
            reducer.say_goodbye()
        else:
            reducer.open_failure(error)


def _tell_of_uncaught_exceptions() -> None:
    before = sys.excepthook

    def tell(kind: Any, error: BaseException, trace: Any) -> None:
        with contextlib.suppress(Exception):
            say_goodbye(error)
        before(kind, error, trace)

    sys.excepthook = tell
