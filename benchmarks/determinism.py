"""What ``deterministic=True`` costs a training step: ``python -m benchmarks.determinism``.

Steps with it and without it take turns on plain Gloo ranks, with one micro-batch a step and with four.
"""

import argparse
import contextlib
from collections.abc import Callable

import torch

import paceline
from benchmarks.cycles import Variant, merge
from benchmarks.models import FIVE, Task, build
from benchmarks.ranks import on_ranks, say
from benchmarks.steps import cycles_of

MICRO_BATCHES = (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.determinism", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="for each model")
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(FIVE)} (default: all)")
    chosen = parser.parse_args()
    for name in chosen.models or FIVE:
        samples = merge(on_ranks(chosen.ranks, cycles_of, both_ways, name, chosen.seconds, False))
        for count in MICRO_BATCHES:
            on, off = _name(count, True), _name(count, False)
            say(
                f"{name}, {count} micro-batches, {chosen.ranks} ranks: on / off {samples.ratio(on, off)}, "
                f"CPU {samples.cpu_ratio(on, off)}; {1e3 * samples.median(on):.2f} and "
                f"{1e3 * samples.median(off):.2f} ms; {samples.kept}"
            )


def both_ways(name: str, tiny: bool) -> list[Variant]:
    return [
        Variant(_name(count, on), step_of(build(name, tiny=tiny), count, deterministic=on))
        for count in MICRO_BATCHES
        for on in (False, True)
    ]


def step_of(task: Task, count: int, *, deterministic: bool) -> Callable[[], None]:
    model = paceline.replicate(task.model, deterministic=deterministic, guard=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        for number in range(count):
            with paceline.no_sync(model) if number + 1 < count else contextlib.nullcontext():
                task.loss(model(task.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _name(count: int, on: bool) -> str:
    return f"{count} {'on' if on else 'off'}"


if __name__ == "__main__":
    main()
