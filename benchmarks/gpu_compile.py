"""Bar 14, compiled training on one GPU: ``PYTHONPATH=src python3 benchmarks/gpu_compile.py --out DIR``.

The compiled model alone, torch's compiled DDP in its three ways, and ours: gradients taken inside the graph,
after it, and out of a forward cut at the buckets. A world of one over NCCL: what is measured is what each way
costs, not how well it overlaps. ``--device cpu --tiny`` runs the same code small, to see that it works.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: look for modules in the repository, not in this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.gpu import MIB, free, interleave, medians, on_device, ratio_of, world_of_one
from benchmarks.gpu_tasks import Place, gpt
from benchmarks.ranks import say
from benchmarks.table import Row, as_markdown, write_json
from benchmarks.ways import BARE, EAGER, OURS, TORCHS, Ready, Way, best_of, ways


class Trained:
    """A variant that is ready to make steps."""

    def __init__(self, place: Place, way: Way, rows: int, backend: str) -> None:
        self._place = place
        self._task = gpt(place, rows)
        self._ready = Ready(way, self._task.model, backend)
        self._active = self._ready.active
        parameters = self._task.model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=place.on_gpu)
        with self._active():
            for _ in range(3):
                self.step()
        place.wait()

    def step(self) -> None:
        self._task.loss(self._ready.forward).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def turn(self) -> float:
        steps = self._place.pick(3, 1)
        with self._active():
            self.step()
            self._place.wait()
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            self._place.wait()
            return (time.perf_counter() - start) / steps

    def peak(self) -> float:
        """Return the peak memory of a step over what is held between steps, in MiB."""
        with self._active():
            self.step()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            self.step()
            self._place.wait()
        return (torch.cuda.max_memory_allocated() - held) / MIB

    def kernels(self) -> Counter[str]:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with self._active():
            with torch.profiler.profile(activities=activities):
                self.step()
                self._place.wait()
            with torch.profiler.profile(activities=activities) as profiler:
                self.step()
                self._place.wait()
        return on_device(profiler)


def prepare(place: Place, rows: int, chosen: Sequence[str], backend: str) -> dict[str, Trained]:
    """Compile every variant; one that cannot be is left out, and said so."""
    ready = {}
    for name, way in ways([0] if place.on_gpu else None).items():
        if (chosen and name not in chosen) or name == EAGER:
            continue
        start = time.monotonic()
        try:
            ready[name] = Trained(place, way, rows, backend)
        except Exception as error:  # torch's ways do not all work everywhere
            say(f"    {name}: {type(error).__name__}: {str(error)[:300]}")
        else:
            say(f"    {name}: compiled in {time.monotonic() - start:.0f} s")
    return ready


def measure(place: Place, rows: int, chosen: Sequence[str], backend: str) -> list[Row]:
    """Compare whole steps, optimizer included, on batches of so many rows."""
    ready = prepare(place, rows, chosen, backend)
    samples = interleave({name: each.turn for name, each in ready.items()}, place.pick(20, 2), warm_up=2)
    times = medians(samples)
    listed = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in times.items())
    raw: dict[str, Any] = {"median_seconds": times}
    what = f"GPT 163 M compiled, {rows} x 1024 tokens"
    table = []
    if place.on_gpu:
        peaks = {name: each.peak() for name, each in ready.items()}
        kernels = {name: sum(each.kernels().values()) for name, each in ready.items()}
        raw |= {"peak_mib": peaks, "kernels": kernels}
        say("    peak MiB of a step: " + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()))
        say("    kernels of a step: " + ", ".join(f"{name} {count}" for name, count in kernels.items()))
    table.append(
        Row(
            14,
            f"{what}: ours / bare",
            ratio_of(samples, OURS, BARE),
            "<= 1.05",
            f"ms: {listed}",
            raw,
        )
    )
    torchs = [name for name in times if name.startswith("torch")]
    if torchs:
        best = best_of(times)
        ratio = ratio_of(samples, best, OURS)
        table.append(Row(14, f"{what}: {best} / ours", ratio, ">= 1.15"))
        if TORCHS in times and best != TORCHS:
            ratio = ratio_of(samples, TORCHS, OURS)
            table.append(Row(14, f"{what}: {TORCHS} (the default) / ours", ratio, ">= 1.15"))
    for name in times:
        if name.startswith("paceline") and name != OURS:
            table.append(Row(0, f"{what}: {name} / bare", ratio_of(samples, name, BARE), "<= 1.05", "no bar"))
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_compile.py", description=__doc__)
    parser.add_argument("ways", nargs="*", help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="of a batch (default: 8 and 32)")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: inductor)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    chosen = parser.parse_args(arguments)
    place = Place(torch.device(chosen.device), chosen.tiny)
    with world_of_one(place):
        rows = []
        for size in chosen.rows:
            say(f"==> {size} rows")
            rows += measure(place, size, chosen.ways, chosen.backend)
            free(place)
    write_json(rows, chosen.out / "bench-gpu-compile.json", device=str(place.device), tiny=place.tiny)
    print(as_markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
