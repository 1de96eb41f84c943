"""Lightning's Trainer with its DDP strategies: accumulation, checkpoints, unused parameters, manual steps."""

from pathlib import Path
from typing import Any

import lightning as L
import task
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

EPOCHS, BATCH, ACCUMULATE, CLIP = 2, 4, 2, 0.5


class Regression(L.LightningModule):
    """The task as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = task.network()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return task.mse(self.net, batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation", task.mse(self.net, batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return task.sgd(self)


class Branches(Regression):
    """Rank 0 uses the first head in every other step, rank 1 always the second; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = branches()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return branch_loss(self.net, self.heads, batch, chosen(self.global_rank, index))


def branches(seed: int = task.RANK) -> nn.ModuleList:
    with torch.random.fork_rng():
        torch.manual_seed(100 + seed)
        return nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


def chosen(rank: int, index: int) -> int:
    return 0 if rank == 0 and index % 2 == 0 else 1


def branch_loss(net: nn.Module, heads: nn.ModuleList, batch: tuple[Tensor, Tensor], head: int) -> Tensor:
    return nn.functional.mse_loss(heads[head](net(batch[0])), batch[1])


class Manual(Regression):
    """Does its steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(task.mse(self.net, batch))
        optimizer.step()


class InTurns(Manual):
    """Has an optimizer for each layer, as a GAN has for its halves, and freezes one while the other steps."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(task.mse(self.net, batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [task.sgd(layer) for layer in (self.net[0], self.net[2])]


class Witness(L.Callback):
    """Remember what the strategy made of the module."""

    seen: tuple[str, bool]

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen = task.describe(trainer.strategy.model)


def fit(module: L.LightningModule, strategy: Any, *more: Any, checkpoint: Path | None = None, **options: Any):
    witness = Witness()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=task.SIZE,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[witness, *more],
        default_root_dir=task.FOLDER,
        enable_checkpointing=bool(more),
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **options,
    )
    trainer.fit(module, task.loader(BATCH), task.loader(BATCH), ckpt_path=checkpoint)
    return {"wrapper": witness.seen, "weights": task.weights(module)}, trainer


def alone() -> dict[str, Tensor]:
    batches = task.whole_batches(BATCH * ACCUMULATE * task.SIZE, EPOCHS)
    return task.solve_alone(nn.ModuleDict({"net": task.network(0)}), batches, in_net, CLIP)


def in_net(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return task.mse(model["net"], batch)


def manual_alone() -> dict[str, Tensor]:
    batches = task.whole_batches(BATCH * task.SIZE, EPOCHS)
    return task.solve_alone(nn.ModuleDict({"net": task.network(0)}), batches, in_net)


def turns_alone() -> dict[str, Tensor]:
    model = nn.ModuleDict({"net": task.network(0)})
    optimizers = [task.sgd(layer) for layer in (model["net"][0], model["net"][2])]
    for batch in task.whole_batches(BATCH * task.SIZE, EPOCHS):
        for optimizer in optimizers:
            model.zero_grad()
            in_net(model, batch).backward()
            optimizer.step()
    return task.weights(model)


def branches_alone() -> dict[str, Tensor]:
    batches = task.whole_batches(BATCH * task.SIZE, 1)
    model = nn.ModuleDict({"net": task.network(0), "heads": branches(0)})

    def loss(model: Any, item: tuple[int, tuple[Tensor, Tensor]]) -> Tensor:
        index, (inputs, targets) = item
        shares = [(inputs[rank :: task.SIZE], targets[rank :: task.SIZE]) for rank in range(task.SIZE)]
        losses = [
            branch_loss(model["net"], model["heads"], share, chosen(rank, index))
            for rank, share in enumerate(shares)
        ]
        return torch.stack(losses).mean()

    return task.solve_alone(model, list(enumerate(batches)) * EPOCHS, loss)


def main() -> None:
    keep = ModelCheckpoint(task.FOLDER / "checkpoints", "{epoch}", save_top_k=-1)
    options = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP}
    trained, trainer = fit(Regression(), "ddp", keep, **options)
    first_epoch = task.FOLDER / "checkpoints" / "epoch=0.ckpt"
    resumed, _ = fit(Regression(), "ddp", checkpoint=first_epoch, **options)
    unused, _ = fit(Branches(), "ddp_find_unused_parameters_true")
    manual, _ = fit(Manual(), "ddp")
    static, _ = fit(Manual(), DDPStrategy(static_graph=True))
    turns, _ = fit(InTurns(), "ddp_find_unused_parameters_true")
    task.tell(
        trained={**trained, "alone": alone(), "validation": trainer.callback_metrics["validation"]},
        resumed=resumed,
        first_epoch=torch.load(first_epoch, weights_only=False)["state_dict"],
        unused={**unused, "alone": branches_alone()},
        manual={**manual, "alone": manual_alone()},
        static={**static, "alone": manual_alone()},
        turns={**turns, "alone": turns_alone()},
    )


if __name__ == "__main__":
    main()
