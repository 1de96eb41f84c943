"""How a rank ends: the others hear whether it is through with its loop, or which exception has ended it."""

import atexit
import contextlib
import functools
import multiprocessing.util
import os
import sys
from typing import Any

from paceline.quiet import wait_for_workers
from paceline.watches.engine import engine_watch

EXIT_SECONDS = 2.0
FIRST = 1000  # before the queues and locks of multiprocessing

_owner: list[int] = []  # the process that has made replicas


@functools.cache
def rest_at_exit() -> None:
    """Say goodbye however this process ends, and let the threads of torch come to rest."""
    _owner.append(os.getpid())
    atexit.register(wait_for_workers, EXIT_SECONDS)
    atexit.register(say_goodbye)
    _tell_of_uncaught_exceptions()
    if multiprocessing.parent_process() is not None:
        # The child of a parent that has started it by multiprocessing runs neither of both.
        multiprocessing.util.Finalize(None, _say_goodbye_as_child, exitpriority=FIRST)


def say_goodbye(error: BaseException | None = None) -> None:
    """Tell the ranks of every replica, without waiting, that this one ends; and of which error, if any."""
    if os.getpid() not in _owner:
        return  # in a fork, whose ends of the links are the parent's
    for reducer in engine_watch.in_order():
        if not reducer.wiring.control.posts_alone:
            continue  # it would have to wait
        if error is None:
            reducer.trouble.say_goodbye()
        else:
            reducer.trouble.open(error)


def _tell_of_uncaught_exceptions() -> None:
    before = sys.excepthook

    def tell(kind: Any, error: BaseException, trace: Any) -> None:
        with contextlib.suppress(Exception):
            say_goodbye(error)
        before(kind, error, trace)

    sys.excepthook = tell


def _say_goodbye_as_child() -> None:
    """Say what ends this process. Called by multiprocessing while that exception is on its way."""
    error = sys.exception()
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code else None
    say_goodbye(error)
