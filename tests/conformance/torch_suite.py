"""Run the DDP tests that torch ships inside its wheel, one by one, with torch's class or with paceline's.

    python -m tests.conformance.torch_suite --library paceline test_ddp_inference      one test, with its log
    python -m tests.conformance.torch_suite --list

A library's server imports torch and its tests once; every rank of every test is a fork of it:

    report ──name──> server (one library, stand-in layer) ──fork──> rank 0 ┐ torch's own test method
       <──outcome───                                      ──fork──> rank 1 ┘
"""

import argparse
import ast
import ctypes
import dataclasses
import faulthandler
import importlib
import inspect
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Library = Literal["torch", "paceline"]
Verdict = Literal["pass", "fail", "skip"]

LIBRARIES: tuple[Library, ...] = ("torch", "paceline")
MODULES = ("distributed_test", "ddp_under_dist_autograd_test", "rpc.rpc_test")
HOME = "torch.testing._internal.distributed"
SUBJECT = "DistributedDataParallel"

LIMIT_SECONDS = 45.0
LONGER = {"test_ddp_uneven_inputs": 120.0}
GRACE_SECONDS = 1.5  # what the other ranks get to say once one has failed
STACK_SECONDS = 1.0  # what a stuck rank gets to write its stack
PR_SET_PDEATHSIG = 1

# Read by torch's test modules when they are imported, and by Gloo and TensorPipe when they listen.
ENVIRONMENT = {
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_ADDR2LINE": "1",  # else every C++ exception costs seconds
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # some tests load whole objects and are older than that default
}


@dataclass(frozen=True)
class Case:
    """One of torch's tests: its class, its method, and on how many ranks it runs."""

    name: str
    owner: type
    method: str
    size: int
    switched_off: str = ""  # why torch itself does not run it

    @property
    def seconds(self) -> float:
        """The time it may take."""
        return LONGER.get(self.method, LIMIT_SECONDS)


@dataclass(frozen=True)
class Outcome:
    """What happened to one test on one library."""

    name: str
    library: Library
    verdict: Verdict
    reason: str  # the last exception line, or why it was skipped
    seconds: float
    log: str


# ---- which tests ------------------------------------------------------------------------------------


def collect() -> list[Case]:
    """Find every test that reaches DistributedDataParallel, in the order of the source."""
    return [case for name in MODULES for case in _cases_of(importlib.import_module(f"{HOME}.{name}"))]


def _cases_of(module: ModuleType) -> Iterator[Case]:
    for class_name, method in _tests_that_reach(SUBJECT, inspect.getsource(module)):
        owner = _test_class(module, class_name)
        for name in _instances(owner, method):
            yield _case(owner, class_name, name)


def _case(owner: type, class_name: str, name: str) -> Case:
    test = getattr(owner, name)
    size = max(2, getattr(test, "gpus", 2))
    if class_name != "_DistTestBase":
        size, name = owner(name).world_size, f"{class_name}.{name}"
    return Case(name, owner, test.__name__, size, getattr(test, "__unittest_skip_why__", ""))


def _instances(owner: type, method: str) -> list[str]:
    """Give a test's names: several where torch has made one test per parameter."""
    if hasattr(owner, method):
        return [method]
    return sorted(name for name in dir(owner) if name.startswith(f"{method}_"))


def _tests_that_reach(subject: str, source: str) -> list[tuple[str, str]]:
    """Follow names from the tests of a module through its helpers to the subject, by reading alone."""
    definitions: dict[tuple[str, str], set[str]] = {}
    for owner, node in _definitions(ast.parse(source)):
        definitions[owner, node.name] = _names_in(node)
    reached = {subject}
    while new := {name for (_, name), used in definitions.items() if used & reached} - reached:
        reached |= new
    wanted = "ddp"
    return [
        (owner, name)
        for owner, name in definitions
        if name.startswith("test") and owner and (name in reached or wanted in name.lower())
    ]


def _definitions(module: ast.Module) -> Iterator[tuple[str, Any]]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in module.body:
        if isinstance(node, ast.ClassDef) and "Test" in node.name:
            for inner in [node, *(n for n in node.body if isinstance(n, ast.ClassDef))]:
                yield from ((inner.name, n) for n in inner.body if isinstance(n, ast.FunctionDef))
        elif isinstance(node, kinds):
            yield "", node


def _names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def _test_class(module: ModuleType, name: str) -> type:
    """Make the class that torch's test files make: the tests, and how their ranks start."""
    if name == "_DistTestBase":
        bases: tuple[type, ...] = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    else:
        from torch.testing._internal.common_distributed import MultiProcessTestCase
        from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
            TensorPipeRpcAgentTestFixture,
        )

        bases = (getattr(module, name), TensorPipeRpcAgentTestFixture, MultiProcessTestCase)
    return type(f"Conformance{name}", bases, {"__module__": module.__name__})


# ---- one test ---------------------------------------------------------------------------------------


def run(case: Case, library: Library) -> Outcome:
    """Fork the ranks of a test and wait for them, for so long and no longer."""
    folder = Path(tempfile.mkdtemp(prefix="conformance-"))
    try:
        started = time.monotonic()
        verdict, reason = _run_in(folder, case)
        log = "".join(
            f"---- rank {rank} ----\n{(folder / f'rank{rank}.log').read_text(errors='replace')}"
            for rank in range(case.size)
        )
        return Outcome(case.name, library, verdict, reason, round(time.monotonic() - started, 2), log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: Path, case: Case) -> tuple[Verdict, str]:
    _prepare(folder, case)
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(case.size)]
    ranks = [
        fork.Process(target=_rank, args=(case, rank, folder, pipes[rank][1])) for rank in range(case.size)
    ]
    for process in ranks:
        process.start()
    for _, child_end in pipes:
        child_end.close()
    try:
        texts, stuck = _watch(case, ranks, [mine for mine, _ in pipes])
    finally:
        _end(ranks)
    return _judge(case, texts, stuck, [process.exitcode for process in ranks])


