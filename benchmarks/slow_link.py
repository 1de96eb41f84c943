"""Bars 11 and 12: training a small GPT on two hosts with a slow wire between them, with torch's DDP and ours.

100 Mbit/s   torch DDP against our hooks: time of a step, and loss after 200 steps
1 Gbit/s     torch's bucket sizes against smaller ones, with gradients that fill a bucket of 25 MB, and few
"""

import argparse
import functools
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from benchmarks.cycles import Cycle, Samples, Variant, exactly, merge, run_cycles
from benchmarks.link import on_two_hosts, why_not
from benchmarks.models import GPT
from benchmarks.ranks import say
from benchmarks.steps import from_rank_0
from benchmarks.table import Row, as_markdown, write_json
from paceline.guard import guard
from paceline.hooks import Hook, average, in_dtype, local_sgd, powersgd, quantized

OUT = Path("results", "bench-slow-link.json")
SLOW, FAST = "100mbit", "1gbit"
LENGTH = 64
RATE, WARM_UP = 2e-3, 20  # the learning rate, and the steps in which it grows
HELD_OUT = 200_000  # characters
MANY = 10**9  # steps of a run that is only timed
EVERY = 8  # steps between two averages of local_sgd; also what is timed in one go
PLAIN_SHARE = 10  # one in ten steps of a run is plain before PowerSGD begins
BUCKETS_MB = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Size:
    """A GPT, how many rows of text a rank gets in a step, and how many steps are timed in one go."""

    width: int
    layers: int
    rows: int
    every: int


SMALL = Size(width=128, layers=4, rows=4, every=EVERY)
LARGE = Size(width=256, layers=12, rows=8, every=1)  # torch makes three buckets of it: 1, 25 and 11 MiB
TUNED_MB = 2.0  # what the bar is about: not the best of several, which one sees only afterwards

# Hooks by name, made for a run that begins with so many plain steps; the bar, and the goal of its time.
HOOKS: dict[str, tuple[Callable[[int], Hook], int, str]] = {
    "plain": (lambda _: average, 0, ">= 1.0"),
    "bfloat16": (lambda _: in_dtype(torch.bfloat16, average), 11, ">= 1.8"),
    "quantized(8)": (lambda _: quantized(bits=8), 0, ">= 2.0"),
    "powersgd(2)": (lambda plain: powersgd(rank=2, start_step=plain), 0, ">= 4.5"),
    "powersgd(2) but the head": (
        lambda plain: powersgd(rank=2, start_step=plain, uncompressed=["head.*"]), 11, ">= 4.5"
    ),
    "powersgd(4) in bfloat16": (
        lambda plain: powersgd(rank=4, start_step=plain, inner=in_dtype(torch.bfloat16)), 0, ">= 4.5"
    ),
    f"local_sgd({EVERY})": (lambda _: local_sgd(every=EVERY), 0, ">= 4.4"),
    f"local_sgd({EVERY}) in bfloat16": (
        lambda _: local_sgd(every=EVERY, dtype=torch.bfloat16), 11, ">= 4.4"
    ),
}  # fmt: skip


# ---- what is trained ----------------------------------------------------------------------------------


def build(size: Size = SMALL) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=256, width=size.width, layers=size.layers, heads=4, length=LENGTH)


@functools.cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Read the source of Python's standard library, which every machine has: to train on, and held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[:-HELD_OUT], text[-HELD_OUT:]


