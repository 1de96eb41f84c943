"""Runs a function on several ranks: forks of a server that has torch imported, joined by Gloo on loopback."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# The optimizers import torch._dynamo at their first step, which would take a second of every rank.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "paceline", "benchmarks"]
TIMEOUT = timedelta(seconds=60)
STARTS = 4  # of the processes of a measurement
# Else glibc gives the top of its heap back to the kernel in some steps, and faults it in anew in the next:
# thousands of faults a step, or none, as the variants' memory happens to lie.
STEADY_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


def on_ranks(size: int, work: Callable[..., T], *args: Any) -> list[T]:
    """Call ``work(*args)`` on every rank of a new Gloo group, and return what each returned, by rank."""
    os.environ |= STEADY_MEMORY  # read by the fork server when it starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        with ProcessPoolExecutor(size, mp_context=context) as pool:
            store = Path(folder, "store")
            # A rank blocks its worker until the others have come, so each gets a worker of its own.
            futures = [pool.submit(_on_rank, rank, size, store, work, args) for rank in range(size)]
            return [future.result() for future in futures]


def over_starts(size: int, work: Callable[..., list[T]], *args: Any) -> list[list[T]]:
    """Call ``work(*args)`` on every rank of several groups, one after another; join what each rank returned.

    Where memory happens to lie is worth some percent of a step, for as long as a process lives.
    """
    each = [on_ranks(size, work, *args) for _ in range(STARTS)]
    return [list(chain(*parts)) for parts in zip(*each, strict=True)]


def _on_rank(rank: int, size: int, store: Path, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size, timeout=TIMEOUT
    )
    try:
        return work(*args)
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print a progress line; results go to stdout, this does not."""
    print(text, file=sys.stderr, flush=True)
