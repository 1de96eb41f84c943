"""What the scripts here share: a small task, its solution in one process, and a way to tell the test."""

import copy
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
FOLDER = Path(sys.argv[1])
SAMPLES = 32
RATE, MOMENTUM = 0.05, 0.9


def samples() -> tuple[Tensor, Tensor]:
    """Return the whole data set, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 2, generator=generator)


def loader(batch: int) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """Deal the samples out to the ranks in turn, always in the same order."""
    data = torch.utils.data.TensorDataset(*samples())
    sampler = torch.utils.data.DistributedSampler(data, SIZE, RANK, shuffle=False)
    return torch.utils.data.DataLoader(data, batch, sampler=sampler)


def network(seed: int = RANK) -> nn.Sequential:
    """Return a network that starts differently on every rank, so that only rank 0's may count."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def whole_batches(size: int, epochs: int) -> list[tuple[Tensor, Tensor]]:
    """Cut the data set into the batches that all ranks together see in one optimizer step."""
    inputs, targets = samples()
    return list(zip(inputs.split(size), targets.split(size), strict=True)) * epochs


def solve_alone(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor] = mse,
    clip: float | None = None,
) -> dict[str, Tensor]:
    """Train a model in this process only, on whole batches, and return its weights."""
    optimizer = sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy({name: value.detach() for name, value in model.state_dict().items()})


def describe(wrapper: object) -> tuple[str, bool]:
    """Say where a wrapper's class is from, and whether it passes for torch's."""
    kind = type(wrapper)
    passes = isinstance(wrapper, torch.nn.parallel.DistributedDataParallel) and isinstance(
        wrapper, torch.nn.parallel.distributed.DistributedDataParallel
    )
    return f"{kind.__module__}.{kind.__qualname__}", passes


def tell(**facts: Any) -> None:
    """Leave what this rank found for the test to read."""
    torch.save(facts, FOLDER / f"rank{RANK}.pt")
