"""Ranks with different numbers of batches, gradients in 16 bits, and a page about what is done.

    paceline run -n 2 examples/uneven.py

The base is a plain training loop; what paceline adds is marked.
"""

import torch
from torch import nn

import paceline
from paceline.hooks import in_dtype


def main() -> None:
    """Train on as many batches as this rank has."""
    with paceline.world() as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        paceline.replicate(model, hook=in_dtype(torch.bfloat16))  # <- sent in 16 bits
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = [torch.randn(8, 16) for _ in range(20 + 5 * world.rank)]  # each rank has five more
        with paceline.join(model):  # <- who has run out keeps the others company
            for batch in batches:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
        total = sum(p.detach().double().sum() for p in model.parameters())
        print(f"{len(batches)} batches here, loss {loss.item():.4f}, sum of the weights {total:.12f}")
        if world.rank == 0:
            print(paceline.replica(model).explain())


if __name__ == "__main__":
    main()
