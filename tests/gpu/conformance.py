"""torch's own tests of distributed autograd, on a GPU: `PYTHONPATH=src python3 tests/gpu/conformance.py`.

Of `ddp_under_dist_autograd_test` in torch's wheel: the cases that use CUDA, for which every rank's GPU is the
one that there is; and those cases that can be moved there as they are, by a default device. First with
torch's class, then with `paceline.DistributedDataParallel` in its place. Prints a table, and ends with a
non-zero status if ours fails where torch's passes.

    --device cpu    under the stand-in layer of tests/conformance, to see that this script works
    --all           also the other cases of that file, as they are, on the CPU
    --jobs 2        as many cases at a time (four ranks each, or six)

Every rank is a process of its own: one that forks after torch has looked for GPUs could not use them.
"""

import argparse
import ast
import functools
import importlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.conformance.torch_suite import ENVIRONMENT, HOME, LIBRARIES, MODULES, last_exception

ROOT = Path(__file__).parents[2]
FILE = "ddp_under_dist_autograd_test"
LIMIT_SECONDS = 90.0
GRACE_SECONDS = 3.0  # what the other ranks get once one has failed

# They make all their tensors on one thread, by functions that know of a default device.
MOVABLE = ("test_ddp_comparison", "test_ddp_comparison_uneven_inputs", "test_ddp_dist_autograd_sparse_grads")


@dataclass(frozen=True)
class Case:
    """One of torch's tests, and where it runs."""

    owner: str
    method: str
    way: str  # "gpu": it uses one itself; "moved" there; or as it is, on the "cpu"

    @property
    def size(self) -> int:
        return 6 if self.owner == "DdpUnderDistAutogradTest" else 4


@dataclass(frozen=True)
class Outcome:
    verdict: str
    reason: str
    seconds: float


def cases() -> Iterator[Case]:
    """Find the cases in the file, by reading it."""
    spec = importlib.util.find_spec(f"{HOME}.{FILE}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for owner in ast.parse(source).body:
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                uses_cuda = ".cuda(" in (ast.get_source_segment(source, node) or "")
                moved = "moved" if node.name in MOVABLE else "cpu"
                yield Case(owner.name, node.name, "gpu" if uses_cuda else moved)


# ---- a rank -----------------------------------------------------------------------------------------


def be_rank(case: Case, rank: int, library: str, device: str, folder: Path) -> None:
    """Run torch's test method, and leave its traceback in a file if it raises."""
    if library == "paceline":
        from paceline.launch.bootstrap import drop_in

        drop_in()
    from tests.conformance import standin

    standin.open_skips()
    module = importlib.import_module(f"{HOME}.{FILE}")
    owner = _test_class(module, case.owner)
    if device == "cpu":
        _stand_in(standin)
    elif case.way != "cpu":
        _share_one_gpu(case.way)
    mine, theirs = multiprocessing.Pipe()
    try:
        owner._run(rank, case.method, str(folder / "store"), theirs)
    finally:
        if mine.poll() and (text := _read(mine)):
            (folder / f"raised-{rank}").write_text(text)


def _read(pipe: Any) -> str:
    try:
        return str(pipe.recv())
    except EOFError:  # closed, and nothing was said
        return ""


def _test_class(module: Any, name: str) -> Any:
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
        TensorPipeRpcAgentTestFixture,
    )

    bases = (getattr(module, name), TensorPipeRpcAgentTestFixture, MultiProcessTestCase)
    return type(f"OnGpu{name}", bases, {"__module__": module.__name__})


def _stand_in(standin: Any) -> None:
    import torch.nn.parallel

    for name in MODULES:  # what they import has to be there before: some of it is compiled to TorchScript
        importlib.import_module(f"{HOME}.{name}")
    standin.install()
    standin.drop_devices(torch.nn.parallel.DistributedDataParallel)
    torch.set_num_threads(1)


