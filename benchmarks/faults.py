"""What the other ranks see of a fault: ``python -m benchmarks.faults [--quick]``.

For each fault at each phase of a step it starts a small job of two to four processes, makes the last rank
stop, die, raise or dawdle there, and writes down what every other rank printed or raised, and how many
seconds later. Stalls are told after STALL seconds here, and given up after TIMEOUT. A phase lasts a while
before its fault, as phases in earnest do.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STALL, TIMEOUT, SLOW, SETTLED = 1.0, 4.0, 3.0, 0.7
FAULT_STEP = 2
STEPS = 4
MARK = "@@"  # before what a rank tells us, with the time

FAULTS = ("SIGSTOP", "SIGKILL", "exception", "slow")
PHASES = ("loading", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Case:
    """One fault, at one phase, among some ranks."""

    fault: str
    phase: str
    size: int


def cases(*, quick: bool) -> Iterator[Case]:
    for number, fault in enumerate(FAULTS):
        for place, phase in enumerate(PHASES):
            for size in [2 + (number + place) % 3] if quick else (2, 3, 4):
                yield Case(fault, phase, size)
    for size in [2] if quick else (2, 3, 4):
        yield Case("slow compile", "compiling", size)


# ---- a rank -----------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"{MARK} {time.time():.3f} {text}", file=sys.stderr, flush=True)


def fail(fault: str) -> None:
    time.sleep(SETTLED)  # so that the last report is of this phase
    say("fault")
    if fault == "exception":
        raise ValueError("made to fail")
    if fault == "slow":
        time.sleep(SLOW)
        return
    os.kill(os.getpid(), getattr(signal, fault))


def train(rank: int, case: Case, folder: str) -> None:
    import logging

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader

    import paceline

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    torch.set_num_threads(1)
    logging.getLogger("paceline").addHandler(Told())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", case.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.size)
    step = 0

    def here(phase: str) -> None:
        if rank == case.size - 1 and step == FAULT_STEP and phase == case.phase:
            fail(case.fault)

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2 * STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            here("loading") if index % 2 == 0 else None
            return torch.full((8,), float(index))

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx, gradient: torch.Tensor) -> torch.Tensor:
            here("backward")
            return gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            here("forward")
            return self.head(Back.apply(self.body(x)))

    model = paceline.replicate(
        Net(), bucket_mb=1e-4, first_bucket_mb=1e-4, stall_seconds=STALL, timeout_seconds=TIMEOUT
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: here("optimizer"))

    def slow_backend(graph: torch.fx.GraphModule, _inputs: object):
        say("fault")
        time.sleep(SLOW)
        return graph.forward

    loader = iter(DataLoader(Data(), batch_size=2))
    try:
        for step in range(STEPS):
            batch = next(loader)
            if case.fault == "slow compile" and rank == case.size - 1 and step == FAULT_STEP:
                torch.compile(lambda x: x * 2, backend=slow_backend)(batch)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
    say("finished")


# ---- the job ----------------------------------------------------------------------------------------


def run(case: Case, seconds: float = 40.0) -> list[tuple[float, int, str]]:
    """Run a job; return when, after the fault, each other rank said what."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.utils.data", "paceline.doors"])
    with tempfile.TemporaryDirectory() as folder:
        jobs = [context.Process(target=be, args=(rank, case, folder)) for rank in range(case.size)]
        for job in jobs:
            job.start()
        deadline = time.monotonic() + seconds
        for job in jobs[:-1]:
            job.join(max(0.1, deadline - time.monotonic()))
        ended = float("nan") if any(job.is_alive() for job in jobs[:-1]) else time.time()
        for job in jobs:
            job.kill()
            job.join()
        texts = [Path(f"{folder}/{rank}").read_text() for rank in range(case.size)]
    return list(told(texts, case, ended))


def be(rank: int, case: Case, folder: str) -> None:
    with Path(f"{folder}/{rank}").open("w") as output:
        os.dup2(output.fileno(), 2)
    train(rank, case, folder)


def told(texts: list[str], case: Case, ended: float) -> Iterator[tuple[float, int, str]]:
    began = next((at for at, text in marked(texts[-1]) if text == "fault"), float("nan"))
    for rank, text in enumerate(texts[:-1]):
        for at, words in marked(text):
            yield at - began, rank, words
    yield ended - began, -1, "all other processes have ended" if ended == ended else "a process did not end"


def marked(text: str) -> Iterator[tuple[float, str]]:
    for line in text.splitlines():
        if line.startswith(MARK):
            _, at, words = line.split(" ", 2)
            yield float(at), words


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one number of ranks for each case")
    parser.add_argument("--only", help="faults whose name holds this", default="")
    chosen = parser.parse_args()
    print(f"stall_seconds={STALL:g}, timeout_seconds={TIMEOUT:g}; a slow phase takes {SLOW:g} s more.")
    print(f"Seconds are counted from the fault; the others have waited for some {SETTLED:g} s by then.\n")
    print("| fault | phase | ranks | after | who | what it printed or raised |\n|---|---|---|---|---|---|")
    for case in cases(quick=chosen.quick):
        if chosen.only in case.fault:
            for at, rank, words in sorted(run(case)):
                who = f"rank {rank}" if rank >= 0 else ""
                print(f"| {case.fault} | {case.phase} | {case.size} | {at:.1f} s | {who} | {words} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
