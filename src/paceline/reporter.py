"""The thread that reports what this process is doing, for all groups that it is in.

It wakes twice a second, looks at the stack of the thread that trains, and writes a line where the others can
read it. It holds on to nothing in between, and ends with the last group, at exit, and in a fork.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from paceline.activity import COMPILING, look, trainer
from paceline.reports import BEAT_SECONDS, Report, Reports, Wait

END_SECONDS = 1.0


class Desk:
    """What one group's ranks read of this process."""

    def __init__(self, reports: Reports) -> None:
        self.reports = reports
        self.wait: Wait | None = None  # the exchange that this process waits in

    def write(self, phase: str, where: str) -> None:
        """Report now."""
        wait, busy = self.wait, trainer.busy[-1] if trainer.busy else ""
        if phase == COMPILING and not busy:
            busy = phase  # nobody can say how long it takes, and the others have nothing else to do
        if wait is not None:
            phase = f"waiting {wait.place}"
        self.reports.write(Report(self.reports.now(), phase, where, busy, wait))


class Reporter:
    """Writes this process's reports, on a thread of its own and when told to."""

    def __init__(self) -> None:
        self._begin_anew()
        self.progress: Callable[[], str] = str  # how far an open backward has come
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        # In the child of a fork the thread is gone, the locks may be taken, and the pages are the parent's.
        self._desks: weakref.WeakSet[Desk] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._stop = threading.Event()

    def add(self, desk: Desk) -> None:
        """Report to one more group from now on, for as long as it is there."""
        trainer.prepares()
        with self._lock:
            self._desks.add(desk)
            self.report()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-reporter", daemon=True)
                self._thread.start()

    def report(self) -> None:
        """Tell every group what this process is doing at this moment."""
        with self._lock:
            phase, where = look()
            if phase == "backward":
                phase = f"backward {self.progress()}".rstrip()
            for desk in self._desks:
                desk.write(phase, where)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say what is done inside. The time that others wait for it does not count."""
        trainer.busy.append(what)
        self.report()
        try:
            yield
        finally:
            trainer.busy.pop()
            self.report()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._desks:
                    self._thread = None
                    return
            with contextlib.suppress(Exception):  # a store that is gone: the next beat
                self._beat()
            if self._stop.wait(BEAT_SECONDS):
                return
            with contextlib.suppress(Exception):  # a stack that changes
                self.report()

    def _beat(self) -> None:
        for desk in list(self._desks):
            desk.reports.beat()

    def _end(self) -> None:
        """Stop before the interpreter does: a thread that wakes up in its ruins would abort the process."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(END_SECONDS)


reporter = Reporter()
