"""Models that are hard on a compiler, each with the batch of a rank and a loss."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        return x + self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=True))


class Gpt(nn.Module):
    """Tied embeddings, blocks under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((x[:, :4].abs() * 2).long().clamp(max=4))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return functional.linear(h, self.embed.weight).mean(1)


class Depth(nn.Module):
    """Stochastic depth: what is left out differs from call to call, but not between the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, layer in enumerate(self.layers):
            if (self.calls + number) % 3:
                x = x + layer(x).tanh()
        return x


class Scaled(nn.Module):
    """A layer with a number of its own, as stochastic depth has it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(6, 6), rate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh() * (1 - self.rate)


def scaled() -> nn.Module:
    return nn.Sequential(*(Scaled(0.1 * number) for number in range(5)))


class Experts(nn.Module):
    """Each rank's batch goes to other experts; nobody uses the last one. Breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(x)
        return self.experts[int(x.detach().sum() > 0)](x.relu())


class Broken(nn.Module):
    """Several graphs, one plan: and a weight that two of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(functional.linear(x, self.first.weight))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "convnet with BatchNorm": convnet,
    "GPT, tied, with checkpointing": Gpt,
    "stochastic depth": Depth,
    "blocks that differ by a float": scaled,
    "experts": Experts,
    "broken graph": Broken,
}
WHOLE = [
    "MLP",
    "convnet with BatchNorm",
    "GPT, tied, with checkpointing",
    "blocks that differ by a float",
]  # one graph


def made(name: str) -> nn.Module:
    torch.manual_seed(4)
    return MODELS[name]()


def batch(rank: int, step: int = 0, rows: int = 4) -> Tensor:
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(7 * step + rank))
    return x.abs() if rank else -x.abs()


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean() + out.sin().sum() * 0.1


def reference(model: nn.Module, batches: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the mean over the ranks of the gradients that one process computes, for what some rank uses."""
    sums: list[Tensor | None] = [None for _ in model.parameters()]
    for x in batches:
        alone = copy.deepcopy(model)
        loss_of(alone(x)).backward()
        for number, parameter in enumerate(alone.parameters()):
            share = None if parameter.grad is None else parameter.grad / len(batches)
            before = sums[number]
            sums[number] = share if before is None else before if share is None else before + share
    return sums


def check_gradients(model: nn.Module, want: Sequence[Tensor | None], times: float = 1.0) -> None:
    for (name, parameter), gradient in zip(model.named_parameters(), want, strict=True):
        if gradient is None:
            # A compiler may give zeros to what is not used.
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(
                parameter.grad,
                gradient * times,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, n=name: f"{n}: {text}",
            )
