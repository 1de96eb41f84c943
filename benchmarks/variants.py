"""The ways to run a step: bare, with torch's DDP, with paceline, and with paceline less one promise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from benchmarks.cycles import Variant
from benchmarks.models import Task
from paceline.control import SocketControl
from paceline.guard import guard

TORCH_FLAGS: dict[str, dict[str, bool]] = {
    "torch DDP": {},
    "torch DDP, views": {"gradient_as_bucket_view": True},
    "torch DDP, views, static": {"gradient_as_bucket_view": True, "static_graph": True},
}


def bare(task: Task) -> Variant:
    return Variant("bare", training_step(task, task.model))


def torch_ddp(task: Task, name: str) -> Variant:
    return Variant(name, training_step(task, TorchDDP(task.model, **TORCH_FLAGS[name])))


def ours(task: Task, name: str = "paceline") -> Variant:
    """Replicate with the defaults."""
    model = paceline.replicate(task.model)
    reducer = paceline.replica(model).reducer
    guard.remove(reducer)
    return Variant(name, training_step(task, model), lambda: guarded(reducer))


def without_guard(task: Task) -> Variant:
    return Variant("no guard", training_step(task, paceline.replicate(task.model, guard=False)))


def without_frames(task: Task) -> Variant:
    """Leave out the control frames: each rank takes its own frame for everybody's."""
    with_frames = ours(task)

    @contextmanager
    def active() -> Iterator[None]:
        with with_frames.active(), without_control():
            yield

    return Variant("no frames", with_frames.step, active)


def without_promises(task: Task) -> Variant:
    """Leave out everything that is compared, watched and guarded by default."""
    return Variant("no promises", training_step(task, without_promises_on(task.model)), without_control)


def without_promises_on(model: nn.Module) -> nn.Module:
    """Replicate a model with all that can be taken off taken off."""
    paceline.replicate(model, guard=False, loader_check=False)
    for handle in paceline.replica(model)._forward_handles:
        handle.remove()
    return model


def training_step(task: Task, model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        task.loss(model(task.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def guarded(reducer: Any) -> Iterator[None]:
    # The gate looks at every optimizer of the process, so the other variants would pay for it too.
    guard.add(reducer)
    try:
        yield
    finally:
        guard.remove(reducer)


@contextmanager
def without_control() -> Iterator[None]:
    """Leave out the control frames: each rank takes its own for everybody's."""
    posted: dict[bytes, bytes] = {}
    size = dist.get_world_size()

    def post(_self: Any, topic: bytes, frame: bytes) -> None:
        posted[topic] = frame

    def collect(_self: Any, topic: bytes, _seconds: float, _waiter: Any = None) -> list[bytes]:
        return [posted.pop(topic)] * size

    control = {"post": post, "collect": collect, "ready": lambda _self, _topic: True}
    with mock.patch.multiple(SocketControl, **control):
        yield
