"""Measure the bars that a CPU can tell, print one table, and write it as JSON."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.compiled import compiled
from benchmarks.counts import bar_10
from benchmarks.mesh import mesh
from benchmarks.overhead import bar_9
from benchmarks.ranks import say
from benchmarks.steps import bar_8, bar_15
from benchmarks.table import Row, as_markdown, write_json

OUT = Path("results", "bench-cpu.json")

# Seconds per model or size: (full, --quick).
BARS: dict[str, tuple[Callable[[float], list[Row]], tuple[float, float]]] = {
    "8": (bar_8, (60, 5)),
    "9": (bar_9, (15, 3)),
    "10": (lambda _seconds: bar_10(), (0, 0)),
    "15": (bar_15, (70, 5)),
    "compiled": (compiled, (60, 5)),
    "mesh": (mesh, (60, 5)),
}
BY_DEFAULT = [name for name in BARS if name.isdigit()]  # what has no bar is asked for by name


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    start = time.monotonic()
    rows: list[Row] = []
    for name in chosen.bars or BY_DEFAULT:
        measure, seconds = BARS[name]
        say(f"==> bar {name}")
        rows += measure(seconds[chosen.quick])
    print(as_markdown(rows))
    write_json(rows, chosen.out, quick=chosen.quick, seconds=round(time.monotonic() - start))
    say(f"==> {chosen.out}, after {time.monotonic() - start:.0f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "bars", nargs="*", type=_bar, metavar="bar", help=f"{', '.join(BARS)} (default: all numbers)"
    )
    parser.add_argument("--quick", action="store_true", help="about a minute in all, and much noisier")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the JSON goes (default: {OUT})")
    return parser


def _bar(name: str) -> str:
    if name not in BARS:
        raise argparse.ArgumentTypeError(f"there is no bar {name!r}; choose from {', '.join(BARS)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