def _prepare(folder: Path, case: Case) -> None:
    """Make what torch's test classes expect from their setUp, in a folder of our own."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    os.environ["WORLD_SIZE"] = str(case.size)
    os.environ["TEMP_DIR"] = str(folder)
    os.environ["INIT_METHOD"] = f"file://{folder / 'init_dir' / 'shared_init_file'}"


def _rank(case: Case, rank: int, folder: Path, pipe: Connection) -> None:
    """Be one rank: this is the fork's main function."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = (folder / f"rank{rank}.log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    case.owner._run(rank, case.method, str(folder / "store"), pipe)  # type: ignore[attr-defined]


def _watch(case: Case, ranks: list[Any], pipes: list[Connection]) -> tuple[dict[int, str], list[int]]:
    """Wait for all ranks. Gives the tracebacks in the order of arrival, and the ranks that never ended."""
    texts: dict[int, str] = {}
    deadline = time.monotonic() + case.seconds
    open_pipes = dict(zip(pipes, range(case.size), strict=True))
    alive = {process.sentinel: process for process in ranks}
    while alive and (left := deadline - time.monotonic()) > 0:
        for ready in wait([*open_pipes, *alive], timeout=left):
            if isinstance(ready, Connection):
                rank = open_pipes.pop(ready)
                text = _receive(ready)
                if text is not None:
                    texts[rank] = text
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            else:
                process = alive.pop(ready)  # type: ignore[arg-type]
                process.join()
                if process.exitcode:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    stuck = [rank for rank, process in enumerate(ranks) if process.sentinel in alive]
    if stuck:
        _show_stacks([ranks[rank].pid for rank in stuck])
    return texts, stuck


def _receive(pipe: Connection) -> str | None:
    try:
        return str(pipe.recv())
    except (EOFError, OSError):
        return None


def _show_stacks(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)


def _end(ranks: list[Any]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


def _judge(
    case: Case, texts: dict[int, str], stuck: list[int], codes: list[int | None]
) -> tuple[Verdict, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    if texts:
        rank, text = next(iter(texts.items()))
        return "fail", f"rank {rank}: {last_exception(text)}"
    if died := [
        (rank, code) for rank, code in enumerate(codes) if code and code not in skips and rank not in stuck
    ]:
        return "fail", "; ".join(f"rank {rank} {_ended(code)}" for rank, code in died)
    if stuck:
        return "fail", f"still running after {case.seconds:.0f} s: rank {', '.join(map(str, stuck))}"
    if codes[0] in skips:
        return "skip", skips[codes[0]]
    return "pass", ""


def _ended(code: int) -> str:
    return f"exited with {code}" if code > 0 else f"died of {signal.Signals(-code).name}"


EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")


def last_exception(text: str) -> str:
    """Give the last exception of a traceback in one line, without torch's C++ stack."""
    text = re.split(r"\n(?:Exception raised from|C\+\+ CapturedTraceback|#0 )", text)[0]
    lines = text.rstrip().splitlines()
    starts = [
        i for i, line in enumerate(lines) if EXCEPTION.match(line) and i and lines[i - 1].startswith(" ")
    ]
    return " ".join(" ".join(lines[starts[-1] if starts else -1 :]).split())


# ---- a server, and who asks it ----------------------------------------------------------------------


def install(library: Library) -> None:
    """Make this process a place where torch's tests run on one library, for good."""
    os.environ.update(ENVIRONMENT)
    from tests.conformance import standin

    if library == "paceline":
        from paceline.launch.bootstrap import drop_in

        drop_in()
    standin.open_skips()
    for name in MODULES:
        importlib.import_module(f"{HOME}.{name}")
    standin.install()
    import torch.nn.parallel

    standin.drop_devices(torch.nn.parallel.DistributedDataParallel)
    torch.set_num_threads(1)


def serve(library: Library) -> None:
    """Answer names on stdin by outcomes on stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    install(library)
    cases = {case.name: case for case in collect()}
    answers.write(json.dumps([[case.name, case.size, case.switched_off] for case in cases.values()]) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(dataclasses.asdict(run(cases[line.strip()], library))) + "\n")


class Server:
    """A process that runs tests on one library; a context manager."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __enter__(self) -> "Server":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.torch_suite", "--serve", "--library", self.library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=Path(__file__).parents[2],
        )
        self.cases: list[list[Any]] = json.loads(self._answer())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, name: str) -> Outcome:
        """Run one test to its end."""
        assert self._process.stdin
        self._process.stdin.write(f"{name}\n")
        return Outcome(**json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server for {self.library} ended with exit code {self._process.wait()}")
        return line


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.torch_suite", description=__doc__)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--library", choices=LIBRARIES, default="paceline")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="list the tests and their numbers of ranks")
    args = parser.parse_args()
    if args.serve:
        return serve(args.library)
    failed = False
    with Server(args.library) as server:
        for name, size, off in server.cases if args.list else []:
            print(f"{size}  {name}{f'  (torch does not run it: {off})' if off else ''}")
        for name in args.tests:
            outcome = server.run(name)
            print(f"{outcome.log}\n{name} on {args.library}: {outcome.verdict}, {outcome.seconds} s")
            print(outcome.reason)
            failed |= outcome.verdict == "fail"
    sys.exit(failed)


if __name__ == "__main__":
    main()
