"""Runs a function on several ranks: forks of a server that has torch imported, joined by Gloo on loopback."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# The optimizers import torch._dynamo at their first step, which would take a second of every rank.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "paceline", "benchmarks"]
TIMEOUT = timedelta(seconds=60)
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