def pieces(text: torch.Tensor, seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (rows, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """One model with its optimizer, a step at a time. Its rate grows, and is 0 again after ``steps``."""

    def __init__(self, model: nn.Module, steps: int, size: Size = SMALL) -> None:
        self.model = model
        self.size = size
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
        self.done = 0
        self.steps = steps

    def step(self) -> None:
        fall = 0.5 * (1 + math.cos(math.pi * min(1, self.done / self.steps)))
        self.optimizer.param_groups[0]["lr"] = RATE * min((self.done + 1) / WARM_UP, fall)
        self.done += 1
        tokens = pieces(texts()[0], 1000 * self.done + dist.get_rank(), self.size.rows)
        loss_of(self.model, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def round(self) -> None:
        """Train as long as is timed in one go: for a small one, from one average of local_sgd to the next."""
        for _ in range(self.size.every):
            self.step()


# ---- the variants -------------------------------------------------------------------------------------


def torch_ddp(size: Size = SMALL, name: str = "torch DDP", **arguments: Any) -> Variant:
    model = TorchDDP(build(size), gradient_as_bucket_view=True, **arguments)
    return Variant(name, Training(model, MANY, size).round)


def ours(name: str, hook: Hook, size: Size = SMALL, **arguments: Any) -> Variant:
    model = paceline.replicate(build(size), hook=hook, **arguments)
    reducer = paceline.replica(model).reducer
    guard.remove(reducer)

    @contextmanager
    def guarded() -> Iterator[None]:
        guard.add(reducer)  # it stands before every optimizer, so the others would pay for it too
        try:
            yield
        finally:
            guard.remove(reducer)

    return Variant(name, Training(model, MANY, size).round, guarded)


def hook_variants() -> list[Variant]:
    return [torch_ddp(), *(ours(name, make(EVERY)) for name, (make, _, _) in HOOKS.items())]


def bucket_variants(size: Size) -> list[Variant]:
    small = [ours(f"{mb} MiB", average, size, bucket_mb=mb, first_bucket_mb=mb) for mb in BUCKETS_MB]
    bare = Variant("nothing", Training(build(size), MANY, size).round)
    theirs = torch_ddp(size, "torch DDP, tuned", bucket_cap_mb=TUNED_MB)
    return [bare, torch_ddp(size), theirs, ours("25 MiB", average, size), *small]


def cycles_of(variants: Callable[[], list[Variant]], seconds: float, minimum: int) -> list[Cycle]:
    """Run on each rank: time rounds of all variants in turn."""
    return run_cycles(variants(), seconds=seconds, slot_seconds=0, share=from_rank_0, minimum=minimum)


def losses_of(steps: int) -> dict[str, float]:
    """Run on each rank: train every variant from the same start, and ask it for text it has not seen."""
    unseen = pieces(texts()[1], 7, rows=512)
    losses = {}
    for name in ("torch DDP", *HOOKS):
        model = build()
        hook = HOOKS[name][0](steps // PLAIN_SHARE) if name in HOOKS else None
        training = Training(paceline.replicate(model, hook=hook) if hook else TorchDDP(model), steps)
        for _ in range(steps):
            training.step()
        with torch.no_grad():
            losses[name] = loss_of(model, unseen).item()
    return losses


def start_of(steps: int) -> bool:
    """Run on each rank: start with PowerSGD from the first step, and see whether the ranks are equal."""
    model = paceline.replicate(build(), hook=powersgd(rank=2, start_step=0), bucket_mb=0.5)
    training = Training(model, steps)
    for _ in range(steps):
        training.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(rows, flat)
    return bool(torch.equal(rows[0], rows[1]) and flat.isfinite().all())


# ---- the bars -----------------------------------------------------------------------------------------


def measured(
    rate: str, variants: Callable[[], list[Variant]], seconds: float, minimum: int, every: int = EVERY
) -> Samples:
    say(f"  {rate}: {seconds:.0f} s")
    samples = merge(on_two_hosts(rate, cycles_of, variants, seconds, minimum))
    each = {name: 1e3 * samples.median(name) / every for name in samples.steps}
    say(f"    {samples.kept}; ms a step: " + ", ".join(f"{name} {ms:.1f}" for name, ms in each.items()))
    return samples


def bar_11(seconds: float, minimum: int, steps: int) -> list[Row]:
    """Compare our hooks with torch's DDP on 100 Mbit/s, in time and in loss."""
    samples = measured(SLOW, hook_variants, seconds, minimum)
    say(f"  losses after {steps} steps, on a fast link")
    losses = on_two_hosts(None, losses_of, steps)[0]
    say("    " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    rows = []
    for name, (_, bar, goal) in HOOKS.items():
        what = f"100 Mbit/s: step, torch DDP / {name}"
        note = f"loss after {steps} steps {losses[name]:.4f}, torch {losses['torch DDP']:.4f}"
        if "powersgd" in name:
            note += (
                f"; {_whole_run(samples, name, steps):.2f} with the {steps // PLAIN_SHARE} plain steps before"
            )
        rows.append(_ratio(bar, what, samples, name, goal, f"{note}; {samples.kept}"))
    for name, (_, bar, _) in HOOKS.items():
        ratio = exactly(round(losses[name] / losses["torch DDP"], 4))
        rows.append(Row(bar, f"loss after {steps} steps, {name} / torch DDP", ratio, "<= 1.02", raw=losses))
    return rows


def _whole_run(samples: Samples, name: str, steps: int) -> float:
    """Compare a whole run: the plain steps at the beginning are as fast as plain ones."""
    plain = steps // PLAIN_SHARE
    ours = plain * samples.median("plain") + (steps - plain) * samples.median(name)
    return steps * samples.median("torch DDP") / ours


def starts(count: int, steps: int) -> list[Row]:
    """Start PowerSGD in new processes, again and again."""
    well = 0
    for start in range(count):
        say(f"  start {start + 1} of {count}")
        try:
            well += all(on_two_hosts(SLOW, start_of, steps))
        except RuntimeError as error:
            say(f"    {error}")
    return [Row(11, f"powersgd: starts of {count} that train", exactly(well), f">= {count}")]


def bar_12(seconds: float, minimum: int) -> list[Row]:
    """Compare smaller buckets with torch's sizes on 1 Gbit/s. The bar is about gradients that fill those."""
    return [*_buckets_of(LARGE, 12, seconds, minimum), *_buckets_of(SMALL, 0, seconds, minimum)]


def _buckets_of(size: Size, bar: int, seconds: float, minimum: int) -> list[Row]:
    nbytes = sum(p.numel() * p.element_size() for p in build(size).parameters())
    what = f"1 Gbit/s, {nbytes / 1e6:.1f} MB of gradients: step, torch DDP (25 MB) /"
    samples = measured(FAST, functools.partial(bucket_variants, size), seconds, minimum, size.every)
    tuned = f"{TUNED_MB} MiB"
    rows = [_ratio(bar, f"{what} buckets of {tuned}", samples, tuned, ">= 1.2" if bar else "", samples.kept)]
    for name in ["25 MiB", *(f"{mb} MiB" for mb in BUCKETS_MB if mb != TUNED_MB)]:
        rows.append(_ratio(0, f"{what} buckets of {name}", samples, name, "", samples.kept))
    rows.append(_ratio(0, f"{what} itself with {tuned}", samples, "torch DDP, tuned", "", samples.kept))
    return [*rows, _ratio(0, f"{what} the same without communication", samples, "nothing", "", samples.kept)]


def _ratio(bar: int, what: str, samples: Samples, name: str, goal: str, note: str) -> Row:
    measured = samples.ratio("torch DDP", name)
    return Row(bar, what, measured, goal, note, samples.medians, samples.is_quiet)


# ---- the command --------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    if reason := why_not():
        sys.exit(f"cannot make a slow link here: {reason}")
    begin = time.monotonic()
    seconds, minimum = (0.0, 2) if chosen.quick else (chosen.seconds, 8)
    rows: list[Row] = []
    bars = chosen.bars or ["11", "12"]
    if "11" in bars:
        say("==> bar 11")
        rows += bar_11(seconds, minimum, chosen.steps)
        rows += starts(chosen.starts, steps=4) if chosen.starts else []
    if "12" in bars:
        say("==> bar 12")
        rows += bar_12(seconds / 3, minimum)
    print(as_markdown(rows))
    spent = round(time.monotonic() - begin)
    write_json(rows, chosen.out, quick=chosen.quick, seconds=spent)
    say(f"==> {chosen.out}, after {spent} s")
    return 0


def _bar(text: str) -> str:
    if text not in ("11", "12"):
        raise argparse.ArgumentTypeError(f"it has to be 11 or 12, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_link", description=__doc__)
    # Not by choices: Python 3.11 takes an empty list for a choice that is not there.
    parser.add_argument("bars", nargs="*", type=_bar, metavar="{11,12}", help="default: both")
    parser.add_argument("--quick", action="store_true", help="two cycles each, to see that it works")
    parser.add_argument("--seconds", type=float, default=300, help="for the cycles of bar 11 (default: 300)")
    parser.add_argument(
        "--steps", type=int, default=200, help="after which losses are compared (default: 200)"
    )
    parser.add_argument("--starts", type=int, default=20, help="of PowerSGD, in new processes (default: 20)")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the JSON goes (default: {OUT})")
    return parser


if __name__ == "__main__":
    from benchmarks import slow_link  # under its own name, by which the ranks find its functions

    sys.exit(slow_link.main())
