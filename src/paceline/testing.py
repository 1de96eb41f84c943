"""Run a test once per rank, in fresh processes that cost milliseconds.

    @ranks(2)
    def test_sum(rank):
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == 3

A fork server imports torch once per session, and every rank of every test is a fork of it:

    pytest ──starts once──> fork server ──fork──> rank 0 ┐ one group, over a FileStore
       └────── outcome, release ──────────fork──> rank 1 ┘ in the test's scratch folder

When a test fails, the message holds the traceback of every rank that failed, the exit code or signal of every
rank that died, and the stack of every rank that never finished.
"""

import ast
import contextlib
import enum
import faulthandler
import fcntl
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings as python_warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, cast

__all__ = ["RankFailure", "ranks"]

GRACE_SECONDS = 1.0  # what the other ranks get to finish once one has failed
EXIT_SECONDS = 10.0  # what a rank gets to close its group and exit after the test body
STACK_SECONDS = 2.0  # what a stuck rank gets to write its stack

# The optimizers import torch._dynamo at their first use: a second per rank, unless the fork server did it.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "paceline", "pytest", "_pytest.assertion.rewrite"]
PRELOAD_IF_USED = ["numpy", "hypothesis", "torch.distributed.tensor", "torch.distributed.optim"]

Test = Callable[..., None]
Warnings = Literal["error", "default", "ignore"]


class RankFailure(AssertionError):
    """Report the ranks of a test that did not finish cleanly; ``texts`` holds what each had to say."""

    def __init__(self, size: int, texts: dict[int, str]) -> None:
        self.texts = texts
        super().__init__("\n\n".join(f"rank {rank} of {size} {text}" for rank, text in texts.items()))


def ranks(
    size: int, timeout: float = 60.0, backend: str | None = "gloo", *, warnings: Warnings = "error"
) -> Callable[[Test], Test]:
    """Run the decorated test on ``size`` ranks joined by one default process group.

    The test may ask for ``rank`` and ``size``. Every other argument is an ordinary pytest fixture or
    parameter and has to be picklable: all ranks get a copy of the same value, so ``tmp_path`` is one folder
    for all. Each rank is a fresh process with one torch thread and seed 0. The test fails unless every rank
    finishes within ``timeout`` seconds; it is skipped if every rank skips. ``backend=None`` makes no group.

    Warnings are errors inside the ranks; ``warnings="default"`` or ``"ignore"`` lifts that, and
    ``pytest.mark.filterwarnings`` adds exceptions to it.
    """
    _check_arguments(size, timeout)

    def decorate(test: Test) -> Test:
        run = _in_ranks(test, size, timeout, backend, warnings)
        run.body_on_a_rank = test  # type: ignore[attr-defined]
        return run

    return decorate


def _check_arguments(size: object, timeout: float) -> None:
    if callable(size):
        raise TypeError("@ranks needs the number of ranks: write @ranks(2)")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"@ranks needs one rank or more, got {size!r}")
    if timeout <= 0:
        raise ValueError(f"@ranks needs a timeout above 0 seconds, got {timeout!r}")


def _in_ranks(test: Test, size: int, timeout: float, backend: str | None, warnings: Warnings) -> Test:
    if "<locals>" in test.__qualname__:
        raise TypeError(
            f"@ranks: {test.__qualname__} is defined inside a function; ranks need a test at module level"
        )
    file = inspect.unwrap(test).__globals__["__file__"]
    signature = inspect.signature(test)
    visible = [p for p in signature.parameters.values() if p.name not in ("rank", "size")]
    signature = signature.replace(parameters=visible)

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        arguments = signature.bind(*args, **kwargs).arguments
        arguments.pop("self", None)  # a rank makes its own
        with _scratch_folder() as scratch:
            task = Task(
                file=Path(file).resolve(),
                module=test.__module__,
                qualname=test.__qualname__,
                size=size,
                timeout=timeout,
                backend=backend,
                warnings=(warnings, *_warning_marks(run)),
                scratch=scratch,
                arguments=_pickled(arguments),
                environment=dict(os.environ),
            )
            _judge(task, _run(task))

    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _pickled(arguments: dict[str, object]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"@ranks: argument {name!r} ({type(value).__name__}) cannot be sent to the ranks: {error}. "
                f"Make it inside the test instead"
            ) from error
    return pickle.dumps(arguments)


def _warning_marks(run: Test) -> Iterator[str]:
    of_module = getattr(sys.modules[run.__module__], "pytestmark", [])
    for mark in (
        *getattr(run, "pytestmark", []),
        *(of_module if isinstance(of_module, list) else [of_module]),
    ):
        if mark.name == "filterwarnings":
            yield from mark.args


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="paceline-ranks-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# What the test process and the ranks tell each other


