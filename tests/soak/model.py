"""The model of a random program: a trunk, layers that a batch may or may not take, and a head."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.soak.program import Micro, Program

WIDTH = 3
LAYERS = 3
LEARNING_RATE = 0.05


class Boom(Exception):
    """What a rank raises by itself."""


class Net(nn.Module):
    """Takes its layers in the order that a batch asks for."""

    def __init__(self, *, buffers: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(2, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)
        if buffers:
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, micro: Micro, raises: str = "", text: str = "") -> torch.Tensor:
        """Compute one micro-batch; ``raises`` says where an exception is to come from."""
        if "mean" in dict(self.named_buffers()):
            self.mean.add_(x.detach().mean(0).nan_to_num())
            self.batches.add_(1)
        hidden = torch.tanh(self.trunk(x))
        if raises == "late":
            hidden.register_hook(_raiser(text))
        y = hidden
        for number in micro.layers:
            y = self._through(self.layers[number % len(self.layers)], y, micro)
        if raises == "forward":
            raise Boom(text)
        out = self.head(y)
        if raises == "early":
            out.register_hook(_raiser(text))
        return out

    def _through(self, layer: nn.Module, x: torch.Tensor, micro: Micro) -> torch.Tensor:
        if not micro.checkpoint:
            return torch.tanh(layer(x))
        return checkpoint(
            lambda x: torch.tanh(layer(x)),
            x,
            use_reentrant=micro.checkpoint == "reentrant",
            preserve_rng_state=False,
        )

    def part(self, number: int) -> nn.Module:
        """Return the layer of that number; the last one is the head. The trunk is not among them."""
        return [*self.layers, self.head][number % (len(self.layers) + 1)]


def _raiser(text: str) -> Callable[[torch.Tensor], None]:
    def raise_it(_gradient: torch.Tensor) -> None:
        raise Boom(text)

    return raise_it


def fill(module: nn.Module, seed: int) -> None:
    """Give a module's parameters values that depend on nothing but a seed: threads share torch's own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)


def make_net(program: Program, model: int, rank: int) -> Net:
    """Build a model. Ranks start from different values: replicate() takes rank 0's."""
    net = Net(buffers=program.setup.buffers)
    fill(net, 1_000 * program.seed + 10 * rank + model)
    return net


def new_layer(program: Program, step: int, rank: int) -> nn.Linear:
    """Build a layer that is added later."""
    layer = nn.Linear(WIDTH, WIDTH)
    fill(layer, 777 + 1_000 * program.seed + 10 * rank + step)
    return layer


def batch_of(program: Program, place: Sequence[int], micro: Micro) -> torch.Tensor:
    """Return the rows of one micro-batch. ``place`` is its step, reduction, rank and number."""
    number = program.seed
    for part in place:
        number = number * 17 + part + 1
    rows = torch.randn(micro.rows, 2, generator=torch.Generator().manual_seed(number))
    return rows * float("nan") if micro.nan else rows


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Return the mean over a micro-batch."""
    return (output.square() + output).mean()


def make_optimizer(kind: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer of a program; it steps the parameters of all models."""
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9 if kind == "momentum" else 0.0)
