"""Runs programs on real Gloo processes: a pool of ranks that lives as long as no program has broken it.

    pool      program ──pipe──> rank 0 ┐ one group of all ranks, and one for each smaller number of them
       └────── what was seen <── rank 1 ┘

A rank that gives no answer in time is asked for its stacks, and the pool is started anew.
"""

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.soak.interpreter import Entry, run
from tests.soak.program import Program
from tests.soak.reference import Mismatch

HANG_SECONDS = 30.0
GROUP_SECONDS = 15.0  # how long ranks may keep each other waiting
STACK_SECONDS = 3.0
EXIT_SECONDS = 5.0
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "paceline", "tests.soak.interpreter"]
LOSSES = ("PeerLost", "PeerTimeout", "CommunicationFault")


class Rank:
    """One process of the pool, seen from outside."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._stack_file = folder / f"stack.{rank}"
        self.pipe, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(
            target=_be_a_rank, args=(rank, size, folder, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """Ask for the stacks of all threads."""
        if self.process.pid is None or not self.process.is_alive():
            return f"it has ended with code {self.process.exitcode}"
        os.kill(self.process.pid, signal.SIGUSR1)
        text, deadline = "", time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, text = text, self._stack_file.read_text()
            if text and text == before:
                break
        return text or "(no stack)"

    def end(self) -> None:
        self.process.kill()
        self.process.join(EXIT_SECONDS)


class Pool:
    """Rank processes that run one program after the other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: list[Rank] = []
        self._folder = Path()
        self.starts = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
        self._ranks = [Rank(rank, self._size, self._folder) for rank in range(self._size)]

    def stop(self) -> None:
        """End all ranks; the next program starts new ones."""
        for rank in self._ranks:
            rank.end()
        if self._ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks = []

    def run(self, program: Program) -> list[list[Entry]]:
        """Return what each rank has seen. Whatever goes wrong leaves no pool behind that is in doubt."""
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                rank.pipe.send_bytes(pickle.dumps(program))
            seen = self._collect()[: program.ranks]
        except BaseException:
            self.stop()
            raise
        if any(entry.error in LOSSES for entries in seen for entry in entries):
            self.stop()
        return seen

    def _collect(self) -> list[list[Entry]]:
        answers: dict[int, list[Entry]] = {}
        pending = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + HANG_SECONDS
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), left):
                answers[pending.pop(pipe)] = self._answer(pipe)  # type: ignore[arg-type,call-overload]
        if pending:
            stuck = sorted(pending.values())
            told = "\n".join(f"rank {number}:\n{self._ranks[number].stacks()}" for number in stuck)
            raise Mismatch(f"ranks {stuck} gave no answer within {HANG_SECONDS:g} s\n{told}")
        return [answers[number] for number in range(self._size)]

    def _answer(self, pipe: Connection) -> list[Entry]:
        try:
            answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            time.sleep(0.2)
            ended = {
                n: rank.process.exitcode for n, rank in enumerate(self._ranks) if not rank.process.is_alive()
            }
            raise Mismatch(f"a process has ended; exit codes by rank: {ended}") from None
        if isinstance(answer, str):
            raise Mismatch(f"a rank raised outside of its steps:\n{answer}")
        return answer


# ---- a rank ----------------------------------------------------------------------------------------------


def _be_a_rank(rank: int, size: int, folder: Path, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool ends its ranks
    stack = (folder / f"stack.{rank}").open("w")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    logging.getLogger("paceline").setLevel(logging.ERROR)
    timeout = timedelta(seconds=GROUP_SECONDS)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    groups = {count: dist.new_group(list(range(count)), timeout=timeout) for count in range(2, size + 1)}
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            program: Program = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(_answer_to(program, rank, groups)))


def _answer_to(program: Program, rank: int, groups: dict[int, Any]) -> list[Entry] | str:
    if rank >= program.ranks:
        return []
    try:
        return run(program, rank, groups[program.ranks])
    except Exception:
        return traceback.format_exc()
