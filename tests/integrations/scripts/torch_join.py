"""torch's Join over the wrapper and a ZeroRedundancyOptimizer, with more inputs on rank 0 than on rank 1."""

from typing import Any

import task
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BATCH, INPUTS = 4, (5, 3)  # batches of rank 0 and rank 1


def shares() -> list[list[tuple[Tensor, Tensor]]]:
    """Cut the data set into each rank's batches."""
    inputs, targets = task.samples()
    batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    return [batches[: INPUTS[0]], batches[INPUTS[0] :]]


def train(*, with_zero: bool, **options: Any) -> dict[str, Any]:
    model = DistributedDataParallel(task.network())
    if with_zero:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=task.RATE, momentum=task.MOMENTUM
        )
    else:
        optimizer = task.sgd(model)
    steps = 0
    with Join([model, optimizer] if with_zero else [model], **options):
        for batch in shares()[task.RANK]:
            optimizer.zero_grad()
            task.mse(model, batch).backward()
            optimizer.step()
            steps += 1
    return {"wrapper": task.describe(model), "weights": task.weights(model.module), "steps": steps}


def alone(divide_by: str) -> dict[str, Tensor]:
    """Train on the batches of all ranks that still have one."""

    def loss(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        divisor = task.SIZE if divide_by == "all" else len(batches)
        return torch.stack([task.mse(model, batch) for batch in batches]).sum() / divisor

    steps = [[own[index] for own in shares() if index < len(own)] for index in range(max(INPUTS))]
    return task.solve_alone(task.network(0), steps, loss)


def stop_early() -> str:
    try:
        train(with_zero=False, throw_on_early_termination=True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    dist.init_process_group("gloo")
    task.tell(
        initial={**train(with_zero=False), "alone": alone("all")},
        active={**train(with_zero=False, divide_by_initial_world_size=False), "alone": alone("active")},
        zero={**train(with_zero=True), "alone": alone("all")},
        stopped=stop_early(),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
