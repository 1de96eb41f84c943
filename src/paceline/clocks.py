"""Clocks that a step is timed with: the host's, and a GPU stream's.

A stream's reading is an event: recorded now, it can be used when the stream has come by, so that the host
never waits for it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Something that is read now, and tells later how long it was from one reading to another."""

    def now(self) -> Any:
        """Read the clock."""

    def seconds(self, start: Any, end: Any) -> float:
        """Tell how long it was. Both readings have passed."""
        ...

    def has_passed(self, reading: Any) -> bool:
        """Tell whether a reading can be used already."""
        ...

    def is_running(self) -> bool:
        """Tell whether readings made now mean anything."""
        ...


class HostClock:
    """The time that this process sees."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def has_passed(self, reading: float) -> bool:
        return True

    def is_running(self) -> bool:
        return True


class CudaClock:
    """The time that the current stream of a GPU comes by."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000

    def has_passed(self, reading: Any) -> bool:
        return bool(reading.query())

    def is_running(self) -> bool:
        # While a CUDA graph is recorded, an event says nothing of when the graph is run.
        return not torch.cuda.is_current_stream_capturing()


def clocks_for(parameters: Sequence[torch.Tensor]) -> list[Clock]:
    """Return the host's clock, and the GPU's if all parameters are on one.

    None at all for anything else: the host does not see how long several devices compute.
    """
    kinds = {parameter.device.type for parameter in parameters}
    devices = {parameter.device for parameter in parameters}
    if kinds == {"cpu"}:
        return [HostClock()]
    return [HostClock(), CudaClock(*devices)] if kinds == {"cuda"} and len(devices) == 1 else []
