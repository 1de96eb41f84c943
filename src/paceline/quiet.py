"""Let Gloo's worker threads come to rest before the interpreter ends.

A worker may be the last to hold a finished collective, and with it a Python object. To free that it waits for
the interpreter's lock; if the interpreter ends meanwhile, the thread is torn down inside a destructor and the
whole process aborts ("terminate called without an active exception"; one of fifty short runs on torch 2.13
and Python 3.11). Destroying the group helps only if nobody else holds it, and replicas do.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

WORKER = "pt_gloo_runloop"
PAUSE_SECONDS = 0.002
QUIET_PAUSES = 3  # in a row, with no worker running or about to
BLIND_SECONDS = 0.05  # where threads cannot be looked at


def wait_for_workers(seconds: float) -> None:
    """Hand the interpreter's lock to Gloo's workers until they all rest, for some seconds at most."""
    if sys.platform != "linux":
        time.sleep(BLIND_SECONDS)
        return
    deadline, quiet = time.monotonic() + seconds, 0
    # While we sleep the lock is free, so a worker that waited for it becomes runnable: one that still sleeps
    # after that waits for work, not for the lock.
    while quiet < QUIET_PAUSES and time.monotonic() < deadline and (states := list(_worker_states())):
        time.sleep(PAUSE_SECONDS)
        quiet = 0 if "R" in states else quiet + 1


def _worker_states() -> Iterator[str]:
    """Tell of each worker thread whether it runs (R) or sleeps (S)."""
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # ended meanwhile
            continue
        if name == WORKER:
            yield rest.split()[0]
