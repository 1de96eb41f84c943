"""SyncBatchNorm below buckets that go out early, on a GPU: `PYTHONPATH=src:. python3 tests/gpu/crossings.py`.

Two ranks share the GPU over Gloo with CUDA tensors; one is ahead of the other in every second step. Each
model is trained by torch's class, too, and by one process on the whole batch. Not collected by pytest: CI has
no GPU. Needs torch and this repository, nothing else. Ends with a non-zero status if a check failed.
"""

import copy
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline

CUDA = torch.device("cuda", 0)
STEPS, SKEW = 8, 0.1


class Net(nn.Module):
    """Convolutions with batch norms, experts, and a head that fills the first bucket by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 256, 3), nn.BatchNorm2d(256)
        )
        self.experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
        self.head = nn.Linear(256, 4096)
        self.expert = [0, 1]  # for each part of the batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x).mean((2, 3))
        parts = zip(x.chunk(len(self.expert)), self.expert, strict=True)
        return self.head(torch.cat([torch.tanh(self.experts[number](part)) for part, number in parts]))


def pictures(step: int) -> torch.Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(CUDA)


def train(model: nn.Module, rank: int | None, *, differ: bool) -> nn.Module:
    inner = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        if differ:
            inner.expert = [step % 2, (step + 1) % 2] if rank is None else [(step + rank) % 2]
        else:
            inner.expert = [0, 1, 0, 1] if rank is None else [0, 1]
        optimizer.zero_grad()
        batch = pictures(step) if rank is None else pictures(step).chunk(2)[rank]
        loss = model(batch).square().mean()
        if rank is not None:
            time.sleep(SKEW * ((step + rank) % 2))
        loss.backward()
        optimizer.step()
    return inner


def check(rank: int, wrap: Callable[[nn.Module], nn.Module], *, differ: bool) -> str:
    """Train, and return how far the weights are from those of one process."""
    alone = train(copy.deepcopy(Net()).to(CUDA), None, differ=differ)
    model = wrap(nn.SyncBatchNorm.convert_sync_batchnorm(Net().to(CUDA)))
    inner = train(model, rank, differ=differ)
    far = max(float((a - b).abs().max()) for a, b in zip(inner.parameters(), alone.parameters(), strict=True))
    sums: list[object] = [None, None]
    dist.all_gather_object(sums, [float(p.double().sum()) for p in inner.parameters()])
    assert sums[0] == sums[1], "the ranks differ"
    assert far < 1e-4, far
    return f"{far:.1e} from one process"


def checks() -> dict[str, tuple[Callable[[nn.Module], nn.Module], bool]]:
    def torchs(model: nn.Module) -> nn.Module:
        return TorchDDP(model, device_ids=[0], find_unused_parameters=True)

    def ours(model: nn.Module) -> nn.Module:
        return paceline.DistributedDataParallel(model, device_ids=[0])

    def in_place(model: nn.Module) -> nn.Module:
        return paceline.replicate(model, bucket_mb=0.25, first_bucket_mb=0.25)

    return {
        "torch's class": (torchs, False),
        "our class": (ours, False),
        "replicate, small buckets": (in_place, False),
        "our class, experts differ": (ours, True),
        "replicate, small buckets, experts differ": (in_place, True),
    }


def run(rank: int, folder: str, name: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    wrap, differ = checks()[name]
    try:
        told = check(rank, wrap, differ=differ)
        if rank == 0:
            print(f"ok    {name}: {told}", flush=True)
        dist.destroy_process_group()
    except BaseException:
        print(f"FAILED {name}, rank {rank}\n{traceback.format_exc()}", flush=True)
        os._exit(1)


def main() -> None:
    failed = []
    for name in checks():
        try:
            mp.spawn(run, args=(tempfile.mkdtemp(), name), nprocs=2)
        except Exception as error:
            failed.append(name)
            print(f"FAILED {name}: {str(error).splitlines()[-1]}", flush=True)
    print(f"{len(checks()) - len(failed)} of {len(checks())} passed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
