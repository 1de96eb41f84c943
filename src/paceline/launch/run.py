"""`paceline run`: start the ranks of a job on this machine, watch them, and stop them together.

    launcher ──┬── rank 0   own session; stdout and stderr come back through pipes
               ├── rank 1
               └── store    the ranks' meeting point, on a loopback port that the kernel chose

One thread waits for output, ended children and signals alike. The first rank that fails ends the run: the
others get SIGTERM, and SIGKILL after a grace. Nothing outlives the launcher.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.launch.job import Job, rank_environment
from paceline.launch.output import Feed, Piece, screens
from paceline.launch.process import RankProcess, TiedProcess, adopt_orphans, end_leftovers
from paceline.launch.report import Ending, exit_code, failure_report, first_failure, interrupt_report
from paceline.launch.sockets import listen_on_loopback

GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
ECHO_SECONDS = 2.0  # after a failure that is the echo of another one: for that one to show
INTERRUPT_SECONDS = 10.0  # for the last ranks, once the first has ended after Ctrl-C or SIGTERM
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(job: Job) -> int:
    """Run a job to its end, and return what the launcher should exit with."""
    adopt_orphans()
    with _signals_as_bytes() as signals:
        supervisor = _Supervisor(job, signals)
        try:
            supervisor.watch()
        except BrokenPipeError:  # nobody reads our output any more
            return 128 + signal.SIGPIPE
        finally:
            supervisor.end_all()
        return supervisor.report()


class _Supervisor:
    """One run: its processes, what is still to be done to them, and how they ended."""

    def __init__(self, job: Job, signals: socket.socket) -> None:
        self._job = job
        self._out, self._err = screens()
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)
        self._store: TiedProcess | None = None
        self._running: list[RankProcess] = []
        self._started: list[RankProcess] = []
        self._feeds: dict[int, list[Feed]] = {}
        self._endings: list[Ending] = []
        self._passed_on: signal.Signals | None = None
        self._stopping = False  # because of a rank that failed
        self._due: dict[signal.Signals, float] = {}  # what the remaining ranks get, and when

    def watch(self) -> None:
        """Start everything, and return when the last rank has ended."""
        ranks = "1 rank" if self._job.size == 1 else f"{self._job.size} ranks"
        self._say(f"starting {ranks} of {' '.join(self._job.target)}")
        self._start()
        while self._running:
            for key, _ in self._selector.select(self._seconds_to_next_due()):
                key.data()
            self._collect_ended()
            self._check_store()
            self._send_due()

    def end_all(self) -> None:
        """Leave no process behind, whatever has happened."""
        for process in [*self._running, *([self._store] if self._store else [])]:
            process.kill_group()
        end_leftovers(self._started)
        self._selector.close()

    def report(self) -> int:
        """Say what there is to say about the ends of the ranks, and return the exit code."""
        code = exit_code(self._endings)
        if self._passed_on and code:
            lines = interrupt_report(self._passed_on.name, self._endings)
            code = code if first_failure(self._endings) else 128 + self._passed_on
        else:
            lines = failure_report(self._endings, self._job.size)
        for line in lines:
            self._say(line)
        return code

    def _start(self) -> None:
        with listen_on_loopback() as listener:
            port = listener.getsockname()[1]
            for rank in range(self._job.size):
                self._start_rank(rank, port)
            program = str(Path(__file__).with_name("store_host.py"))
            self._store = TiedProcess(
                [sys.executable, "-P", program, str(os.getpid()), str(listener.fileno())],
                inherit=(listener.fileno(),),
            )

    def _start_rank(self, rank: int, port: int) -> None:
        environment = rank_environment(os.environ, rank, self._job.size, port)
        process = RankProcess(rank, self._job.command, environment)
        prefix = self._job.prefix_of(rank)
        feeds = [
            Feed(process.stdout, self._out, prefix),
            Feed(process.stderr, self._err, prefix, process.last_words),
        ]
        for feed in feeds:
            self._selector.register(
                feed.source, selectors.EVENT_READ, lambda feed=feed: self._on_output(feed)
            )
        self._feeds[rank] = feeds
        self._running.append(process)
        self._started.append(process)

    def _on_output(self, feed: Feed) -> None:
        feed.pump()
        if feed.at_end:
            self._selector.unregister(feed.source)

    def _on_signals(self) -> None:
        for number in map(signal.Signals, self._signals.recv(64)):
            if number is signal.SIGINT and self._passed_on is signal.SIGINT:
                self._due[signal.SIGKILL] = time.monotonic()
            elif number in PASSED_ON:
                self._passed_on = number
                for rank in self._running:
                    rank.send(number)

    def _collect_ended(self) -> None:
        """Take note of ranks that have ended; SIGCHLD has woken us."""
        for rank in list(self._running):
            code = rank.exit_code()
            if code is None:
                continue
            self._running.remove(rank)
            for feed in self._feeds.pop(rank.rank):
                with contextlib.suppress(KeyError):
                    self._selector.unregister(feed.source)
                feed.finish()
            ending = Ending(rank.rank, code, stopped=self._stopping, last_words=tuple(rank.last_words))
            self._endings.append(ending)
            self._react_to(ending)

    def _react_to(self, ending: Ending) -> None:
        """Decide when the other ranks have to end, too."""
        if self._stopping or (ending.code == 0 and self._passed_on is None):
            return
        delay = 0.0
        if self._passed_on is not None:
            delay = INTERRUPT_SECONDS
        elif ending.symptom:
            delay = ECHO_SECONDS
        when = min(time.monotonic() + delay, self._due.get(signal.SIGTERM, float("inf")))
        self._due |= {signal.SIGTERM: when, signal.SIGKILL: when + GRACE_SECONDS}

    def _check_store(self) -> None:
        if self._store is None or self._store.exit_code() is None:
            return
        self._say(f"the store of this run ended with {self._store.exit_code()}, so the ranks cannot meet")
        self._store = None
        self._due = {signal.SIGTERM: time.monotonic(), signal.SIGKILL: time.monotonic() + GRACE_SECONDS}

    def _seconds_to_next_due(self) -> float | None:
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _send_due(self) -> None:
        for number in [number for number, when in self._due.items() if when <= time.monotonic()]:
            del self._due[number]
            self._stopping = True
            for rank in self._running:
                rank.send(number)

    def _say(self, text: str) -> None:
        quoted = not text or text.startswith(" ")
        self._err.show(None, b"" if quoted else b"paceline: ", Piece(text.encode(), finished=True))


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[socket.socket]:
    """Turn the signals that concern a launcher into bytes that can be waited for."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    # What we were started to ignore (nohup, a shell's background job) stays ignored.
    numbers = [n for n in (*PASSED_ON, signal.SIGCHLD) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