def _share_one_gpu(way: str) -> None:
    """Let every rank's own GPU be the first one."""
    import torch

    torch.cuda.set_device(0)
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = functools.partialmethod(_to_first, kind.cuda)  # type: ignore[method-assign, assignment]
    ddp = torch.nn.parallel.DistributedDataParallel
    construct = ddp.__init__

    @functools.wraps(construct)
    def __init__(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        construct(self, module, device_ids and [0], *args, **kwargs)

    ddp.__init__ = __init__  # type: ignore[method-assign]
    if way == "moved":
        torch.set_default_device("cuda:0")
        torch.LongTensor = _LongTensor  # type: ignore[misc, assignment]


def _to_first(self: Any, to: Any, *_: object, **kwargs: Any) -> Any:
    return to(self, 0, **kwargs)


class _LongTensor:
    """Makes what torch.LongTensor makes of a number or a list, on the default device."""

    def __new__(cls, what: Any) -> Any:
        import torch

        return torch.empty(what, dtype=torch.long) if isinstance(what, int) else torch.tensor(list(what))


# ---- a case -----------------------------------------------------------------------------------------


def run_case(case: Case, library: str, device: str) -> Outcome:
    """Start the ranks of a case and wait for them, for so long and no longer."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        folder, started = Path(name), time.monotonic()
        ranks = [_start(case, rank, library, device, folder) for rank in range(case.size)]
        stuck = _await(ranks)
        verdict, reason = _judge(folder, [rank.returncode for rank in ranks], stuck)
        if verdict == "fails":
            logs = [(folder / f"log-{rank}").read_text(errors="replace")[-1500:] for rank in range(case.size)]
            for rank, log in enumerate(logs):
                print(f"---- {library}, {case.method}, rank {rank}\n{log}", flush=True)
    return Outcome(verdict, reason, time.monotonic() - started)


def _start(case: Case, rank: int, library: str, device: str, folder: Path) -> "subprocess.Popen[bytes]":
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(exist_ok=True)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "WORLD_SIZE": str(case.size),
        "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder / 'init_dir' / 'shared_init_file'}",
    }
    words = ["--rank", rank, "--library", library, "--device", device, "--folder", folder]
    words += ["--case", case.owner, case.method, case.way]
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, *map(str, words)], env=environment, stdout=log, stderr=log, cwd=ROOT
        )


def _await(ranks: Sequence["subprocess.Popen[bytes]"]) -> list[int]:
    """Wait for all ranks; return those that never ended."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    stuck = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    for number in stuck:
        ranks[number].kill()
        ranks[number].wait()
    return stuck


def _judge(folder: Path, codes: list[int], stuck: list[int]) -> tuple[str, str]:
    raised = sorted(folder.glob("raised-*"), key=lambda file: file.stat().st_mtime_ns)
    if raised:
        rank = raised[0].name.partition("-")[2]
        return "fails", f"rank {rank}: {last_exception(raised[0].read_text())}"
    ended = [(rank, code) for rank, code in enumerate(codes) if code and rank not in stuck]
    if ended and all(code in _skips() for _, code in ended):
        return "skips", _skips()[ended[0][1]]
    if ended:
        return "fails", "; ".join(f"rank {rank} {_word(code)}" for rank, code in ended)
    return ("fails", f"rank {', '.join(map(str, stuck))} still running") if stuck else ("passes", "")


def _word(code: int) -> str:
    return f"exited with {code}" if code > 0 else f"died of {signal.Signals(-code).name}"


@functools.cache
def _skips() -> dict[int, str]:
    importlib.import_module("tests.conformance.standin")  # has what torch's tests import and is not there
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


# ---- all of them ------------------------------------------------------------------------------------


def run_all(chosen: Sequence[Case], library: str, device: str, jobs: int) -> dict[Case, Outcome]:
    left: SimpleQueue[Case] = SimpleQueue()
    seen: dict[Case, Outcome] = {}
    for case in chosen:
        left.put(case)

    def work() -> None:
        while True:
            try:
                case = left.get_nowait()
            except Empty:
                return
            seen[case] = outcome = run_case(case, library, device)
            line = f"{library:9}{outcome.verdict:7}{outcome.seconds:6.1f} s  {case.method}  {outcome.reason}"
            print(line[:600].rstrip(), flush=True)

    helpers = [threading.Thread(target=work) for _ in range(jobs)]
    for helper in helpers:
        helper.start()
    for helper in helpers:
        helper.join()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(Case(*args.case), args.rank, args.library, args.device, args.folder)
        return 0
    os.environ.update(ENVIRONMENT)
    chosen = [case for case in cases() if args.all or case.way != "cpu"]
    seen = {library: run_all(chosen, library, args.device, args.jobs) for library in LIBRARIES}
    print(f"\n{'test':72}{'ranks':6}{'where':8}{'torch':8}ours")
    worse = 0
    for case in chosen:
        theirs, ours = (seen[library][case].verdict for library in ("torch", "paceline"))
        worse += theirs == "passes" and ours != "passes"
        where = "cpu" if args.device == "cpu" else case.way
        print(f"{f'{case.owner}.{case.method}':72}{case.size:<6}{where:8}{theirs:8}{ours}")
    passed = sum(outcome.verdict == "passes" for outcome in seen["torch"].values())
    print(f"torch passes {passed} of {len(chosen)}; ours fails {worse} of these")
    return min(worse + (passed == 0), 1)


if __name__ == "__main__":
    sys.exit(main())
