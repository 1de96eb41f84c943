"""``replicate()``: the engine attached to a module, in place.

The module keeps its class, its keys and its forward: it is the parameters that are watched, so every way of
computing with them is covered. Nothing of ours is stored in the module, so copies and pickles of it are
plain.
"""

import atexit
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.agreement import agree_to_start, traits_of
from paceline.backward import Unused, Wiring
from paceline.buffers import BufferSync, finish_broadcast, start_broadcast
from paceline.comm import Comm, comm_over, group_of_mesh
from paceline.control import control_over
from paceline.errors import name_some
from paceline.guard import guard as the_guard
from paceline.hooks import Hook, average
from paceline.plan import Caps, Plan, plan_buckets
from paceline.quiet import wait_for_workers
from paceline.reducer import Reducer, spec_of

EXIT_SECONDS = 2.0

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Settings:
    """How a module is replicated."""

    caps: Caps = field(default_factory=Caps)
    unused: Unused = "allow"
    hook: Hook = average
    guard: bool = True
    take_state: bool = True  # start from rank 0's parameters and buffers
    buffers_after_backward: bool = True  # take rank 0's buffers at the end of each reduced backward
    left_out: frozenset[str] = frozenset()  # parameters and buffers that are each rank's own

    def traits(self) -> list[tuple[str, str]]:
        """Write down what has to be the same on every rank. Bucket sizes show in the plan."""
        hook = getattr(self.hook, "__qualname__", type(self.hook).__qualname__)
        return [
            ("the setting unused", repr(self.unused)),
            ("the setting broadcast_buffers", str(self.buffers_after_backward)),
            ("the setting hook", hook),
            ("the setting init_sync", str(self.take_state)),
        ]


class Replica:
    """The handle of a replicated module.

    Making one is a collective, except from the ``original`` of a copied module: what that one's ranks agreed
    on holds for the copy.
    """

    def __init__(
        self, module: nn.Module, comm: Comm, settings: Settings, original: "Replica | None" = None
    ) -> None:
        if original is None:
            _agree_and_take_state(module, comm, settings)
            _rest_at_exit()
        control = control_over(comm)
        self.name = control.new_name() if original is None else original._name_of_copy()
        self._copies = 0
        watched = _watched(module, settings.left_out)
        self.comm = comm
        self.settings = settings
        self._module = weakref.ref(module)
        self._key = id(module)
        self._first_plan = plan_buckets([spec_of(name, p) for name, p in watched], settings.caps)
        wiring = Wiring(
            self.name, comm, control, settings.hook, settings.unused, _buffers(module, comm, settings)
        )
        self.reducer = None if comm.is_solo or not watched else Reducer(watched, wiring, settings.caps)
        if self.reducer and settings.guard and comm.size > 1:
            the_guard.add(self.reducer)
        _replicas[self._key] = self
        weakref.finalize(module, self.detach).atexit = False

    def _name_of_copy(self) -> bytes:
        self._copies += 1
        return self.name + b"/%d" % self._copies

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many ranks hold this module."""
        return self.comm.size

    @property
    def plan(self) -> Plan:
        """The buckets that gradients travel in."""
        return self.reducer.plan if self.reducer else self._first_plan

    @property
    def step(self) -> int:
        """How many reduced backwards have been run."""
        return self.reducer.step if self.reducer else 0

    def no_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Keep the gradients of the backwards inside local; the next backward outside reduces their sum."""
        return self.reducer.no_sync(enabled=enabled) if self.reducer else _nothing()

    def accumulate(self, micro_batches: int) -> AbstractContextManager[None]:
        """Reduce once for several backwards: in the last of ``micro_batches``, or when the block ends early.

        Ranks may run different numbers of backwards inside. Losses are not rescaled: divide by the number
        yourself.
        """
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(f"micro_batches has to be a positive number, got {micro_batches!r}")
        return self.reducer.accumulate(micro_batches) if self.reducer else _nothing()

    def detach(self) -> nn.Module | None:
        """Take everything off again. The module stays as it is, a plain module from now on."""
        if _replicas.get(self._key) is self:
            del _replicas[self._key]
        if self.reducer is not None:
            the_guard.remove(self.reducer)
            self.reducer.close()
            self.reducer = None
        return self._module()

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that are watched."""
        return self.reducer.parameters if self.reducer else ()


# Which modules are replicated. It is kept here, by identity, because what is stored in a module would
# travel with its copies and pickles; an entry ends with its module.
_replicas: dict[int, Replica] = {}


def replicate(
    module: M,
    *,
    group: Any = None,
    mesh: Any = None,
    bucket_mb: float | Sequence[float] = 25,
    first_bucket_mb: float | None = None,
    unused: Unused = "allow",
    broadcast_buffers: bool = True,
    guard: bool = True,
    hook: Hook = average,
) -> M:
    """Make every rank's copy of ``module`` train as one, and return the same module.

    A collective: every rank of the group calls it with the same model. Parameters and buffers start as rank
    0's.

    ``group`` is a process group (default: all ranks; one process alone if there is no group), ``mesh`` a
    one-dimensional device mesh in its place. Gradients travel in buckets of ``bucket_mb`` MiB, the first
    one of ``first_bucket_mb`` (default 1) so that communication starts early; ``bucket_mb`` may also be a
    list of sizes, the last one for all the rest. ``unused="error"`` raises in a backward that leaves a
    trainable parameter without a gradient on some rank. ``broadcast_buffers`` takes rank 0's buffers after
    each reduced backward. ``guard=False`` takes away the gate before ``optimizer.step()``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"replicate() takes a torch.nn.Module, got {type(module).__name__}")
    if unused not in ("allow", "error"):
        raise ValueError(f'unused has to be "allow" or "error", got {unused!r}')
    if not callable(hook):
        raise TypeError(f"hook has to be a function of (bucket, comm), got {type(hook).__name__}")
    settings = Settings(
        _caps(bucket_mb, first_bucket_mb), unused, hook, guard, buffers_after_backward=broadcast_buffers
    )
    Replica(module, comm_for(group, mesh), settings)
    return module


