"""Processes that the launcher starts: each in a session of its own, none of them outliving the launcher."""

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

STDERR_LINES_KEPT = 400
LEFTOVER_SECONDS = 1.0  # what the children of ended ranks get to end by themselves
PR_SET_CHILD_SUBREAPER = 36


class TiedProcess:
    """A child in its own session, killed with its process group when the launcher is gone."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        inherit: tuple[int, ...] = (),
        output: int | None = None,
    ) -> None:
        watched, lifeline = os.pipe()
        self._lifeline = os.fdopen(lifeline, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                bufsize=0,
                start_new_session=True,
                pass_fds=(watched, *inherit),
            )
            _kill_group_at_end_of(watched, self.pid)
        finally:
            os.close(watched)

    @property
    def pid(self) -> int:
        """The process id, which is the id of its session and process group, too."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, minus the signal's number for one that was killed, None while it runs."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the process and all it started that did not leave its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class RankProcess(TiedProcess):
    """A rank, its output, and the last lines of its stderr."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(command, environment=environment, output=subprocess.PIPE)
        self.rank = rank
        self.last_words: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        for stream in (self.stdout, self.stderr):
            os.set_blocking(stream.fileno(), False)

    @property
    def stdout(self) -> IO[bytes]:
        """What the rank prints."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """What the rank complains about."""
        assert self._process.stderr is not None
        return self._process.stderr


def _kill_group_at_end_of(pipe: int, group: int) -> None:
    """Have the kernel kill a process group when the other end of a pipe is closed.

    That end is the launcher's; it closes with the launcher, however that ends. The kernel's promise lasts as
    long as somebody in the group holds the pipe.
    """
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def adopt_orphans() -> None:
    """Become the parent of whatever the ranks leave behind, to be able to find it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_leftovers(processes: Iterable[TiedProcess]) -> None:
    """End what ended processes have left behind: by itself at first, then by force."""
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while _any_child_left():
        if time.monotonic() > deadline:
            _kill_groups(processes)
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if sys.platform != "linux":  # orphans are not ours there
        _kill_groups(processes)


def _kill_groups(processes: Iterable[TiedProcess]) -> None:
    for process in processes:
        process.kill_group()


def _any_child_left() -> bool:
    """Collect children that have ended, and tell whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    file = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []
