"""Figures on a GPU: `PYTHONPATH=src python3 tests/gpu/figures.py`.

Seconds are the stream's, and the host never waits for them. Where a time has to be known, the stream sleeps.
Needs torch and this repository, nothing else. Prints a line per check and ends with a non-zero status if one
failed.
"""

import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DistributedDataParallel, replica, replicate
from paceline.comm import Comm, Pending
from paceline.hooks import GradBucket

CUDA = torch.device("cuda", 0)
CYCLES = 100_000_000  # some 50 ms


def slept_seconds() -> float:
    """Measure how long the stream sleeps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


class Sleep(torch.autograd.Function):
    """Let the stream sleep in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(CYCLES)
        return gradient


def mlp(width: int = 512, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts).to(CUDA)


def step(model: nn.Module, *, sleeps: bool = False) -> float:
    """Run a step, and return how long the host took for its backward."""
    model.zero_grad()
    output = model(torch.ones(64, 512, device=CUDA))
    loss = (Sleep.apply(output) if sleeps else output).square().mean()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def computation_is_the_streams() -> None:
    model = replicate(mlp())
    step(model)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    host = step(model, sleeps=True)
    end.record()
    torch.cuda.synchronize()
    expected = slept_seconds()

    stats = replica(model).stats()
    assert stats.clock == "cuda", stats
    assert stats.last.computation_seconds >= expected * 0.9, (stats, expected)
    assert stats.last.computation_seconds + stats.last.exposed_seconds <= start.elapsed_time(end) / 1000
    assert host < expected / 2, f"the host waited {host} s"
    assert stats.last.overlapped_seconds <= stats.last.communication_seconds
    print(stats)


def forward_is_the_streams() -> None:
    model = DistributedDataParallel(mlp(), device_ids=[0])
    step(model)
    model.module.register_forward_hook(lambda *_: torch.cuda._sleep(CYCLES))
    step(model)
    torch.cuda.synchronize()
    expected = slept_seconds()

    times = replica(model).stats().last
    assert times.forward_seconds >= expected * 0.9, (times, expected)
    assert times.computation_seconds < expected / 2, (times, expected)


class Slow(Pending):
    """A collective that takes its time on a stream of its own."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._tensor = flat
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(CYCLES)

    def wait(self) -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(self._stream)
        return self._tensor


def slow(bucket: GradBucket, comm: Comm) -> Pending:
    comm.total(bucket.flat)
    return Slow(bucket.flat)


def slow_communication_is_exposed() -> None:
    model = replicate(mlp(), hook=slow)
    step(model)
    host = step(model)
    torch.cuda.synchronize()
    expected = slept_seconds()

    times = replica(model).stats().last
    assert times.exposed_seconds >= expected * 0.8, (times, expected)
    assert times.communication_seconds >= expected * 0.9, (times, expected)
    assert times.computation_seconds < expected / 2, (times, expected)
    assert host < expected / 2, f"the host waited {host} s"


def figures_come_when_the_stream_has_come_by() -> None:
    model = replicate(mlp())
    step(model)
    torch.cuda.synchronize()
    step(model, sleeps=True)
    early = replica(model).stats()
    torch.cuda.synchronize()
    late = replica(model).stats()

    assert (early.step, early.timed_step) == (1, 0), early
    assert (late.step, late.timed_step) == (1, 1), late


def nobody_waits_on_the_host() -> None:
    model = DistributedDataParallel(mlp(), device_ids=[0])
    step(model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step(model)
            replica(model).stats()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def every_hundredth_step_is_timed() -> None:
    model = replicate(mlp())
    for _ in range(102):
        step(model)
    torch.cuda.synchronize()

    stats = replica(model).stats()
    assert (stats.step, stats.timed_step, stats.timed_steps) == (101, 100, 11), stats


def nothing_is_timed_while_a_graph_is_recorded() -> None:
    model = DistributedDataParallel(mlp(), device_ids=[0])
    x = torch.ones(64, 512, device=CUDA)
    step(model)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x)
    graph.replay()
    step(model)
    torch.cuda.synchronize()

    assert replica(model).stats().timed_step == 1


def what_it_costs() -> None:
    model = replicate(mlp(layers=8))
    replica(model).sample_stats(every=2)
    for _ in range(20):
        step(model)
    seconds = []
    for _ in range(600):
        torch.cuda.synchronize()
        seconds.append(step(model) * 1e6)
    timed, counted = sorted(seconds[::2]), sorted(seconds[1::2])
    print(f"backward takes the host {timed[150]:.1f} us timed, else {counted[150]:.1f} us (medians of 300)")


def the_environment_is_shown_without_setting_a_gpu_up() -> None:
    script = (
        "from paceline import __version__, environment\n"
        "print(environment.as_text(environment.collect(__version__)))\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    print(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


CHECKS: list[Callable[[], None]] = [
    computation_is_the_streams,
    forward_is_the_streams,
    slow_communication_is_exposed,
    figures_come_when_the_stream_has_come_by,
    nobody_waits_on_the_host,
    every_hundredth_step_is_timed,
    nothing_is_timed_while_a_graph_is_recorded,
    what_it_costs,
    the_environment_is_shown_without_setting_a_gpu_up,
]


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        print(f"FAIL {check.__name__}", flush=True)
        return False
    print(f"ok   {check.__name__}", flush=True)
    return True


def main() -> int:
    torch.cuda.set_device(CUDA)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CUDA)
        failed = [check.__name__ for check in CHECKS if not passes(check)]
        dist.destroy_process_group()
    print(f"paceline {paceline.__version__}: " + ("failed: " + ", ".join(failed) if failed else "all passed"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
