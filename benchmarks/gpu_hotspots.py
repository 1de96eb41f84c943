"""Where the host time of our step goes: ``PYTHONPATH=src python3 benchmarks/gpu_hotspots.py [--device cpu]``.

For tuning, not for judging: to watch a call costs about half a microsecond. On a GPU gradients come on
threads of autograd's, which cProfile does not see; sys.monitoring (Python 3.12) does. What is called and not
ours, operators above all, counts for the function of ours that calls it.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

if not __package__:  # run as a file: look for modules in the repository, not in this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import paceline
from benchmarks.gpu_tasks import Place, many, resnet50

OURS = str(Path(paceline.__file__).parent)
TASKS = {"resnet50": resnet50, "many": many}


class Watch(threading.local):
    """What runs on this thread: since when, and how much of that time belongs to others."""

    def __init__(self) -> None:
        self.stack: list[list[Any]] = []  # [code, start, time of what it has called]


class Hotspots:
    """Counts calls of our functions, and the time that is spent in each but not in another one of ours."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.nanoseconds: Counter[CodeType] = Counter()
        self._watch = Watch()

    def __enter__(self) -> "Hotspots":
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        events = monitoring.events
        monitoring.use_tool_id(monitoring.PROFILER_ID, "paceline")
        for event, callback in (
            (events.PY_START, self._on_start),
            (events.PY_RETURN, self._on_end),
            (events.PY_UNWIND, self._on_end),
            (events.PY_YIELD, self._on_end),
            (events.PY_RESUME, self._on_start),
        ):
            monitoring.register_callback(monitoring.PROFILER_ID, event, callback)
        monitoring.set_events(
            monitoring.PROFILER_ID,
            events.PY_START | events.PY_RETURN | events.PY_UNWIND | events.PY_YIELD | events.PY_RESUME,
        )
        return self

    def __exit__(self, *_: object) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.free_tool_id(monitoring.PROFILER_ID)

    def _on_start(self, code: CodeType, _offset: int) -> None:
        if code.co_filename.startswith(OURS):
            self._watch.stack.append([code, time.perf_counter_ns(), 0])

    def _on_end(self, code: CodeType, _offset: int, _value: object) -> None:
        stack = self._watch.stack
        if not stack or stack[-1][0] is not code:
            return
        _, start, inner = stack.pop()
        spent = time.perf_counter_ns() - start
        self.calls[code] += 1
        self.nanoseconds[code] += spent - inner
        if stack:
            stack[-1][2] += spent

    def table(self, steps: int, rows: int) -> str:
        """Return the dearest functions: calls a step, microseconds a step."""
        calls, micros = sum(self.calls.values()) / steps, sum(self.nanoseconds.values()) / steps / 1e3
        lines = [f"{calls:8.1f} {micros:9.1f}  all"]
        for code, spent in self.nanoseconds.most_common(rows):
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            lines.append(
                f"{self.calls[code] / steps:8.1f} {spent / steps / 1e3:9.1f}  {where} {code.co_qualname}"
            )
        return "\n".join(["   calls        us  (a step)", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--task", choices=list(TASKS))
    args = parser.parse_args()
    place = Place(torch.device(args.device), args.tiny)
    folder = tempfile.mkdtemp()
    os.environ.setdefault("NCCL_DEBUG", "ERROR")
    backend = "nccl" if place.on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    for name in [args.task] if args.task else TASKS:
        print(f"{name}\n{profile(place, name, args.steps, args.rows)}\n", flush=True)
    dist.destroy_process_group()


def profile(place: Place, name: str, steps: int, rows: int) -> str:
    """Run steps, without an optimizer, and return where the time of ours went."""
    task = TASKS[name](place)
    paceline.replicate(task.model)
    parameters = list(task.model.parameters())

    def step() -> None:
        task.loss(task.model).backward()
        place.wait()
        for parameter in parameters:
            parameter.grad = None

    for _ in range(10):
        step()
    gc.collect()
    gc.disable()
    with Hotspots() as hotspots:
        for _ in range(steps):
            step()
    gc.enable()
    return hotspots.table(steps, rows)


if __name__ == "__main__":
    main()
