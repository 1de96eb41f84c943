"""Deterministic mode on a GPU: `PYTHONPATH=src:. python3 tests/gpu/determinism.py`.

Four ranks share the GPU over Gloo with CUDA tensors (NCCL refuses two ranks on one GPU), in groups of 1, 2
and 4; a world of one goes over NCCL, where the price of the local half is taken as well.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import paceline

CUDA = torch.device("cuda", 0)
MICRO_BATCHES, STEPS = 8, 4


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [
        nn.Linear(64, 256),
        nn.LayerNorm(256),
        nn.GELU(),
        nn.Linear(256, 131),
        nn.Tanh(),
        nn.Linear(131, 7),
    ]
    return nn.Sequential(*layers).to(CUDA)


def backwards(m: nn.Module, batches: Any, each: int) -> None:
    with paceline.accumulate(m, each):
        for x in batches:
            (m(x).square().mean() / each).backward()


def trained(group: Any, **arguments: Any) -> bytes:
    """Train over a group, and return the weights' bits."""
    m = paceline.replicate(model(), group=group, deterministic=True, **arguments)
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    each = MICRO_BATCHES // group.size()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(MICRO_BATCHES * 16, 64, generator=generator).to(CUDA).chunk(MICRO_BATCHES)
        backwards(m, whole[group.rank() * each : (group.rank() + 1) * each], each)
        optimizer.step()
        optimizer.zero_grad()
    return b"".join(p.detach().cpu().numpy().tobytes() for p in m.parameters())


def over_gloo(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=4)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    caps = (1e-6, 0.05, 25)
    seen = {(s, mb): trained(group, bucket_mb=mb) for s, group in groups.items() if rank < s for mb in caps}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, seen)
    bits = {b for of_rank in everyone for b in of_rank.values()}
    assert len(bits) == 1, f"{len(bits)} different results"
    if rank == 0:
        Path(folder, "bits").write_bytes(bits.pop())
    dist.destroy_process_group()


def over_nccl(folder: str) -> None:
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=0, world_size=1)
    assert trained(dist.group.WORLD) == Path(folder, "bits").read_bytes()
    print("ok    1 rank over NCCL: the same bits")
    for count in (1, 4):
        times = {on: [] for on in (False, True)}
        steps = {on: step_of(on, count) for on in times}
        for _ in range(30):
            for on, step in steps.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(5):
                    step()
                torch.cuda.synchronize()
                times[on].append((time.perf_counter() - start) / 5)
        off, on = (1e3 * sorted(times[way])[15] for way in (False, True))
        print(f"      1,000 small tensors, {count} micro-batches: {on:.2f} / {off:.2f} ms = {on / off:.2f}")
    dist.destroy_process_group()


def step_of(on: bool, count: int) -> Any:
    torch.manual_seed(0)
    m = nn.Sequential(*(nn.Linear(32, 32) for _ in range(500))).to(CUDA)
    paceline.replicate(m, deterministic=on)
    optimizer = torch.optim.SGD(m.parameters(), lr=1e-4)
    x = torch.randn(16, 32, device=CUDA)

    def step() -> None:
        for number in range(count):
            with paceline.no_sync(m) if number + 1 < count else contextlib.nullcontext():
                m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(over_gloo, (place,), nprocs=4)
        print("ok    1, 2 and 4 ranks over Gloo with CUDA tensors, three bucket sizes: the same bits")
        sys.stdout.flush()
        over_nccl(place)
