"""Bars 8 and 15: the time of a training step on two ranks over plain Gloo."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.cycles import Cycle, Samples, Variant, merge, run_cycles
from benchmarks.models import FIVE, build
from benchmarks.ranks import STARTS, over_starts, say
from benchmarks.table import Row
from benchmarks.variants import (
    TORCH_FLAGS,
    bare,
    ours,
    torch_ddp,
    with_and_without,
)

RANKS = 2
PRICED = ("small MLP", "small GPT", "402 tiny tensors")


def bar_8(seconds: float, models: Sequence[str] = tuple(FIVE), *, tiny: bool = False) -> list[Row]:
    """Compare a step with torch's best flags."""
    return [_against_torch(name, _measure(against_torch, name, seconds, tiny)) for name in models]


def bar_15(seconds: float, models: Sequence[str] = PRICED, *, tiny: bool = False) -> list[Row]:
    """Take a promise away, and see what it had cost."""
    return [row for name in models for row in _prices(name, _measure(promises, name, seconds, tiny))]


def against_torch(name: str, tiny: bool) -> list[Variant]:
    def task():
        return build(name, tiny=tiny)

    return [bare(task()), ours(task()), *(torch_ddp(task(), flags) for flags in TORCH_FLAGS)]


def promises(name: str, tiny: bool) -> list[Variant]:
    return with_and_without(build(name, tiny=tiny))


def _measure(
    variants: Callable[[str, bool], list[Variant]], name: str, seconds: float, tiny: bool
) -> Samples:
    say(f"  {name}: {seconds:.0f} s on {RANKS} ranks, in {STARTS} starts")
    samples = merge(over_starts(RANKS, cycles_of, variants, name, seconds / STARTS, tiny))
    say(f"    kept {samples.kept}; ms a step: " + listed(samples))
    return samples


def listed(samples: Samples) -> str:
    wall, cpu = samples.medians.values()
    return ", ".join(f"{name} {1e3 * wall[name]:.2f} (CPU {1e3 * cpu[name]:.2f})" for name in wall)


def cycles_of(
    variants: Callable[[str, bool], list[Variant]], name: str, seconds: float, tiny: bool
) -> list[Cycle]:
    """Run on each rank: build the variants and time them."""
    return run_cycles(
        variants(name, tiny), seconds=seconds, slot_seconds=0.001 if tiny else 0.03, share=from_rank_0
    )


def from_rank_0(number: float) -> float:
    box = torch.tensor([float(number)], dtype=torch.float64)
    dist.broadcast(box, src=0)
    return box.item()


def _against_torch(name: str, samples: Samples) -> Row:
    best = min(TORCH_FLAGS, key=samples.median)
    over_bare = [samples.ratio(variant, "bare").median for variant in ("paceline", best)]
    return Row(
        8,
        f"{name}: step, ours / {best}",
        samples.ratio("paceline", best),
        "<= 1.03",
        f"CPU {samples.cpu_ratio('paceline', best).median:.2f}; over bare: ours {over_bare[0]:.2f}, "
        f"torch {over_bare[1]:.2f}; {samples.kept}",
        samples.medians,
        samples.is_quiet,
    )


def _prices(name: str, samples: Samples) -> list[Row]:
    return [
        Row(
            15,
            f"{name}: step, with / without {what}",
            samples.ratio("paceline", variant),
            "<= 1.01",
            f"CPU {samples.cpu_ratio('paceline', variant)}; {samples.kept}",
            samples.medians,
            samples.is_quiet,
        )
        for variant, what in (
            ("no guard", "the guard"),
            ("no frames", "control frames"),
            ("no promises", "any of it"),
        )
    ]
