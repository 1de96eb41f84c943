"""The ways to run a step: bare, with torch's DDP, with paceline, and with paceline less one promise."""

import dataclasses
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
from paceline.loaders import SameBatch

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


def with_and_without(task: Task) -> list[Variant]:
    """Replicate with the defaults, and take promises away in turns, of one and the same model.

    Of two models the memory lies differently: a few percent, longer than the price of any promise.
    """
    model = paceline.replicate(task.model)
    reducer = paceline.replica(model).reducer
    guard.remove(reducer)
    step = training_step(task, model)

    @contextmanager
    def without_frames() -> Iterator[None]:
        with guarded(reducer), without_control():
            yield

    return [
        Variant("paceline", step, lambda: guarded(reducer)),
        Variant("no guard", step),
        Variant("no frames", step, without_frames),
        Variant("no promises", step, lambda: without_promises(model)),
    ]


@contextmanager
def without_promises(model: nn.Module) -> Iterator[None]:
    """Leave out everything that is compared and watched by default. The guard has to be down already."""
    reducer: Any = paceline.replica(model).reducer
    wiring = reducer.wiring
    riders = [rider for rider in wiring.riders if not isinstance(rider, SameBatch)]
    hooks = (model._forward_pre_hooks, model._forward_hooks)
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    reducer._wiring = dataclasses.replace(wiring, riders=riders)
    try:
        with without_control():
            yield
    finally:
        reducer._wiring = wiring
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


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
