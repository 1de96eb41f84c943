"""Two models on one body, trained in turns, and a sum over the ranks in the middle of a backward.

    paceline run -n 2 examples/two_heads.py

The base is a plain training loop; what paceline adds is marked.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline


class SumOverRanks(torch.autograd.Function):
    """A sum of all ranks' tensors, which all of them get; so its gradient is a sum over the ranks, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.forward(ctx, gradient.contiguous())


class Model(nn.Module):
    """A body, features centred over all ranks' rows, and a head."""

    def __init__(self, body: nn.Module, outputs: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(32, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        mean = x.mean(0)
        if dist.is_initialized():
            mean = SumOverRanks.apply(mean) / dist.get_world_size()
        return self.head(torch.tanh(x - mean))


def main() -> None:
    """Train a policy and a value on one body."""
    with paceline.world() as world:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
        policy = paceline.replicate(Model(body, 4))  # <- reduces body and its own head
        value = paceline.replicate(
            Model(body, 1)
        )  # <- its own head; the body is left to the policy's replica
        optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (policy, value)}
        torch.manual_seed(world.rank)
        for _ in range(20):
            for model, optimizer in optimizers.items():
                optimizer.zero_grad()
                loss = model(torch.randn(8, 16)).square().mean()
                loss.backward()
                optimizer.step()
        total = sum(p.detach().double().sum() for m in (policy, value) for p in m.parameters())
        print(f"loss {loss.item():.4f}, sum of the weights {total:.12f}")


if __name__ == "__main__":
    main()
