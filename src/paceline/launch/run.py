"""`paceline run`: start the ranks of a script on this machine, watch them, and stop them together.

    launcher ──┬── rank 0   own session; stdout and stderr come back through pipes
               ├── rank 1
               └── store    the ranks' meeting point, on a loopback port that the kernel chose

One thread waits for output, ended children and signals alike. The first rank that fails ends the run: the others get
SIGTERM, and SIGKILL after a grace. Nothing outlives the launcher.
"""

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.output import Lines, Piece, Screen, screens
from paceline.launch.place import LOOPBACK
from paceline.launch.process import RankProcess, adopt_orphans, end_leftovers
from paceline.launch.report import Ending, exit_code, failure_report, first_failure, interrupt_report
from paceline.launch.sockets import listen_on_loopback

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
ECHO_SECONDS = 2.0  # after a failure that is the echo of another one: wait for that one to show
INTERRUPT_SECONDS = 10.0  # what the last ranks get once the first has ended after Ctrl-C or SIGTERM
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """What to run, and how often."""

    target: tuple[str, ...]  # a script or -m and a module, with arguments
    size: int
    drop_in: bool = False
    prefix: bool = True

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of every rank."""
        if self.drop_in:
            return (sys.executable, "-P", "-m", "paceline.launch.bootstrap", *self.target)
        return (sys.executable, *self.target)


def rank_environment(base: Mapping[str, str], rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of one rank: what torchrun would set, and loopback for all sockets."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    defaults = {
        "OMP_NUM_THREADS": str(max(1, _cores() // size)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TP_SOCKET_IFNAME": loopback,
        "PYTHONFAULTHANDLER": "1",
    }
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"paceline-{os.getpid()}",
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **base, **place}


def run(job: Job) -> int:
    """Run a job to its end, and return the exit code that the launcher should have."""
    return _Supervisor(job).run()


class _Supervisor:
    """One run: its ranks, what is still to be done about them, and how they ended."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._out, self._err = screens()
        self._ranks: list[RankProcess] = []
        self._endings: list[Ending] = []
        self._flushes: dict[int, list[Callable[[], None]]] = {}
        self._passed_on: signal.Signals | None = None
        self._stopping = False
        self._due: dict[signal.Signals, float] = {}  # signals that the remaining ranks get, and when

    def run(self) -> int:
        adopt_orphans()
        with _signals_as_bytes() as signals, _store() as (store, port):
            self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signals(signals))
            try:
                self._start(port)
                while self._running():
                    self._turn()
                    self._check_store(store)
            finally:
                for rank in self._ranks:
                    rank.kill_group()
        ...