def replica(module: nn.Module) -> Replica:
    """Return the handle of a replicated module, or of the module inside a DistributedDataParallel."""
    found = _replicas.get(id(module)) or _replicas.get(id(getattr(module, "module", None)))
    if found is None:
        raise ValueError(
            f"this {type(module).__name__} is not replicated; call paceline.replicate(module) first"
        )
    return found


def no_sync(module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Keep the gradients of the backwards inside local to this rank. See Replica.no_sync."""
    return replica(module).no_sync(enabled)


def accumulate(module: nn.Module, micro_batches: int) -> AbstractContextManager[None]:
    """Reduce once for several backwards. See Replica.accumulate."""
    return replica(module).accumulate(micro_batches)


def comm_for(group: Any, mesh: Any) -> Comm:
    """Choose the comm from a group or a one-dimensional mesh, but not both."""
    if group is not None and mesh is not None:
        raise ValueError("give a process group or a device mesh, not both")
    return comm_over(group if mesh is None else group_of_mesh(mesh))


def _caps(bucket_mb: float | Sequence[float], first: float | None) -> Caps:
    if isinstance(bucket_mb, int | float):
        return Caps.of_mib([min(1, bucket_mb) if first is None else first, bucket_mb])
    return Caps.of_mib(bucket_mb if first is None else [first, *bucket_mb])


def _agree_and_take_state(module: nn.Module, comm: Comm, settings: Settings) -> None:
    agree_to_start(
        comm,
        lambda: _check(module),
        lambda: [*traits_of(module, settings.left_out), *settings.traits()],
    )
    if settings.take_state and comm.size > 1:
        finish_broadcast(start_broadcast(_state(module, settings.left_out), comm))


@functools.cache
def _rest_at_exit() -> None:
    atexit.register(wait_for_workers, EXIT_SECONDS)


def _buffers(module: nn.Module, comm: Comm, settings: Settings) -> BufferSync | None:
    """Return what keeps the buffers equal, if there is anything to keep."""
    if comm.size == 1 or not settings.buffers_after_backward:
        return None
    buffers = BufferSync(module, comm, settings.left_out)
    return None if buffers.is_empty() else buffers


def _watched(module: nn.Module, left_out: frozenset[str]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that can have a gradient, the frozen ones included."""
    return [
        (name, p)
        for name, p in module.named_parameters()
        if name not in left_out and (p.is_floating_point() or p.is_complex()) and not p.is_inference()
    ]


def _check(module: nn.Module) -> None:
    """Refuse what cannot be replicated, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, t in tensors if isinstance(t, UninitializedParameter | UninitializedBuffer)]
    if lazy:
        raise ValueError(f"{name_some(lazy)} have no shape yet; run one forward through the model first")
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{name_some(meta)} are on the meta device and hold no numbers; materialise the model first"
        )
    folded = [name for name, tensor in tensors if _is_folded(tensor)]
    if folded:
        raise ValueError(f"{name_some(folded)} use the same memory for several elements; clone() them first")
    _check_overlap(module)


def _is_folded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor was expanded, so that its elements cannot be written one by one."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _check_overlap(module: nn.Module) -> None:
    kind = type(module).__name__
    if id(module) in _replicas:
        raise ValueError(
            f"this {kind} is replicated already; use paceline.replica(module), or detach() it first"
        )
    inside = [name for name, part in module.named_modules() if id(part) in _replicas]
    if inside:
        raise ValueError(
            f"{kind} holds parts that are replicated already: {name_some(inside)}; detach() them first"
        )
    owned = {id(p) for other in _replicas.values() for p in other.parameters()}
    shared = [name for name, parameter in module.named_parameters() if id(parameter) in owned]
    if shared:
        raise ValueError(
            f"{kind} shares parameters with a module that is replicated already: {name_some(shared)}. "
            "Replicate the outer module only, or detach() the other one first"
        )


def _state(module: nn.Module, left_out: frozenset[str]) -> list[torch.Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return [tensor.detach() for name, tensor in named if name not in left_out]


@contextmanager
def _nothing() -> Iterator[None]:
    yield