@dataclass(frozen=True)
class Task:
    """One run of one test: all that its ranks need to know."""

    file: Path
    module: str
    qualname: str
    size: int
    timeout: float
    backend: str | None
    warnings: tuple[str, ...]
    scratch: Path
    arguments: bytes  # pickled: they may be instances of classes of the test's own module
    environment: dict[str, str]

    def stack_file(self, rank: int) -> Path:
        """Name the file a rank writes its stack to when asked."""
        return self.scratch / f"stack.{rank}"

    def output_file(self, rank: int) -> Path:
        """Name the file a rank's stdout and stderr go to."""
        return self.scratch / f"output.{rank}"


class End(enum.Enum):
    """How a rank ended; in reports, the likely causes come first."""

    DIED = enum.auto()
    FAILED = enum.auto()
    STUCK = enum.auto()
    SKIPPED = enum.auto()
    PASSED = enum.auto()


@dataclass(frozen=True)
class Outcome:
    """How a rank ended, and the words for it."""

    end: End
    text: str = ""

    @property
    def bad(self) -> bool:
        """Tell whether the test has failed because of this rank."""
        return self.end in (End.DIED, End.FAILED, End.STUCK)


# The test process


class Worker:
    """A running rank, seen from the test process."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task = task
        self.rank = rank
        self.pipe, theirs = _fork_server().Pipe()
        self.process: ForkServerProcess = _fork_server().Process(target=_rank_main, args=(task, rank, theirs))
        self.process.start()
        theirs.close()

    def outcome(self) -> Outcome:
        """Read what the rank reports, or how it died."""
        try:
            return cast(Outcome, self.pipe.recv())
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_SECONDS)
            return Outcome(End.DIED, self.death())

    def death(self) -> str:
        """Say how the rank's process ended, with the last lines it wrote."""
        lines = self.task.output_file(self.rank).read_text(errors="replace").splitlines()[-20:]
        return "\n".join([_ending(self.process.exitcode), *lines])

    def stack(self) -> str:
        """Ask a rank that is still running for the stacks of its threads."""
        file = self.task.stack_file(self.rank)
        os.kill(self._pid, signal.SIGUSR1)
        text, deadline = "", time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            last, text = text, file.read_text() if file.exists() else ""
            if text and text == last:
                return _readable_stack(text)
        return "(it gave no stack)"

    def release(self) -> Outcome:
        """Let a rank that reported close its group and exit."""
        self.pipe.close()
        self.process.join(EXIT_SECONDS)
        if self.process.exitcode is None:
            text = f"did not exit within {EXIT_SECONDS:g} s after the test; it was here\n{self.stack()}"
            return Outcome(End.STUCK, text)
        if self.process.exitcode:
            return Outcome(End.DIED, f"finished the test, then {self.death()}")
        return Outcome(End.PASSED)

    def kill(self) -> None:
        """End the rank and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@functools.cache
def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    used = [name for name in sys.modules if name in PRELOAD_IF_USED or name.startswith("paceline.")]
    context.set_forkserver_preload(PRELOAD + used)
    return context


def _run(task: Task) -> dict[int, Outcome]:
    """Run a task on all its ranks; whatever happens, none is left behind."""
    workers: list[Worker] = []
    try:
        for rank in range(task.size):
            workers.append(Worker(task, rank))
        outcomes = _collect(workers, task.timeout)
        if not any(outcome.bad for outcome in outcomes.values()):
            exits = {worker.rank: worker.release() for worker in workers}
            outcomes |= {rank: outcome for rank, outcome in exits.items() if outcome.bad}
        return outcomes
    finally:
        for worker in workers:
            worker.kill()
        _show_output(task)


def _collect(workers: list[Worker], timeout: float) -> dict[int, Outcome]:
    """Wait until every rank has reported or time is up."""
    outcomes: dict[int, Outcome] = {}
    running: dict[object, Worker] = {worker.pipe: worker for worker in workers}
    deadline = time.monotonic() + timeout
    why = f"was still running after {timeout:g} s"
    while running and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(cast(list[Connection], list(running)), left):
            worker = running.pop(pipe)
            outcomes[worker.rank] = worker.outcome()
            if outcomes[worker.rank].bad and time.monotonic() + GRACE_SECONDS < deadline:
                deadline = time.monotonic() + GRACE_SECONDS
                why = f"was still running when rank {worker.rank} had failed"
    for worker in running.values():
        outcomes[worker.rank] = Outcome(End.STUCK, f"{why}; it was here\n{worker.stack()}")
    return outcomes


def _judge(task: Task, outcomes: dict[int, Outcome]) -> None:
    """Pass, skip or fail the test."""
    __tracebackhide__ = True
    in_order = sorted(outcomes.items(), key=lambda item: (item[1].end.value, item[0]))
    skips = {rank: outcome.text for rank, outcome in in_order if outcome.end is End.SKIPPED}
    failures = {rank: outcome.text for rank, outcome in in_order if outcome.bad}
    if len(skips) == task.size:
        import pytest

        pytest.skip(skips[0])
    if skips:
        failures |= {rank: f"skipped, not every rank did: {reason}" for rank, reason in skips.items()}
    if failures:
        raise RankFailure(task.size, failures)


def _show_output(task: Task) -> None:
    """Print what the ranks wrote, where pytest captures it with the test."""
    for rank in range(task.size):
        file = task.output_file(rank)
        for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
            print(f"[rank {rank}] {line}")


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"died with exit code {exit_code}"


def _readable_stack(text: str) -> str:
    """Leave out the frames that every rank has below its test, and the thread addresses."""
    ours = re.compile(rf'File "({re.escape(__file__)}|.*/multiprocessing/\w+\.py|<string>)", ')
    lines = [re.sub(r"[Tt]hread 0x[0-9a-f]+", "thread", line) for line in text.splitlines()]
    return "\n".join(line for line in lines if not ours.search(line))


# A rank


def _rank_main(task: Task, rank: int, pipe: Connection) -> None:
    """Be one rank: set up, run the test body, report, and leave when told to."""
    _prepare_process(task, rank)
    outcome = _outcome_of_body(task, rank)
    _flush()
    pipe.send(outcome)
    # Hold still until all have reported: closing a group under a rank that still uses it fails that rank.
    with contextlib.suppress(EOFError, ConnectionResetError):
        pipe.recv()
    _leave_group()
    _flush()


def _prepare_process(task: Task, rank: int) -> None:
    import torch

    os.setsid()
    _die_with_the_test_process()
    output = os.open(task.output_file(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(2)
    stack = task.stack_file(rank).open("w")  # stays open: a rank may get stuck while it exits, too
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ.clear()
    os.environ.update(task.environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


def _die_with_the_test_process() -> None:
    """Have the kernel end this rank's process group when the test process is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The far end of this pipe closes with the test process: the SIGIO that follows is deadly by default.
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
    flags = fcntl.fcntl(parent.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _outcome_of_body(task: Task, rank: int) -> Outcome:
    from _pytest.outcomes import Skipped

    try:
        _join_group(task, rank)
        body, own = _find_body(task), {"rank": rank, "size": task.size}
        own = {name: value for name, value in own.items() if name in inspect.signature(body).parameters}
        arguments = pickle.loads(task.arguments)
        with python_warnings.catch_warnings():
            _filter_warnings(task.warnings)
            body(**own, **arguments)
    except Skipped as skip:
        return Outcome(End.SKIPPED, str(skip.msg))
    except BaseException as error:
        return Outcome(End.FAILED, f"failed\n{_readable_traceback(error, str(task.file))}")
    return Outcome(End.PASSED)


def _join_group(task: Task, rank: int) -> None:
    import torch
    import torch.distributed as dist

    if task.backend is None:
        return
    if "nccl" in task.backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(task.scratch / "store"), task.size)  # type: ignore[attr-defined]
    dist.init_process_group(task.backend, store=store, rank=rank, world_size=task.size)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _filter_warnings(filters: tuple[str, ...]) -> None:
    from _pytest.config import parse_warning_filter

    for text in filters:
        python_warnings.filterwarnings(*parse_warning_filter(text, escape=False))


