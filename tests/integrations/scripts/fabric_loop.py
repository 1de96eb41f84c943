"""Fabric's DDP strategy: a loop of the user's own, accumulation, clipping, checkpoints, marked methods."""

from typing import Any

import task
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

EPOCHS, BATCH, ACCUMULATE, CLIP = 2, 4, 2, 0.5


class Regression(nn.Module):
    """Offers its loss by a method of its own, which Fabric sends through the wrapper's forward."""

    def __init__(self, seed: int = task.RANK) -> None:
        super().__init__()
        self.net = task.network(seed)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return task.mse(self.net, batch)


def train(fabric: Fabric, model: Any, optimizer: Any, loader: Any, epochs: int) -> list[bool]:
    """Return, for each backward of the last epoch, whether every rank had the same gradients after it."""
    for _ in range(epochs):
        synced = []
        for index, batch in enumerate(loader):
            steps = index % ACCUMULATE == ACCUMULATE - 1
            with fabric.no_backward_sync(model, enabled=not steps):
                fabric.backward(model.loss(batch) / ACCUMULATE)
            synced.append(is_alike(fabric, model))
            if steps:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return synced


def is_alike(fabric: Fabric, model: nn.Module) -> bool:
    gradients = fabric.all_gather(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return bool((gradients == gradients[0]).all())


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    model = Regression()
    wrapped, optimizer = fabric.setup(model, task.sgd(model))
    wrapped.mark_forward_method("loss")
    return wrapped, optimizer


def seen(model: Any) -> dict[str, Any]:
    return {"wrapper": task.describe(model._forward_module), "weights": task.weights(model)}


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=task.SIZE, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(task.loader(BATCH), use_distributed_sampler=False)
    model, optimizer = set_up(fabric)
    train(fabric, model, optimizer, loader, 1)
    fabric.save(task.FOLDER / "state.ckpt", {"model": model, "optimizer": optimizer})
    synced = train(fabric, model, optimizer, loader, EPOCHS - 1)

    again, its_optimizer = set_up(fabric)
    fabric.load(task.FOLDER / "state.ckpt", {"model": again, "optimizer": its_optimizer})
    train(fabric, again, its_optimizer, loader, EPOCHS - 1)

    batches = task.whole_batches(BATCH * ACCUMULATE * task.SIZE, EPOCHS)
    alone = task.solve_alone(Regression(0), batches, lambda model, batch: model.loss(batch), CLIP)
    keys = list(torch.load(task.FOLDER / "state.ckpt")["model"])
    task.tell(trained={**seen(model), "alone": alone}, resumed=seen(again), keys=keys, synced=synced)


if __name__ == "__main__":
    main()
