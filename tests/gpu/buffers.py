"""Buffers on a GPU: `PYTHONPATH=src:. python3 tests/gpu/buffers.py`.

Two ranks share the GPU over Gloo with CUDA tensors. Not collected by pytest: CI has no GPU. Needs torch and
this repository, nothing else. Ends with a non-zero status if a check failed.
"""

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import paceline
from paceline.reducer import Reducer

CUDA = torch.device("cuda", 0)


class Counting(nn.Module):
    """Has buffers on the GPU, one that changes and one that does not, and one on the CPU that changes."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2, device=CUDA)
        self.step = rank + 1
        self.register_buffer("seen", torch.zeros(1, device=CUDA))
        self.register_buffer("mask", torch.ones(64, 64, device=CUDA).tril())
        self.register_buffer("beside", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(self.step)
        self.beside.add_(self.step)
        return self.layer(x)


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(3, 4, device=CUDA)).sum().backward()
        model.zero_grad()


def everyones(tensor: torch.Tensor) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, tensor.tolist())
    return rows


def every_policy(rank: int) -> None:
    after_four = {
        "after_backward": [4, 4],
        "before_forward": [4, 5],
        "after_forward": [4, 4],
        2: [4, 4],
        "before_saving": [4, 8],
        "start": [4, 8],
        "never": [4, 8],
    }
    for policy, expected in after_four.items():
        model = paceline.replicate(Counting(rank), buffers=policy)
        train(model, 4)
        assert [row[0] for row in everyones(model.seen)] == expected, policy
        assert [row[0] for row in everyones(model.beside)] == expected, policy
        paceline.replica(model).sync_buffers()
        assert [row[0] for row in everyones(model.seen)] == ([4, 8] if policy == "never" else [4, 4]), policy


def around_a_forward_only_what_is_on_the_cpu_is_asked_for(rank: int) -> None:
    asked: list[bytes] = []
    exchange = Reducer.exchange

    def noting(self: Reducer, kind: bytes, frame: bytes) -> list[bytes]:
        asked.append(frame)
        return exchange(self, kind, frame)

    Reducer.exchange = noting  # type: ignore[method-assign]
    try:
        with_cpu = paceline.DistributedDataParallel(Counting(rank))
        train(with_cpu, 2)
        assert len(asked) == 2
        without = Counting(rank)
        del without.beside
        without.forward = lambda x: without.layer(x)
        train(paceline.DistributedDataParallel(without), 2)
        assert len(asked) == 2
    finally:
        Reducer.exchange = exchange  # type: ignore[method-assign]


def what_did_not_change_is_not_sent_after_backward(rank: int) -> None:
    model = paceline.replicate(Counting(rank))
    train(model, 2)
    assert paceline.replica(model).stats().collectives == 3  # a bucket, and a message for each device
    model.forward = lambda x: model.layer(x)
    train(model, 2)
    assert paceline.replica(model).stats().collectives == 1


def batch_norm_in_a_gan(rank: int) -> None:
    def net(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, width)).to(CUDA)

    def theirs(module: nn.Module) -> nn.Module:
        # On torch 2.11 its class with synchronised buffers raises here: they were modified in place.
        return nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)

    results = []
    for wrap in (paceline.DistributedDataParallel, paceline.replicate, theirs):
        torch.manual_seed(0)
        maker, judge = wrap(net(4)), wrap(net(1))
        source = torch.Generator().manual_seed(rank)
        for _ in range(3):
            real, noise = torch.randn(2, 8, 4, generator=source).to(CUDA)
            fake = maker(noise)
            (judge(fake.detach()).mean() - judge(real).mean()).backward()
            judge(fake).mean().neg().backward()
            with torch.no_grad():
                for parameter in (*maker.parameters(), *judge.parameters()):
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        results.append(torch.cat([p.detach().flatten() for p in (*maker.parameters(), *judge.parameters())]))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-4, atol=1e-5)


def sync_batch_norm_with_replicate(rank: int) -> None:
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(CUDA)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(CUDA)
    model.load_state_dict(alone.state_dict())
    model = paceline.replicate(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(CUDA)

    for _ in range(2):
        model(x.chunk(2)[rank]).square().mean().backward()
        alone(x).square().mean().backward()

    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    for p, q in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def buffer_hooks(rank: int) -> None:
    def total(state: Any, named: dict[str, torch.Tensor]) -> list[Any]:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in named.values()]
        return [work.get_future() for work in works]

    seen = []
    for kind in (paceline.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        module = Counting(rank)
        del module.beside
        module.forward = lambda x, module=module: module.layer(x + 0 * module.seen.add_(module.step))
        model = kind(module)
        model._register_buffer_comm_hook(None, total, Location.POST_FORWARD)
        train(model, 3)
        seen.append(module.seen.item())
    assert seen[0] == seen[1], seen


Check = Callable[[int], None]

CHECKS: list[Check] = [
    every_policy,
    around_a_forward_only_what_is_on_the_cpu_is_asked_for,
    what_did_not_change_is_not_sent_after_backward,
    batch_norm_in_a_gan,
    sync_batch_norm_with_replicate,
    buffer_hooks,
]


def run_rank(rank: int, store: str) -> None:
    """Run every check on one of two ranks, and say how it went."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    torch.cuda.set_device(CUDA)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    failed = 0
    for check in CHECKS:
        try:
            check(rank)
        except Exception:
            failed += 1
            print(f"rank {rank}: {check.__name__} FAILED\n{traceback.format_exc()}", flush=True)
        else:
            if rank == 0:
                print(f"ok  {check.__name__} (two ranks, one GPU, Gloo)", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
