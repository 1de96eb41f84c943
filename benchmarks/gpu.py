"""Bar 13, kernel counts and correctness on one GPU: ``PYTHONPATH=src python3 benchmarks/gpu.py --out DIR``.

A world of one over NCCL; two ranks share the GPU over Gloo in the correctness part. Needs torch and this
repository, nothing else. ``--device cpu --tiny`` runs the same code small, to see that it works.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

if not __package__:  # run as a file: look for modules in the repository, not in this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import paceline
from benchmarks.cycles import Estimate, estimate, exactly
from benchmarks.gpu_checks import check_gradients
from benchmarks.gpu_floor import floored
from benchmarks.gpu_price import measure_price, measure_waits
from benchmarks.gpu_tasks import Place, Task, gpt, many, resnet50
from benchmarks.ranks import say
from benchmarks.table import Row, as_markdown, write_json

MIB = 1 << 20
TORCH_FLAGS: dict[str, dict[str, bool]] = {
    "torch DDP": {},
    "torch DDP, views": {"gradient_as_bucket_view": True},
    "torch DDP, views, static": {"gradient_as_bucket_view": True, "static_graph": True},
}
# torch broadcasts buffers in a world of one too, and we do not: without this one it would pay for that alone.
NO_BUFFERS = {**TORCH_FLAGS["torch DDP, views, static"], "broadcast_buffers": False}

Wrap = Callable[[nn.Module], nn.Module]


# ---- variants ----------------------------------------------------------------------------------------


def variants(place: Place, *, more: bool = False) -> dict[str, Wrap]:
    """Name the ways to wrap a model; ``more`` adds flags and doors beyond the three sets of torch's flags."""
    ids = [0] if place.on_gpu else None

    def with_torch(**flags: bool) -> Wrap:
        return lambda model: TorchDDP(model, device_ids=ids, **flags)

    wraps: dict[str, Wrap] = {"bare": lambda model: model, "paceline": paceline.replicate}
    wraps |= {name: with_torch(**flags) for name, flags in TORCH_FLAGS.items()}
    if more:
        wraps["torch DDP, views, static, no buffers"] = with_torch(**NO_BUFFERS)
        wraps["paceline's DDP"] = lambda model: paceline.DistributedDataParallel(model, device_ids=ids)
        wraps["floor"] = floored
    return wraps


def wrapped(build: Callable[[Place], Task], place: Place, wrap: Wrap) -> tuple[nn.Module, Task]:
    task = build(place)
    return wrap(task.model), task


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def interleave(turns: dict[str, Callable[[], float]], cycles: int, warm_up: int) -> dict[str, list[float]]:
    """Give every variant a turn per cycle, in a new order each time, and keep what the turns return."""
    samples: dict[str, list[float]] = {name: [] for name in turns}
    names, shuffle = list(turns), random.Random(0).shuffle
    with no_garbage_collection():
        for cycle in range(warm_up + cycles):
            shuffle(names)
            for name in names:
                spent = turns[name]()
                if cycle >= warm_up:
                    samples[name].append(spent)
    return samples


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def free(place: Place) -> None:
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()


# ---- (a) the step of a large model -------------------------------------------------------------------


def measure_gpt(place: Place) -> list[Row]:
    """Compare whole steps, optimizer included, in GPU-bound training."""
    turns = {name: _stepper(place, wrap) for name, wrap in variants(place).items()}
    samples = interleave(turns, cycles=place.pick(20, 2), warm_up=2)
    times = medians(samples)
    ratios = {name: ratio_of(samples, name, "bare") for name in samples if name != "bare"}
    best = min(TORCH_FLAGS, key=lambda name: times[name])
    note = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
    raw = {"median_seconds": times, "over_bare": {name: ratio.median for name, ratio in ratios.items()}}
    return [
        Row(13, "GPT 163 M: step, ours / bare", ratios["paceline"], "<= 1.01", note, raw),
        Row(0, f"GPT 163 M: step, ours / {best}", ratio_of(samples, "paceline", best), "<= 1.0", "no bar"),
    ]


