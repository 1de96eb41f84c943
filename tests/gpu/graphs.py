"""CUDA graphs around replicated models, on one GPU: ``PYTHONPATH=src python3 tests/gpu/graphs.py``.

A world of one over NCCL: a recorded step that is replayed with other data gives the weights of plain ones;
so do parts that were recorded by make_graphed_callables().
"""

import copy
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import paceline

Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "replicate": paceline.replicate,
    "our class": lambda model: paceline.DistributedDataParallel(model, device_ids=[0]),
    "torch's class": lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[0]),
}
WARM_UP = 11  # steps before recording, as torch's class asks for


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()


def train_recorded(model: nn.Module, batches: list[torch.Tensor], side: torch.cuda.Stream) -> None:
    """Record forward, backward and step, and replay them for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static = batches[0].clone()
    state = copy.deepcopy(model.state_dict())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            optimizer.zero_grad()
            model(static).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(static).square().mean().backward()
        optimizer.step()
    model.load_state_dict(state)
    for batch in batches:
        static.copy_(batch)
        graph.replay()


def train_plainly(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Train step by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def train_with_graphed_parts(model: nn.Module, batches: list[torch.Tensor], _: torch.cuda.Stream) -> None:
    """Train with one layer of which forward and backward are recorded."""
    inner = model.module if hasattr(model, "module") else model
    inner[0] = torch.cuda.make_graphed_callables(inner[0], (batches[0].clone(),))
    train_plainly(model, batches)


def main() -> int:
    """Run every way of wrapping through both ways of recording."""
    dist.init_process_group("nccl", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    torch.cuda.set_device(0)
    batches = [torch.randn(32, 64, device="cuda") for _ in range(5)]
    side, alone = torch.cuda.Stream(), built()
    train_plainly(alone, batches)
    failed = 0
    for name, wrap in WRAPS.items():
        for train in (train_recorded, train_with_graphed_parts):
            model = built()
            with torch.cuda.stream(side):  # not the default one: it cannot be recorded
                wrapped = wrap(model)
            try:
                train(wrapped, batches, side)
                torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
                print(f"ok     {train.__name__}: {name}")
            except Exception as error:
                failed += name != "torch's class"
                print(f"FAILED {train.__name__}: {name}: {type(error).__name__}: {str(error)[:300]}")
            del wrapped, model
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
