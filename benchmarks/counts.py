"""Bar 10: what a step issues, counted and not timed.

Operators are counted where torch dispatches them, collectives too (namespace ``c10d``); calls from autograd
into paceline are counted by Python's profiler. So the counts hold whatever our own functions are called.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from benchmarks.cycles import exactly
from benchmarks.overhead import Scales
from benchmarks.ranks import on_ranks, say
from benchmarks.table import Row

PARAMETERS = 1000
FLOATS = 64
OUR_FILES = str(Path(paceline.__file__).parent)
ENGINE = "_engine_run_backward"  # torch's Python function from which the autograd engine runs
NO_WORK = {"empty", "empty_strided", "empty_like", "new_empty"}  # memory, but nothing done with it


@dataclass(frozen=True)
class Counts:
    """What the backward of one step issued beyond the plain model's."""

    buckets: int
    operators: dict[str, int]  # that compute or copy; views and plain allocations do neither
    collectives: dict[str, int]
    calls: int  # from the autograd engine into paceline

    @property
    def kernels(self) -> int:
        return sum(self.operators.values())


class Operators(TorchDispatchMode):
    """Counts what is dispatched inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.collectives[name] += 1
        elif not func.is_view and name not in NO_WORK:
            self.work[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def calls_from_autograd() -> Iterator[list[str]]:
    """Collect the names of our functions that the autograd engine calls inside the block."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OUR_FILES):
            caller = frame.f_back
            if caller is not None and caller.f_code.co_name == ENGINE:
                names.append(code.co_name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def count_backward(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Operators:
    """Count the operators and collectives of one backward, after enough steps for the plan to settle."""
    for _ in range(3):
        _one_backward(model, loss)
    result = loss(model)
    with Operators() as operators:
        result.backward()
    model.zero_grad()
    return operators


def count_calls(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> list[str]:
    """Name our functions that autograd called in one backward, in order."""
    result = loss(model)
    with calls_from_autograd() as names:
        result.backward()
    model.zero_grad()
    return names


def _one_backward(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> None:
    loss(model).backward()
    model.zero_grad()


def count_ours(
    build: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor], **settings: Any
) -> Counts:
    """Count one step of a replicated model against the plain model's, on each rank of a group."""
    plain = count_backward(build(), loss)
    model = paceline.replicate(build(), **settings)
    replicated = count_backward(model, loss)
    return Counts(
        len(paceline.replica(model).plan.buckets),
        dict(replicated.work - plain.work),
        dict(replicated.collectives),
        len(count_calls(model, loss)),
    )


def many(parameters: int = PARAMETERS, floats: int = FLOATS) -> nn.Module:
    return Scales(floats, parameters)


def many_loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(FLOATS)).sum()


def bar_10() -> list[Row]:
    """Count with 1,000 parameters, in the default buckets and in small ones."""
    say(f"  {PARAMETERS} parameters on 2 ranks")
    rows = []
    for bucket_mb in (25, 0.05):
        counts, torch_kernels = on_ranks(2, _count_both, bucket_mb)[0]
        say(f"    {counts}")
        rows.append(_row(counts, torch_kernels))
    return rows


def _count_both(bucket_mb: float) -> tuple[Counts, dict[str, int]]:
    plain = count_backward(many(), many_loss)
    theirs = {}
    for name, views in (("torch DDP", False), ("torch DDP, views", True)):
        wrapped = TorchDDP(many(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=views)
        theirs[name] = sum((count_backward(wrapped, many_loss).work - plain.work).values())
    return count_ours(many, many_loss, bucket_mb=bucket_mb), theirs


def _row(counts: Counts, theirs: dict[str, int]) -> Row:
    seen = ", ".join(f"{name} {count}" for name, count in counts.operators.items())
    return Row(
        10,
        f"operators added, {PARAMETERS} parameters in {counts.buckets} bucket{'s' * (counts.buckets > 1)}",
        exactly(counts.kernels),
        f"<= {counts.buckets + 1}",
        f"{seen}; collectives {sum(counts.collectives.values())}, calls from autograd {counts.calls}; "
        + ", ".join(f"{name} {count}" for name, count in theirs.items()),
        {"operators": counts.operators, "collectives": counts.collectives, "torch": theirs},
    )
