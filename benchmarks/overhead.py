"""Bar 9: CPU seconds that a reducer adds to forward and backward in a world of one."""

import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from benchmarks.cycles import Cycle, Estimate, Samples, Variant, estimate, merge, run_cycles
from benchmarks.ranks import STARTS, over_starts, say
from benchmarks.steps import from_rank_0
from benchmarks.table import Row

FLOATS = (16, 4096, 65536)  # per parameter
PARAMETERS = 200


class Scales(nn.Module):
    """Parameters that hardly compute: each one scales a constant and adds it to the stream."""

    def __init__(self, floats: int, parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(floats) for _ in range(parameters))
        self._each = tuple(self.scales)  # walking a ParameterList costs more than the operator does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for scale in self._each:
            total = torch.addcmul(total, x, scale)
        return total


def bar_9(seconds: float, *, parameters: int = PARAMETERS) -> list[Row]:
    """Compare the CPU seconds that we add with those that torch's DDP with bucket views adds."""
    return [_row(floats, parameters, seconds) for floats in FLOATS]


def _row(floats: int, parameters: int, seconds: float) -> Row:
    say(
        f"  {parameters} parameters of {floats} floats: {seconds:.0f} s in a world of one, in {STARTS} starts"
    )
    samples = merge(over_starts(1, cycles_of, floats, parameters, seconds / STARTS))
    added = {name: _added(samples, name) for name in ("paceline", "torch DDP, views")}
    micros = ", ".join(f"{name} {1e6 * spent / parameters:.2f}" for name, spent in added.items())
    say(f"    {samples.cycles} cycles; us a parameter: {micros}")
    return Row(
        9,
        f"{floats} floats: CPU added, ours / torch DDP, views",
        _ratio(samples),
        "<= 1.0",
        f"us a parameter: {micros}; {samples.cycles} cycles",
        samples.medians,
    )


def _added(samples: Samples, name: str) -> float:
    pairs = zip(samples.cpu[name], samples.cpu["bare"], strict=True)
    return statistics.median(full - bare for full, bare in pairs)


def _ratio(samples: Samples) -> Estimate:
    """Divide what we added in each cycle by what torch adds in the median cycle, which is never near zero."""
    theirs = _added(samples, "torch DDP, views")
    pairs = zip(samples.cpu["paceline"], samples.cpu["bare"], strict=True)
    return estimate([(full - bare) / theirs for full, bare in pairs])


def cycles_of(floats: int, parameters: int, seconds: float) -> list[Cycle]:
    """Run in the world of one."""
    variants = [
        Variant("bare", backward_step(Scales(floats, parameters), floats)),
        Variant("paceline", backward_step(paceline.replicate(Scales(floats, parameters)), floats)),
        Variant(
            "torch DDP, views",
            backward_step(TorchDDP(Scales(floats, parameters), gradient_as_bucket_view=True), floats),
        ),
    ]
    return run_cycles(variants, seconds=seconds, slot_seconds=0.02, share=from_rank_0)


def backward_step(model: nn.Module, floats: int) -> Callable[[], None]:
    """Make a step that is all reducer: no optimizer, and a forward of one operator per parameter."""
    x = torch.randn(floats)
    parameters = list(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step
