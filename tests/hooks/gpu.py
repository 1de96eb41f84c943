"""The hooks on a GPU: `PYTHONPATH=src:. python3 tests/hooks/gpu.py`. Not collected by pytest: CI has no GPU.

Two ranks share the GPU over Gloo, and a world of one goes over NCCL. Checked against the same training on the
CPU, in one process. Prints a line per check, and at the end what a hook costs on 226 MB of gradients.
"""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import SoloComm
from paceline.hooks import Hook, average, in_dtype, local_sgd, name_of, powersgd, quantized
from tests.hooks.world import begin, bucket_of, drawn, reduce

CUDA = torch.device("cuda", 0)
STEPS = 8
# Eight matrices of one shape: enough for Gram and Schmidt.
SHAPES: Mapping[str, tuple[int, ...]] = {
    **{f"a{i}": (64, 40) for i in range(8)}, "bias": (64,), "conv": (16, 4, 3, 3)
}  # fmt: skip

HOOKS: Mapping[str, Callable[[], Hook]] = {
    "average": lambda: average,
    "bf16": lambda: in_dtype(torch.bfloat16),
    "fp16": lambda: in_dtype(torch.float16),
    "powersgd": lambda: powersgd(start_step=2),
    "powersgd batched": lambda: powersgd(start_step=2, batched=True),
    "powersgd, cold": lambda: powersgd(start_step=2, warm_start=False),
    "powersgd over bf16": lambda: powersgd(start_step=2, inner=in_dtype(torch.bfloat16)),
    "quantized 8": lambda: quantized(),
    "quantized 4": lambda: quantized(bits=4),
    "local sgd": lambda: local_sgd(every=4),
}


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 5)).to(
        CUDA
    )


def train(model: nn.Module, rank: int) -> None:
    x = torch.randn(512, 20, generator=torch.Generator().manual_seed(0)).to(CUDA)
    y = (x[:, :5] * 3).argmax(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count in range(STEPS):
        rows = torch.arange(512).roll(64 * count).chunk(8)[rank]
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def ranks_stay_equal(rank: int, name: str) -> None:
    model = paceline.replicate(classifier(), bucket_mb=0.01, hook=HOOKS[name]())
    train(model, rank)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    if dist.get_backend() == "gloo":
        dist.all_gather(rows, flat)
        assert torch.equal(rows[0], rows[1])
    assert flat.isfinite().all()


def matches_the_cpu(name: str) -> None:
    on_cpu, on_gpu = ([HOOKS[name]() for _ in range(2)] for _ in range(2))
    for count in range(STEPS):
        gradients = [drawn(10 * count + r, **SHAPES) for r in range(2)]
        moved = [{n: g.to(CUDA) for n, g in gradient.items()} for gradient in gradients]
        expected = reduce(on_cpu, gradients)[0]
        for key, got in reduce(on_gpu, moved)[0].items():
            torch.testing.assert_close(got.cpu(), expected[key], atol=2e-2, rtol=2e-2)


def on_rank(rank: int, size: int, backend: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(CUDA)
    store = dist.FileStore(str(Path(folder, backend)), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    failed = 0
    for name in HOOKS:
        failed += not passes(
            f"{backend}, rank {rank} of {size}: {name}", lambda n=name: ranks_stay_equal(rank, n)
        )
    dist.destroy_process_group()
    sys.exit(failed)


def passes(what: str, check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        print(f"FAIL {what}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"ok   {what}", flush=True)
    return True


def cost(hook: Hook) -> None:
    """Time a hook on two buckets of twelve transformer matrices each, without any communication."""
    shapes = {f"w{i}": (3072, 768) for i in range(12)} | {f"b{i}": (768,) for i in range(12)}
    buckets = [bucket_of({n: torch.randn(s, device=CUDA) for n, s in shapes.items()}, i) for i in range(2)]
    host = device = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin(hook)
        pending = [hook(bucket, SoloComm()) for bucket in buckets]
        while sum(flight.advance() for flight in pending):
            pass
        for flight in pending:
            flight.wait()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        host, device = min(host, returned - start), min(device, time.perf_counter() - start)
    print(
        f"     {name_of(hook)}: host {1e3 * host:.2f} ms, until done {1e3 * device:.2f} ms, for 226 MB",
        flush=True,
    )


def main() -> int:
    checks = [passes(f"as on the CPU: {name}", lambda n=name: matches_the_cpu(n)) for name in HOOKS]
    well = all(checks)
    with tempfile.TemporaryDirectory() as folder:
        for size, backend in ((2, "gloo"), (1, "nccl")):
            try:
                mp.spawn(on_rank, (size, backend, folder), nprocs=size)
            except mp.ProcessExitedException as error:
                well = False
                print(f"FAIL {backend}: {error}")
    for hook in (in_dtype(torch.bfloat16), powersgd(start_step=0), powersgd(start_step=0, batched=True)):
        cost(hook)
    for bits in (8, 4):
        cost(quantized(bits=bits))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
