"""What is claimed for GPUs, checked on one: `PYTHONPATH=src python3 tests/gpu/run.py`.

Two ranks share the GPU over Gloo with CUDA tensors (NCCL refuses two ranks on one GPU); a world of one goes
over NCCL. Not collected by pytest: CI has no GPU. Needs torch and this repository, nothing else. Prints a
line per check and ends with a non-zero status if one failed.
"""

import copy
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)

Check = Callable[[int], None]


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(CUDA)


def batch(width: int = 6) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(7)).to(CUDA)


def share(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(2)[rank]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def assert_same(model: nn.Module, alone: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance, msg=name)


def whole_batch(rank: int) -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=0.01)
    for step in range(4):
        for m, x in ((model, share(batch(), rank)), (alone, batch())):
            m.zero_grad()
            loss_of(m, x + step).backward()
        assert_same(model, alone)


def accumulation_and_the_guard(rank: int) -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    paceline.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with paceline.no_sync(model):
        loss_of(model, share(batch(), rank)).backward()
    try:
        optimizer.step()
    except paceline.UnsyncedGradients:
        pass
    else:
        raise AssertionError("the guard let local gradients pass")
    loss_of(model, share(batch() + 1, rank)).backward()
    loss_of(alone, batch()).backward()
    loss_of(alone, batch() + 1).backward()
    assert_same(model, alone)
    optimizer.step()


def unused_parameters(rank: int) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"}).to(CUDA)
    paceline.replicate(model)
    x = torch.ones(1, 4, device=CUDA)
    (model["a"](x).sum() + (model["b"](x).sum() if rank else 0.0)).backward()
    torch.testing.assert_close(model["b"].weight.grad, torch.full((4, 4), 0.5, device=CUDA))
    assert model["c"].weight.grad is None


def reentrant_checkpoints(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 3)]).to(CUDA)
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=1e-6)
    for with_head in (True, False, True):
        for m, x in ((model, share(batch(), rank)), (alone, batch())):
            m.zero_grad()
            y = checkpoint(m[0], x.clone().requires_grad_(), use_reentrant=True)
            y = m[0](checkpoint(m[0], torch.tanh(y), use_reentrant=True))
            (m[1](y) if with_head else y).square().mean().backward()
        assert_same(model, alone)


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise ValueError("boom")


def a_rank_that_fails(rank: int) -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=1e-6)
    for place in ("loss", "middle"):
        x = share(batch(), rank)
        raised: Exception | None = None
        try:
            if rank == 1 and place == "loss":
                Boom.apply(loss_of(model, x)).backward()
            elif rank == 1:
                loss_of(model[2:], Boom.apply(model[:2](x))).backward()
            else:
                loss_of(model, x).backward()
        except (ValueError, paceline.PeerFailed) as error:
            raised = error
        assert isinstance(raised, ValueError if rank == 1 else paceline.PeerFailed)
        assert rank == 1 or (raised.rank, raised.text) == (1, "ValueError: boom")
        for m, y in ((model, x), (alone, batch())):
            m.zero_grad()
            loss_of(m, y).backward()
        assert_same(model, alone)


def channels_last_and_batch_norm(rank: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    bare = bare.to(CUDA, memory_format=torch.channels_last)
    model = paceline.DistributedDataParallel(bare, device_ids=[0])
    for _ in range(2):
        x = torch.randn(
            4, 3, 8, 8, generator=torch.Generator().manual_seed(rank)
        )  # on the CPU: forward moves it
        model(x).square().mean().backward()
    assert all(p.grad.stride() == p.stride() for p in bare.parameters())
    for p in bare.parameters():
        parts = [torch.empty_like(p.grad) for _ in range(2)]
        dist.all_gather(parts, p.grad.clone(memory_format=torch.contiguous_format))
        assert torch.equal(*parts)


def cpu_and_gpu_in_one_module(rank: int) -> None:
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6).to(CUDA)])
    alone = copy.deepcopy(model)
    paceline.replicate(model)
    for m, x in ((model, share(batch(), rank)), (alone, batch())):
        m[1](torch.tanh(m[0](x.cpu())).to(CUDA)).square().mean().backward()
    assert_same(model, alone)


class Scales(nn.Module):
    """Three hundred tensors of odd sizes; one is left out of the loss in every other step."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7,), (3, 5), (2, 3, 4), (1,), (129,)]
        self.scales = nn.ParameterList(torch.randn(shapes[i % 5]) for i in range(300))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return x.sum() * sum(scale.sin().sum() for scale in self.scales[:used])


def a_crowd_of_tensors(rank: int) -> None:
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        model = Scales().to(CUDA, dtype)
        alone = copy.deepcopy(model)
        paceline.replicate(model)
        for step in range(5):
            used = 300 - step % 2
            for m, x in ((model, share(batch(), rank).to(dtype) * 2), (alone, batch().to(dtype))):
                m.zero_grad()
                m(x, used).backward()
            assert_same(model, alone, tolerance)


def sixteen_bits(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = nn.Linear(4, 4, device=CUDA, dtype=dtype)
        paceline.replicate(model)
        model(torch.full((1, 4), rank + 1.0, device=CUDA, dtype=dtype)).sum().backward()
        assert (model.weight.grad == 1.5).all()


def buffers_of_odd_dtypes(rank: int) -> None:
    model = nn.Linear(2, 2, device=CUDA)
    model.register_buffer("codes", torch.full((5,), rank, dtype=torch.uint8, device=CUDA))
    model.register_buffer("scale", torch.full((3,), rank + 1.0, device=CUDA).to(torch.float8_e4m3fn))
    paceline.replicate(model)
    assert model.codes.tolist() == [0] * 5
    assert model.scale.float().tolist() == [1.0] * 3


CHECKS: list[Check] = [
    whole_batch,
    accumulation_and_the_guard,
    unused_parameters,
    reentrant_checkpoints,
    a_rank_that_fails,
    channels_last_and_batch_norm,
    cpu_and_gpu_in_one_module,
    a_crowd_of_tensors,
    sixteen_bits,
    buffers_of_odd_dtypes,
]


def run_rank(rank: int, store: str) -> None:
    """Run every check on one of two ranks, and say how it went."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(CUDA)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for check in CHECKS:
        try:
            check(rank)
        except BaseException:
            print(f"rank {rank}: {check.__name__} FAILED\n{traceback.format_exc()}", flush=True)
            os._exit(1)
        if rank == 0:
            print(f"ok  {check.__name__} (two ranks, one GPU, Gloo)", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run_command(title: str, *words: str) -> None:
    """Run a command of ours on the GPU."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    print(f"{'ok ' if not done.returncode else 'FAILED'} {title}", flush=True)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:])
        sys.exit(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(f"{folder}/store",), nprocs=2)
        small = ["--steps", "8", "--checkpoint", f"{folder}/train.pt"]
        run_command(
            "paceline run -n gpu examples/train.py (NCCL)",
            "-m",
            "paceline",
            "run",
            "-n",
            "gpu",
            "examples/train.py",
            *small,
        )
        run_command(
            "two ranks on one GPU: paceline run -n 2",
            "-m",
            "paceline",
            "run",
            "-n",
            "2",
            "examples/train.py",
            *small,
        )
        run_command("plain python examples/train.py", "examples/train.py", *small)


if __name__ == "__main__":
    main()