def _readable_traceback(error: BaseException, file: str) -> str:
    """Format a traceback from the test's own frame on."""
    top = error.__traceback__
    while top is not None and top.tb_frame.f_code.co_filename != file:
        top = top.tb_next
    return "".join(traceback.format_exception(type(error), error, top or error.__traceback__)).rstrip()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _find_body(task: Task) -> Test:
    """Import the test's module and find the function below @ranks in it."""
    owner: Any = None
    found: Any = _load(task.module, task.file)
    for name in task.qualname.split("."):
        owner, found = found, getattr(found, name)
    while not hasattr(
        found, "body_on_a_rank"
    ):  # decorators above @ranks: hypothesis and those that say __wrapped__
        found = found.hypothesis.inner_test if hasattr(found, "hypothesis") else found.__wrapped__
    body: Test = found.body_on_a_rank
    return functools.partial(body, owner()) if "self" in inspect.signature(body).parameters else body


def _load(name: str, file: Path) -> types.ModuleType:
    """Import a test file by path under the name pytest gave it."""
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    if package := name.rpartition(".")[0]:
        with contextlib.suppress(ImportError):  # pytest's importlib mode names folders that are no packages
            importlib.import_module(package)
    spec = importlib.util.spec_from_file_location(name, file, loader=_ReadableAsserts(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _ReadableAsserts(importlib.abc.Loader):
    """Load a test file the way pytest does: asserts that fail show their values."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def exec_module(self, module: types.ModuleType) -> None:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.file.read_bytes()
        tree = ast.parse(source, filename=str(self.file))
        rewrite_asserts(tree, source, str(self.file))
        exec(compile(tree, str(self.file), "exec", dont_inherit=True), module.__dict__)
