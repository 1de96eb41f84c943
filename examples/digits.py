"""Train a convnet with BatchNorm on scikit-learn's handwritten digits, through torch's own contract.

    paceline run -n 2 examples/digits.py          needs scikit-learn: pip install 'paceline[examples]'

To move a script that uses torch's DistributedDataParallel, change the import. The rest of it stays.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from display import print_table
from paceline import DistributedDataParallel

BATCH = 64  # images in a global batch


def read_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images (count, 1, 8, 8) and labels (count,): to train on, and every fifth, held out."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise SystemExit("this example needs scikit-learn: pip install 'paceline[examples]'") from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def make_convnet() -> nn.Module:
    """Return a network from images to the ten digits' logits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, world: paceline.World) -> None:
    """Train on this rank's share of every global batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH)[:-1]:  # the last batch is smaller and would not split evenly
            mine = batch[world.rank :: world.size]
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if world.rank == 0:
            print(f"epoch {epoch + 1}/{epochs}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model reads right."""
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def buffers_that_differ(model: nn.Module) -> list[str]:
    """Return the buffers that are not equal on all ranks; every rank has to call this."""
    names = []
    for name, buffer in model.named_buffers():
        low, high = buffer.double(), buffer.double()
        if dist.is_initialized():
            dist.all_reduce(low, dist.ReduceOp.MIN)
            dist.all_reduce(high, dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            names.append(name)
    return names


def main() -> None:
    """Train, then report accuracy on held-out images and what the ranks hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="times that each image is seen")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error(f"--epochs {args.epochs}: expected 1 or more")
    with paceline.world() as world:
        if BATCH % world.size:
            parser.error(f"batches of {BATCH} images cannot be split evenly over {world.size} ranks")
        training, held_out = ([t.to(world.device) for t in part] for part in read_digits())
        torch.manual_seed(0)
        model = DistributedDataParallel(make_convnet().to(world.device))
        train(model, *training, args.epochs, world)
        score = accuracy(model, *held_out)
        differ = buffers_that_differ(model)
        if world.rank == 0:
            state = f"DIFFER: {', '.join(differ)}" if differ else "equal on all ranks"
            print_table(
                {
                    "ranks": f"{world.size} on {world.device.type}",
                    "accuracy, held out": f"{score:.2%} of {len(held_out[1])} images",
                    "BatchNorm buffers": f"{len(list(model.buffers()))}, {state}",
                }
            )
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
