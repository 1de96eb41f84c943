"""The ways to compile a training step: alone, with torch's DDP, and with paceline.

Each variant has a backend of its own, so that no two share compiled code: they run the same functions.
What a way needs to be switched on while it wraps, compiles and runs is switched off again after its turns.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from benchmarks.variants import guarded
from paceline.compile import in_graph, split
from paceline.guard import guard

BARE, OURS, TORCHS = "bare", "paceline, in the graph", "torch, ddp_optimizer"
AFTER, SPLIT, EAGER = "paceline, after the graph", "paceline, split", "paceline, eager"
BUCKET_MB = 25  # torch's default, which python_reducer has to be told

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]
During = Callable[[Backend], AbstractContextManager[None]]


@dataclass(frozen=True)
class Way:
    """How a model is wrapped and compiled, and what is so meanwhile."""

    wrap: Callable[[nn.Module], nn.Module]
    backend: Callable[[Backend], Backend] | None = lambda inner: inner  # None: not compiled
    during: During = lambda _: nullcontext()


def ways(ids: Sequence[int] | None = None) -> dict[str, Way]:
    """Name the ways; ``ids`` are torch's device_ids."""

    def torchs(mode: str, **flags: Any) -> Way:
        return Way(lambda model: TorchDDP(model, device_ids=ids, **flags), during=_modes(mode))

    return {
        BARE: Way(lambda model: model),
        OURS: Way(paceline.replicate),
        AFTER: Way(paceline.replicate, during=_without_arrivals),
        SPLIT: Way(paceline.replicate, split),
        EAGER: Way(paceline.replicate, None),
        TORCHS: torchs("ddp_optimizer"),
        f"{TORCHS}, views": torchs("ddp_optimizer", gradient_as_bucket_view=True),
        "torch, python_reducer": torchs("python_reducer", bucket_cap_mb=BUCKET_MB),
        "torch, no_optimization": torchs("no_optimization"),
    }


@contextmanager
def _without_arrivals(_backend: Backend) -> Iterator[None]:
    """Leave the backward graph as it is: gradients are reduced when autograd writes them."""
    with mock.patch.object(in_graph, "find_gradients", return_value=[]):
        yield


def _modes(mode: str) -> During:
    """Choose torch's optimize_ddp, which its DDP reads when it is made and Dynamo when it compiles."""

    @contextmanager
    def during(backend: Backend) -> Iterator[None]:
        config: Any = torch._dynamo.config
        more = _python_reducer(backend) if mode == "python_reducer" else nullcontext()
        with config.patch(optimize_ddp=mode), more:
            yield

    return during


@contextmanager
def _python_reducer(backend: Backend) -> Iterator[None]:
    """Compile the backward too; take back what this mode changes for all, because it breaks the others."""
    inductor: Any = torch._inductor.config
    rules = torch._dynamo.trace_rules
    before = set(rules.LEGACY_MOD_INLINELIST)
    compiler = partial(torch.compile, backend=backend)
    with (
        inductor.patch(_fuse_ddp_communication=True, _fuse_ddp_bucket_size=BUCKET_MB),
        torch._dynamo.compiled_autograd._enable(compiler),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch's own tracing
        _inline({*before, TorchDDP.__module__})
        try:
            yield
        finally:
            _inline(before)


def _inline(modules: set[str]) -> None:
    """Set the modules that Dynamo looks into."""
    rules = torch._dynamo.trace_rules
    rules.LEGACY_MOD_INLINELIST.clear()
    rules.LEGACY_MOD_INLINELIST.update(modules)
    rules.get_legacy_mod_inlinelist.cache_clear()


class Ready:
    """A model that is wrapped and compiled in one way; everything with it happens while ``active()``."""

    def __init__(self, way: Way, model: nn.Module, backend: str) -> None:
        self._way = way
        self._name = backend
        self.graphs = 0  # that the inner backend has compiled
        self._backend = way.backend(self._compile) if way.backend else self._compile
        self._reducer: Any = None
        with self.active():
            self.model = way.wrap(model)
            self.forward: Any = self.model
            if way.backend is not None:
                self.forward = torch.compile(self.model, backend=self._backend)
        if way.wrap is paceline.replicate:
            self._reducer = _unguarded(self.model)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self._name)(graph, inputs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold what has to be so while this variant compiles and runs."""
        config: Any = torch._dynamo.config
        guarding = guarded(self._reducer) if self._reducer is not None else nullcontext()
        with config.patch(recompile_limit=64), self._way.during(self._backend), guarding:
            yield


def _unguarded(model: nn.Module) -> Any:
    """Keep the guard away from the turns of others; return whom it guards, if anybody."""
    replica = paceline.replica(model)
    if replica.size == 1:
        return None
    guard.remove(replica.reducer)
    return replica.reducer


def best_of(times: Mapping[str, float], prefix: str = "torch") -> str:
    """Name the fastest of some variants, after the fact."""
    return min((name for name in times if name.startswith(prefix)), key=times.__getitem__)
