"""A compiled model on several ranks: one graph, gradients reduced while the compiled backward runs.

    paceline run -n 2 examples/compiled.py [--backend aot_eager]

The base is a plain compiled training loop; what paceline adds is marked.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import paceline

STEPS = 30
WIDTH = 128


class Block(nn.Module):
    """Mixes what it is given, and adds that to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make up a task that can be learned: to sort numbers."""
    numbers = torch.rand(64, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return numbers, numbers.sort().values


def main() -> None:
    """Train, and say what was compiled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="inductor")
    backend = parser.parse_args().backend
    with paceline.world() as world:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)))
        paceline.replicate(model, bucket_mb=1)  # <- before or after torch.compile(), in either order
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        start = time.monotonic()
        paceline.replica(model).warmup(batch(world.rank, 0)[0], forward=compiled)  # <- all compile, then meet
        if world.rank == 0:
            print(f"compiled on {world.size} ranks in {time.monotonic() - start:.1f} s")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            numbers, ordered = batch(world.rank, step)
            loss = F.mse_loss(compiled(numbers), ordered)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.4f}")
        if world.rank == 0:
            counts = torch._dynamo.utils.counters["stats"]
            stats = paceline.replica(model).stats()
            print(f"graphs: {counts['unique_graphs']}, buckets: {len(stats.bucket_nbytes)}")


if __name__ == "__main__":
    main()