def _stepper(place: Place, wrap: Wrap) -> Callable[[], float]:
    model, task = wrapped(gpt, place, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    steps = place.pick(3, 1)

    def step() -> None:
        task.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn() -> float:
        step()
        place.wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        place.wait()
        return (time.perf_counter() - start) / steps

    return turn


def ratio_of(samples: dict[str, list[float]], name: str, other: str) -> Estimate:
    return estimate([a / b for a, b in zip(samples[name], samples[other], strict=True)])


# ---- (b) the host's time -----------------------------------------------------------------------------


def measure_host(place: Place) -> list[Row]:
    """Time what the host adds to forward and backward where it, and not the GPU, is the bottleneck."""
    return [
        _host_row(place, "ResNet-50", resnet50),
        _host_row(place, "1,000 small tensors", many),
    ]


def _host_row(place: Place, what: str, build: Callable[[Place], Task]) -> Row:
    turns = {name: _host_turn(build, place, wrap) for name, wrap in variants(place, more=True).items()}
    samples = interleave(turns, cycles=place.pick(60, 2), warm_up=place.pick(6, 1))
    added = {name: estimate(_added(samples, name)) for name in samples if name != "bare"}
    torchs = [name for name in added if name.startswith("torch")]
    best = min(torchs, key=lambda name: added[name].median)
    ratio = estimate([extra / added[best].median for extra in _added(samples, "paceline")])
    listed = ", ".join(f"{name} {1e3 * spent.median:+.2f} ms" for name, spent in added.items())
    raw = {"median_seconds": medians(samples), "added": {name: a.median for name, a in added.items()}}
    bare = 1e3 * statistics.median(samples["bare"])
    return Row(
        13, f"{what}: host time added, ours / {best}", ratio, "<= 0.5", f"bare {bare:.2f} ms; {listed}", raw
    )


def _host_turn(build: Callable[[Place], Task], place: Place, wrap: Wrap) -> Callable[[], float]:
    model, task = wrapped(build, place, wrap)
    parameters = list(model.parameters())

    def once() -> float:
        place.wait()
        start = time.perf_counter()
        task.loss(model).backward()
        spent = time.perf_counter() - start
        place.wait()
        for parameter in parameters:
            parameter.grad = None
        return spent

    def turn() -> float:
        once()
        return once()

    return turn


def _added(samples: dict[str, list[float]], name: str) -> list[float]:
    return [full - bare for full, bare in zip(samples[name], samples["bare"], strict=True)]


# ---- (c) memory --------------------------------------------------------------------------------------


def measure_memory(place: Place) -> list[Row]:
    """Compare the peak memory of training steps, each variant alone on the GPU."""
    if not place.on_gpu:
        say("    skipped: peak memory is read from CUDA's allocator")
        return []
    peaks, resting = {}, {}
    largest = 0.0
    for name, wrap in variants(place).items():
        peaks[name], resting[name], bucket = _peak(place, wrap)
        largest = max(largest, bucket)
    extra = peaks["paceline"] - peaks["bare"]
    listed = ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items())
    rest = ", ".join(
        f"{name} {held - resting['bare']:+.1f}" for name, held in resting.items() if name != "bare"
    )
    note = f"peak MiB: {listed}; held between steps, over bare: {rest}"
    raw = {"peak_mib": peaks, "between_steps_mib": resting}
    return [
        Row(13, "GPT 163 M: peak memory, ours - bare, MiB", exactly(extra), f"<= {largest:.0f}", note, raw)
    ]


