"""What is trained on the GPU, and where: full sizes, or tiny ones to try the code on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models import GPT, Chain, resnet50_model


@dataclass(frozen=True)
class Place:
    """Where to measure, and how large."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass
class Task:
    """A model on the device, and the loss of one batch through it."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


def gpt(place: Place, rows: int = 32) -> Task:
    """163 M parameters, batch 32 of 1024 tokens, computed in bf16."""
    torch.manual_seed(0)
    vocab, length, batch = place.pick(50304, 64), place.pick(1024, 8), place.pick(rows, 2)
    model = GPT(
        vocab=vocab,
        width=place.pick(768, 32),
        layers=place.pick(12, 2),
        heads=place.pick(12, 2),
        length=length,
    ).to(place.device)
    tokens = torch.randint(vocab, (batch, length + 1), device=place.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)

    def loss(forward: nn.Module) -> torch.Tensor:
        with torch.autocast(place.device.type, torch.bfloat16):
            return F.cross_entropy(forward(inputs).flatten(0, 1), targets)

    return Task(model, loss)


def resnet50(place: Place) -> Task:
    """Launch-bound: a batch of four small pictures."""
    torch.manual_seed(0)
    model = resnet50_model((1, 1) if place.tiny else (3, 4, 6, 3)).to(place.device)
    pictures = torch.randn(4, 3, 64, 64, device=place.device)
    labels = torch.randint(1000, (4,), device=place.device)
    return Task(model, lambda forward: F.cross_entropy(forward(pictures), labels))


def many(place: Place) -> Task:
    """Launch-bound: 1,000 small tensors."""
    torch.manual_seed(0)
    model = Chain(place.pick(500, 5), 64).to(place.device)
    batch = torch.randn(8, 64, device=place.device)
    return Task(model, lambda forward: forward(batch).square().mean())
