"""Bar 15 on a GPU: what the promises cost two ranks that share it over Gloo; and where the host waits."""

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

import paceline
from benchmarks.cycles import estimate, exactly
from benchmarks.gpu_tasks import Place, Task, gpt, many
from benchmarks.ranks import on_ranks, say
from benchmarks.table import Row
from benchmarks.variants import guarded, without_promises
from paceline.guard import guard

TASKS: dict[str, Callable[[Place], Task]] = {"GPT 163 M": gpt, "1,000 small tensors": many}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def measure_price(place: Place) -> list[Row]:
    """Take all promises away, and see what they had cost."""
    return [_price_row(name, place) for name in TASKS]


def _price_row(name: str, place: Place) -> Row:
    say(f"    {name}: with and without, on 2 ranks")
    each = on_ranks(2, _price_on_rank, name, place)
    pairs = [(max(a[0], b[0]), max(a[1], b[1])) for a, b in zip(*each, strict=True)]
    note = f"ms a step: {1e3 * estimate([a for a, _ in pairs]).median:.2f} with them; {len(pairs)} pairs"
    ratio = estimate([with_them / without for with_them, without in pairs])
    return Row(15, f"{name}: step, with / without the promises", ratio, "<= 1.01", note)


def _price_on_rank(name: str, place: Place) -> list[tuple[float, float]]:
    if place.on_gpu:
        torch.cuda.set_device(place.device)
    task = TASKS[name](place)
    reducer = paceline.replica(paceline.replicate(task.model)).reducer
    guard.remove(reducer)
    step, turns = _stepper(task), [lambda: guarded(reducer), lambda: without_promises(task.model)]
    pairs = []
    for cycle in range(place.pick(62, 4)):
        spent = [0.0, 0.0]
        for turn in (0, 1) if cycle % 2 else (1, 0):
            dist.barrier()
            place.wait()
            start = time.perf_counter()
            with turns[turn]():
                for _ in range(place.pick(3, 1)):
                    step()
            place.wait()
            spent[turn] = (time.perf_counter() - start) / place.pick(3, 1)
        pairs.append((spent[0], spent[1]))
    return pairs[2:]


def _stepper(task: Task) -> Callable[[], None]:
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-5)

    def step() -> None:
        task.loss(task.model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_waits(place: Place) -> list[Row]:
    """Count where the host waits for the GPU in a step of one rank over NCCL, beyond the bare step."""
    if not place.on_gpu:
        say("    skipped: on a CPU there is nothing to wait for")
        return []
    rows = []
    for name, build in TASKS.items():
        bare, ours = build(place), build(place)
        paceline.replicate(ours.model)
        counts = [_waits(_stepper(task), place) for task in (bare, ours)]
        added = counts[1] - counts[0]
        note = f"bare {dict(counts[0])}, ours {dict(counts[1])}"
        rows.append(Row(15, f"{name}: waits of the host added", exactly(sum(added.values())), "<= 0", note))
        paceline.replica(ours.model).detach()
    return rows


def _waits(step: Callable[[], None], place: Place) -> Counter[str]:
    for _ in range(12):  # the first ten steps are timed for the figures
        step()
    place.wait()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        step()  # the profiler's own start is not in the count
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    return Counter(event.name for event in profiler.events() if event.name in WAITS)
