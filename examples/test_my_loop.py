"""A training loop in a unit test: four ranks, one process, a fraction of a second. Run it with pytest.

`train` is what runs on a cluster: under `paceline run`, torchrun or plain python it needs no change.
"""

import torch
from torch import nn

import paceline


def make_batches(seed: int, count: int) -> list[torch.Tensor]:
    """Return some batches of points in the plane."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 2, generator=generator) for _ in range(count)]


def train(batches: list[torch.Tensor]) -> nn.Module:
    """Learn to tell whether a point is right of the middle, each rank from its own batches."""
    model = paceline.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for points in batches:
        optimizer.zero_grad()
        with paceline.accumulate(model, 2):
            for half in points.chunk(2):
                loss = nn.functional.binary_cross_entropy_with_logits(model(half), (half[:, :1] > 0).float())
                (loss / 2).backward()
        optimizer.step()
    return model


def step(world: paceline.World) -> float:
    """Train on this rank's share, and return the accuracy on points that nobody has trained on."""
    model = train(make_batches(seed=world.rank, count=20))
    (points,) = make_batches(seed=1000, count=1)
    return float(((model(points) > 0) == (points[:, :1] > 0)).float().mean())


def test_four_ranks_learn_the_same() -> None:
    """Rehearse the step: same accuracy on every rank, and a good one."""
    accuracies = paceline.rehearse(step, ranks=4)

    assert accuracies[0] > 0.8
    assert len(set(accuracies)) == 1
