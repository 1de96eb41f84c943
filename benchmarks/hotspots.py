"""Where the time of our step goes on rank 0: ``python -m benchmarks.hotspots "small MLP" [--cpu]``.

For tuning, not for judging: the profiler itself costs about a microsecond a call.
"""

import argparse
import cProfile
import io
import pstats
import time

import torch.distributed as dist

from benchmarks.models import FIVE, build
from benchmarks.ranks import on_ranks
from benchmarks.variants import ours


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hotspots", description=__doc__)
    parser.add_argument("model", choices=list(FIVE))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--cpu", action="store_true", help="count this thread's CPU seconds; waiting is free")
    args = parser.parse_args()
    print(on_ranks(2, profile, args.model, args.steps, args.rows, args.cpu)[0])


def profile(model: str, steps: int, rows: int, cpu: bool) -> str:
    """Run on each rank: step under the profiler, and return its table on rank 0."""
    variant = ours(build(model))
    profiler = cProfile.Profile(time.thread_time if cpu else time.perf_counter)
    with variant.active():
        for _ in range(5):
            variant.step()
        if dist.get_rank() == 0:
            profiler.enable()
        for _ in range(steps):
            variant.step()
        profiler.disable()
    if dist.get_rank() != 0:
        return ""
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