def _peak(place: Place, wrap: Wrap) -> tuple[float, float, float]:
    """Return the peak of a step, what is held between steps, and the largest bucket, in MiB."""
    free(place)
    model, task = wrapped(gpt, place, wrap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    for step in range(5):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        task.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    place.wait()
    peak, held = torch.cuda.max_memory_allocated() / MIB, torch.cuda.memory_allocated() / MIB
    return peak, held, largest_bucket(model)


def largest_bucket(model: nn.Module) -> float:
    try:
        return max(bucket.nbytes for bucket in paceline.replica(model).plan.buckets) / MIB
    except ValueError:
        return 0.0  # not ours


# ---- (d) kernels -------------------------------------------------------------------------------------


def measure_kernels(place: Place) -> list[Row]:
    """Count the kernels and copies that a step runs on the GPU."""
    if not place.on_gpu:
        say("    skipped: kernels are counted on a GPU; tests/test_counts.py counts operators")
        return []
    return [
        _kernel_row(place, "1,000 small tensors", many),
        _kernel_row(place, "ResNet-50", resnet50),
    ]


def _kernel_row(place: Place, what: str, build: Callable[[Place], Task]) -> Row:
    seen: dict[str, Counter[str]] = {}
    buckets = 0
    for name, wrap in variants(place, more=True).items():
        model, task = wrapped(build, place, wrap)
        seen[name] = _kernels(place, model, task)
        if name == "paceline":
            buckets = len(paceline.replica(model).plan.buckets)
    extra = {name: sum(found.values()) - sum(seen["bare"].values()) for name, found in seen.items()}
    ours = ", ".join(
        f"{count} {name[:40]}" for name, count in (seen["paceline"] - seen["bare"]).most_common(6)
    )
    listed = ", ".join(f"{name} {count:+d}" for name, count in extra.items() if name != "bare")
    note = f"{buckets} buckets; ours: {ours or 'none'}; {listed}"
    raw = {"added": extra, "ours": dict(seen["paceline"] - seen["bare"])}
    return Row(10, f"{what}: kernels added", exactly(extra["paceline"]), f"<= {buckets + 1}", note, raw)


def _kernels(place: Place, model: nn.Module, task: Task) -> Counter[str]:
    """Count by name what one forward and backward runs on the device."""

    def once() -> None:
        task.loss(model).backward()
        model.zero_grad()
        place.wait()

    for _ in range(3):
        once()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        once()  # the profiler's own start is not in the count
    with torch.profiler.profile(activities=activities) as profiler:
        once()
    return on_device(profiler)


def on_device(profiler: Any) -> Counter[str]:
    # The trace names what an event is; the profiler's own list mixes annotations with kernels.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    return Counter(event["name"] for event in events if event.get("cat") in kinds)


# ---- the run -----------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Place], list[Row]]] = {
    "gpt": measure_gpt,
    "host": measure_host,
    "memory": measure_memory,
    "kernels": measure_kernels,
    "price": measure_price,
    "waits": measure_waits,
    "correct": check_gradients,
}


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    place = Place(torch.device(chosen.device), chosen.tiny)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # 2.11 has no other name
    rows: list[Row] = []
    start = time.monotonic()
    with world_of_one(place):
        for name in chosen.parts or PARTS:
            say(f"==> {name}, after {time.monotonic() - start:.0f} s")
            rows += PARTS[name](place)
            free(place)
            # Written after each part: a run that is cut short leaves what it has.
            write_json(rows, chosen.out / "bench-gpu.json", device=_device_name(place), tiny=place.tiny)
    print(as_markdown(rows))
    say(f"==> {chosen.out / 'bench-gpu.json'}, after {time.monotonic() - start:.0f} s")
    return 0


@contextmanager
def world_of_one(place: Place) -> Iterator[None]:
    """Open a group of one: NCCL on a GPU, Gloo to try the script on a CPU."""
    if place.on_gpu:
        torch.cuda.set_device(place.device)
    else:
        say("    on a CPU: Gloo in NCCL's place, and no figure here means anything")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = place.device if place.on_gpu else None
    backend = "nccl" if place.on_gpu else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _device_name(place: Place) -> str:
    return torch.cuda.get_device_name() if place.on_gpu else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", type=_part, metavar="part", help=f"{', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of the JSON (default: results)"
    )
    parser.add_argument("--device", default="cuda:0", help="default: cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    return parser


def _part(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"there is no part {name!r}; choose from {', '.join(PARTS)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
