"""Compiled training on a GPU: `PYTHONPATH=src python3 tests/gpu/compiled.py`.

First a world of one over NCCL, then two ranks that share the GPU over Gloo, all with Inductor. Prints a line
per check and ends with a non-zero status if one failed.
"""

import copy
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import paceline
from paceline.compile import in_graph
from paceline.reducer import Reducer

CUDA = torch.device("cuda", 0)
STEPS = 4


class Net(nn.Module):
    """Six layers with normalization, and a convolution whose weight lies in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.view(-1, 4, 4, 4)).reshape(-1, 2, 64).sum(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x)


def model() -> nn.Module:
    torch.manual_seed(1)
    return Net().to(CUDA)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(CUDA)


def loss_of(net: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (net(x).float() * torch.arange(64, device=CUDA)).tanh().mean()


def reference(net: nn.Module, step: int, context: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the mean of the gradients of all ranks' batches, computed here without a compiler."""
    size = dist.get_world_size()
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for rank in range(size):
        alone = copy.deepcopy(net)
        with context():
            loss = loss_of(alone, batch(rank, step))
        loss.backward()
        for total, parameter in zip(sums, alone.parameters(), strict=True):
            total += parameter.grad / size
    return sums


def train_and_compare(
    net: nn.Module,
    forward: Callable[..., torch.Tensor],
    tolerance: float = 2e-4,
    context: Callable[[], Any] = torch.enable_grad,
) -> int:
    """Train a few steps; return how many gradients were taken inside graphs."""
    taken = 0
    take = Reducer.take

    def count_and_take(reducer: Reducer, indices: Any, gradients: Any) -> None:
        nonlocal taken
        taken += len(indices)
        take(reducer, indices, gradients)

    with (
        mock.patch.object(Reducer, "take", count_and_take),
        mock.patch.object(in_graph, "SMALLEST_NBYTES", 1),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(STEPS):
            want = reference(net, step, context)
            optimizer.zero_grad()
            with context():
                loss = loss_of(forward, batch(dist.get_rank(), step))
            loss.backward()
            for (name, parameter), gradient in zip(net.named_parameters(), want, strict=True):
                torch.testing.assert_close(
                    parameter.grad,
                    gradient,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda t, n=name: f"{n}: {t}",
                )
            optimizer.step()
    return taken


def gradients_leave_inside_the_graph() -> None:
    net = model()
    paceline.replicate(net, bucket_mb=0.02, first_bucket_mb=0.02)
    taken = train_and_compare(net, torch.compile(net, fullgraph=True))
    assert taken == STEPS * len(list(net.parameters())), taken


def with_cuda_graphs() -> None:
    net = model()
    paceline.replicate(net, bucket_mb=0.02, first_bucket_mb=0.02)
    taken = train_and_compare(net, torch.compile(net, fullgraph=True, mode="reduce-overhead"))
    assert taken == STEPS * len(list(net.parameters())), taken


def with_autocast() -> None:
    net = model()
    paceline.replicate(net)
    compiled = torch.compile(net, fullgraph=True)
    taken = train_and_compare(
        net, compiled, tolerance=0.1, context=lambda: torch.autocast("cuda", torch.bfloat16)
    )
    assert taken


def the_wrapper_with_its_buffers() -> None:
    net = model()
    wrapper = paceline.DistributedDataParallel(net, device_ids=[0])
    assert train_and_compare(net, torch.compile(wrapper, fullgraph=True))


def a_compiled_module_replicated() -> None:
    compiled = paceline.replicate(torch.compile(model(), fullgraph=True))
    assert train_and_compare(compiled._orig_mod, compiled)


def cut_by_the_plan() -> None:
    net = model()
    paceline.replicate(net, bucket_mb=0.02, first_bucket_mb=0.02)
    train_and_compare(net, torch.compile(net, backend="paceline_split"))
    assert paceline.compile.last_cuts()[-1].pieces > 3


def backward_hooks_of_modules() -> None:
    net, calls = model(), []
    net.layers[2].register_full_backward_hook(
        lambda _module, gradients, _outputs: calls.append(len(gradients))
    )
    paceline.replicate(net)
    compiled = torch.compile(net, fullgraph=True)
    loss_of(compiled, batch(dist.get_rank(), 0)).backward()
    assert calls == [1], calls


def after_a_warmup() -> None:
    net = model()
    paceline.replicate(net)
    compiled = torch.compile(net, fullgraph=True)
    paceline.replica(net).warmup(batch(dist.get_rank(), 0), forward=compiled)
    assert train_and_compare(net, compiled)


CHECKS = (
    gradients_leave_inside_the_graph,
    with_cuda_graphs,
    with_autocast,
    the_wrapper_with_its_buffers,
    a_compiled_module_replicated,
    cut_by_the_plan,
    backward_hooks_of_modules,
    after_a_warmup,
)


def run_all(rank: int, size: int, backend: str, folder: str) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(CUDA)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    store = dist.FileStore(str(Path(folder, "store")), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    failed = 0
    for check in CHECKS:
        torch._dynamo.reset()
        name = f"{size} over {backend}: {check.__name__.replace('_', ' ')}"
        try:
            check()
            print("ok    ", name, flush=True) if rank == 0 else None
        except Exception:
            failed += 1
            print("FAILED", name, f"rank {rank}", traceback.format_exc()[-1500:], flush=True)
    dist.destroy_process_group()
    return failed


def run_rank(rank: int, size: int, backend: str, folder: str) -> None:
    sys.exit(min(1, run_all(rank, size, backend, folder)))


def main() -> int:
    failed = 0
    for size, backend in ((1, "nccl"), (2, "gloo")):
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(run_rank, (size, backend, folder), nprocs=size)
            except mp.ProcessExitedException:
                failed += 1
    print("all passed" if not failed else "some failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
