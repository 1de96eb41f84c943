"""The models: the five of bar 8, from one that only computes to one that only communicates, and ResNet-50."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Task:
    """A model with one batch and the loss of it."""

    model: nn.Module
    batch: torch.Tensor
    loss: Callable[[torch.Tensor], torch.Tensor]


def convnet(scale: int = 4) -> Task:
    """Compute far above communication: 0.3 M parameters that are used at every pixel."""
    width = 16 * scale

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    model = nn.Sequential(
        block(3, width),
        block(width, width),
        nn.MaxPool2d(2),
        block(width, 2 * width),
        block(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )
    labels = torch.randint(10, (2 * scale,))
    return Task(model, torch.randn(2 * scale, 3, 24, 24), lambda out: F.cross_entropy(out, labels))


class GPT(nn.Module):
    """A decoder-only transformer, without dropout."""

    def __init__(self, *, vocab: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (batch, length, vocab)


class Block(nn.Module):
    """Attention and a feed-forward layer, each beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_normed(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normed(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(outputs)


def resnet50_model(blocks: Sequence[int] = (3, 4, 6, 3)) -> nn.Module:
    """ResNet-50 as everybody has it: 161 parameters, 25.6 M numbers."""
    layers: list[nn.Module] = [*_normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(inputs, 64 << stage, stride))
            inputs = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def small_gpt(scale: int = 4) -> Task:
    """Four layers, 128 wide: 0.9 M parameters in 52 tensors."""
    model = GPT(vocab=256, width=32 * scale, layers=scale, heads=4, length=64)
    tokens = torch.randint(256, (4, 65))
    targets = tokens[:, 1:].reshape(-1)
    return Task(model, tokens[:, :-1], lambda out: F.cross_entropy(out.flatten(0, 1), targets))


class Chain(nn.Module):
    """Many small layers, one after the other."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def tiny_tensors(layers: int = 201) -> Task:
    """402 tensors of 16 or 256 numbers: nothing but work per parameter."""
    return Task(Chain(layers, 16), torch.randn(32, 16), lambda out: out.square().mean())


def mlp(width: int, hidden: int, batch: int) -> Task:
    layers: list[nn.Module] = []
    for _ in range(hidden):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    labels = torch.randint(10, (batch,))
    return Task(model, torch.randn(batch, width), lambda out: F.cross_entropy(out, labels))


def small_mlp(width: int = 480) -> Task:
    """3.7 MB of parameters and hardly any computation."""
    return mlp(width, hidden=4, batch=16)


def large_mlp(width: int = 1766) -> Task:
    """50 MB of parameters: the price of moving bytes."""
    return mlp(width, hidden=4, batch=32)


FIVE: dict[str, Callable[..., Task]] = {
    "convnet": convnet,
    "small GPT": small_gpt,
    "402 tiny tensors": tiny_tensors,
    "small MLP": small_mlp,
    "50 MB MLP": large_mlp,
}
TINY = {"convnet": 1, "small GPT": 1, "402 tiny tensors": 5, "small MLP": 16, "50 MB MLP": 32}


def build(name: str, *, tiny: bool = False) -> Task:
    """Build a model of the five; the same numbers in every process. ``tiny`` is for testing the harness."""
    torch.manual_seed(0)
    return FIVE[name](TINY[name]) if tiny else FIVE[name]()
