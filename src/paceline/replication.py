"""``replicate()``: the engine attached to a module, in place.

The module keeps its class, its keys and its forward: it is the parameters that are watched, so every way of
computing with them is covered. Nothing of ours is stored in the module, so copies and pickles of it are
plain.
"""

import atexit
import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.agreement import agree_to_start, or_refuse, traits_of
from paceline.buffer_policies import Policy
from paceline.buffers import BufferSync, finish_broadcast, start_broadcast
from paceline.comm import Comm, GroupComm, comm_over, group_of_mesh
from paceline.control import control_over
from paceline.errors import name_some
from paceline.explain import Facts, explain
from paceline.fused_optim import Per, StepInBackward, norm_gate
from paceline.guard import guard as the_guard
from paceline.hooks import Hook, StatefulHook, average, name_of
from paceline.module_hooks import around_forward
from paceline.plan import Plan, plan_buckets
from paceline.precision import LowPrecision, Precision
from paceline.quiet import wait_for_workers
from paceline.recorder import check_rate
from paceline.reducer import Reducer, bind, spec_of
from paceline.settings import (
    Settings,
    caps_of,
    check_beside_optimizer,
    check_hook,
    check_model,
    check_names,
    policies_from,
    reducing_in,
    watched_in,
    wishes_for,
)
from paceline.stats import Stats
from paceline.torch_private import backend_of, engine_watch
from paceline.wiring import Consumer, Joining, Unused, Wiring

EXIT_SECONDS = 2.0

M = TypeVar("M", bound=nn.Module)


class Replica:
    """The handle of a replicated module.

    Making one is a collective, except from the ``original`` of a copied module: what that one's ranks agreed
    on holds for the copy.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        settings: Settings,
        original: "Replica | None" = None,
        replaces: "Replica | None" = None,
    ) -> None:
        if original is None:
            _agree_and_take_state(module, comm, settings, replaces)
            _rest_at_exit()
        watched = watched_in(module, settings.left_out)
        if original is None:
            _agree_on_hook(settings.hook, watched, comm)
        else:
            bind(settings.hook, watched, comm)
        if replaces is not None:
            replaces.detach()
        self._low_precision: LowPrecision | None = None
        if settings.precision is not None:
            self._low_precision = LowPrecision(module, settings.precision, settings.left_out)
        control = control_over(comm)
        self.name = control.new_name() if original is None else original._name_of_copy()
        self._copies = 0
        wishes = wishes_for(module, watched, settings)
        self.comm = comm
        self.settings = settings
        self._module = weakref.ref(module)
        self._key = id(module)
        self._watched = watched
        self.wrapper: weakref.ref[Any] | None = None  # what explains itself beside the module
        specs = [spec_of(name, p) for name, p in watched]
        trained = [index for index, (_, p) in enumerate(watched) if p.requires_grad]
        self.first_plan = plan_buckets(specs, settings.caps, order=trained[::-1], wishes=wishes)
        self.buffers = BufferSync(module, comm, settings.buffers, settings.left_out)
        if original is None and settings.take_state:
            self.buffers.note_equal()
        self._make_reducer = functools.partial(Reducer, watched, caps=settings.caps, wishes=wishes)
        self.reducer: Reducer | None = None
        if watched and not comm.is_solo:
            self.reducer = self._make_reducer(wiring=_wiring(self.name, comm, settings, self.buffers))
        self._guard()
        self.is_joining = False
        self._forward_handles = self._watch_forward(module)
        _replicas[self._key] = self
        weakref.finalize(module, self.detach).atexit = False

    def _guard(self) -> None:
        if self.reducer and self.settings.guard and self.size > 1:
            the_guard.add(self.reducer)

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
        return self.reducer.plan if self.reducer else self.first_plan

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

    # ---- what is done with the gradients ---------------------------------------------------------

    @property
    def hook(self) -> Hook:
        """What is done with a bucket on its way. Its ``state_dict()``, if it has one, is this rank's."""
        return self.reducer.hook if self.reducer else self.settings.hook

    def set_hook(self, hook: Hook) -> None:
        """Take another hook, between two steps and at the same point on every rank."""
        check_hook(hook)
        module = self._module()
        assert module is not None
        hook = reducing_in(self.settings.precision, hook, module)
        if self.reducer is None:
            self.settings = dataclasses.replace(self.settings, hook=hook)
            return
        if self.reducer.wiring.consumer is not None:
            check_beside_optimizer(hook, self.settings.unused)
        self.reducer.set_hook(hook)

    def step_in_backward(
        self, optimizer: torch.optim.Optimizer, *, per: Per = "bucket", max_norm: float | None = None
    ) -> None:
        """Step each bucket, or each parameter, as soon as it is reduced, and free its gradient.

        Call it between two steps, on every rank. ``optimizer.step()`` finds nothing left to do afterwards;
        ``optimizer`` keeps the state and the settings, so schedulers and checkpoints work as before.
        """
        if max_norm is not None:
            raise ValueError(
                f"max_norm={max_norm}: clipping by norm needs all gradients at once, but inside backward "
                "each bucket is stepped and freed by itself. Step after backward(), or clip by value in "
                "the loss"
            )
        self.set_consumer(StepInBackward(optimizer, per))

    def set_consumer(self, consumer: Consumer | None) -> None:
        """Let somebody have each bucket as soon as it is reduced."""
        check_beside_optimizer(self.hook, self.settings.unused)
        if self.reducer is None:  # a process alone: so that backward() steps here as it does on many
            self.reducer = self._make_reducer(
                wiring=_wiring(self.name, self.comm, self.settings, self.buffers)
            )
        if self.reducer.wiring.consumer is not None and consumer is not None:
            raise ValueError("an optimizer steps inside this model's backward already; there can be one")
        self.reducer.set_consumer(consumer)
        norm_gate.add(self.reducer)

    def change_group(self, group: Any) -> None:
        """Work with the ranks of another group from now on: each of them calls this, nothing is copied."""
        module = self._module()
        assert module is not None
        if self.reducer is not None:
            self.reducer.check_may_change("the group")
        comm = comm_for(group, None)
        agree_to_start(comm, lambda: None, lambda: [*traits_of(module, self.settings.own(module))])
        step = max(int(frame) for frame in comm.gather_bytes(b"%d" % self.step))
        self.comm = comm
        self.name = control_over(comm).new_name()
        self.buffers = BufferSync(module, comm, self.settings.buffers, self.settings.left_out)
        wiring = _wiring(self.name, comm, dataclasses.replace(self.settings, hook=self.hook), self.buffers)
        if self.reducer is not None:
            self.reducer.rewire(dataclasses.replace(wiring, consumer=self.reducer.wiring.consumer), step)
        elif self._watched and not comm.is_solo:
            self.reducer = self._make_reducer(wiring=wiring)
        self._guard()
        for handle in self._forward_handles:
            handle.remove()
        self._forward_handles = self._watch_forward(module)

    # ---- ranks that run out of batches -----------------------------------------------------------

    @contextmanager
    def joining(self, how: Joining) -> Iterator[None]:
        """Let ranks run out of batches inside."""
        self.enter_join()
        if self.reducer is not None:
            self.reducer.set_joining(how)
        try:
            yield
        finally:
            self.leave_join()

    def enter_join(self) -> None:
        """Begin a block in which ranks may run out of batches."""
        if self.is_joining:
            raise RuntimeError("join() inside join(): end the outer block first")
        if self.reducer is not None:
            self.reducer.check_may_join()
        self.is_joining = True

    def leave_join(self) -> None:
        """End it, however it ends."""
        self.is_joining = False
        if self.reducer is not None:
            self.reducer.set_joining(None)

    def keep_company(self) -> Sequence[int]:
        """Take part in the others' next backward with nothing to add; return who still has batches."""
        return self.reducer.keep_company() if self.reducer else ()

    @property
    def last_active(self) -> Sequence[int]:
        """The ranks that had a batch in the last backward."""
        return self.reducer.last_active if self.reducer else (0,)

    def open_failure(self, error: BaseException) -> None:
        """Say that this rank's loop has ended with an exception, without waiting for anybody."""
        if self.reducer:
            self.reducer.open_failure(error)

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know that this rank's loop has ended with an exception."""
        if self.reducer:
            self.reducer.tell_failure(error)

    def take_state(self, source: int) -> None:
        """Take one rank's parameters, and those buffers that are kept equal while the module is trained.

        Every rank calls this at the same point.
        """
        self.take_parameters(source)
        if self.size > 1:
            self.buffers.sync(self._tell, source, only=self.buffers.kept)

    def take_parameters(self, source: int) -> None:
        """Take one rank's parameters. Every rank calls this at the same point."""
        module, left_out = self._module(), self.settings.left_out
        if module is not None and self.size > 1:
            parameters = [p.detach() for name, p in module.named_parameters() if name not in left_out]
            finish_broadcast(start_broadcast(parameters, self.comm, source))

    # ---- buffers ---------------------------------------------------------------------------------

    def sync_buffers(self, source: int = 0, *, in_passing: bool = False) -> None:
        """Make the buffers equal to one rank's now, except those that are each rank's own from the beginning.

        Every rank calls this at the same point, for instance before one of them saves the module.
        ``in_passing`` never makes a GPU wait, and so sends what has not changed, too.
        """
        if self.size > 1:
            self.buffers.sync(self._tell, source, in_passing=in_passing)

    def _watch_forward(self, module: nn.Module) -> list[Any]:
        policies = self.buffers.policies.values()
        before, after = (
            functools.partial(self._on_forward, when) if when in policies and self.size > 1 else None
            for when in ("before_forward", "after_forward")
        )
        return around_forward(module, before, after)

    def _on_forward(self, when: Policy) -> None:
        """Make the buffers equal that are due. Called by a hook of the module, around its forward.

        Not in evaluation, which one rank may do alone; not where ranks may run different numbers of forwards;
        and not where a backward computes a forward again.
        """
        module = self._module()
        if module is None or not module.training or engine_watch.inside():
            return
        if self.reducer is None or (self.reducer.wants_sync and self.reducer.wiring.joining is None):
            self.buffers.sync(self._tell, only={when}, in_passing=True)

    def _tell(self, frame: bytes) -> Sequence[bytes]:
        """Tell every rank something about the buffers, and hear what every rank tells."""
        if self.reducer is not None:
            return self.reducer.exchange(b"buffers", frame)
        control, topic = control_over(self.comm), self.name + b".buffers"
        control.post(topic, frame)
        return control.collect(topic, self.comm.seconds)

    def detach(self) -> nn.Module | None:
        """Take everything off again. The module stays as it is, a plain module from now on."""
        if _replicas.get(self._key) is self:
            del _replicas[self._key]
        if self._low_precision is not None:
            self._low_precision.remove()
            self._low_precision = None
        while self._forward_handles:
            self._forward_handles.pop().remove()
        if self.reducer is not None:
            the_guard.remove(self.reducer)
            self.reducer.close()
            self.reducer = None
        return self._module()

    # ---- figures ---------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return what the last step cost, and means over the last hundred that were timed."""
        if self.reducer is not None:
            return self.reducer.stats()
        sizes = tuple(bucket.nbytes for bucket in self.plan.buckets)
        return Stats(self.rank, self.size, bucket_nbytes=sizes, hook=name_of(self.hook))

    def sample_stats(self, *, every: int) -> None:
        """Time the first ten steps and then every n-th. Without this: all on a CPU, every 100th on a GPU."""
        check_rate(every)
        if self.reducer is not None:
            self.reducer.recorder.sample(every)

    def explain(self) -> str:
        """Describe what is done here, and how, in a table to be printed."""
        return explain(_facts(self))

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
    buffers: Policy | Mapping[str, Policy] | None = None,
    broadcast_buffers: bool | None = None,
    guard: bool = True,
    hook: Hook = average,
    left_out: Collection[str] = (),
    delayed: Collection[str] = (),
    precision: Precision | None = None,
) -> M:
    """Make every rank's copy of ``module`` train as one, and return the same module.

    A collective: every rank of the group calls it with the same model. Parameters and buffers start as rank
    0's.

    ``group`` is a process group (default: all ranks; one process alone if there is no group), ``mesh`` a
    one-dimensional device mesh in its place. Gradients travel in buckets of ``bucket_mb`` MiB, the first
    one of ``first_bucket_mb`` (default 1) so that communication starts early; ``bucket_mb`` may also be a
    list of sizes, the last one for all the rest. ``unused="error"`` raises in a backward that leaves a
    trainable parameter without a gradient on some rank. ``buffers`` says when buffers are made equal, for all
    or by patterns of their names (docs/buffers.md): by default rank 0's are taken after each reduced
    backward; ``broadcast_buffers=False`` is short for ``buffers="start"``. ``guard=False`` takes away the
    gate before ``optimizer.step()``. ``hook`` says what is done with a bucket on its way (see
    paceline.hooks). ``left_out`` names parameters and buffers that are each rank's own, ``delayed``
    parameters that are reduced last, in one bucket. ``precision`` has the module compute, and reduce, in
    other dtypes than its parameters'.
    """

    def read() -> Settings:
        if not isinstance(module, nn.Module):
            raise TypeError(f"replicate() takes a torch.nn.Module, got {type(module).__name__}")
        if unused not in ("allow", "error"):
            raise ValueError(f'unused has to be "allow" or "error", got {unused!r}')
        check_hook(hook)
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(f"precision has to be a paceline.Precision, got {type(precision).__name__}")
        check_names(module, "left_out", left_out, [*module.named_parameters(), *module.named_buffers()])
        check_names(module, "delayed", delayed, [*module.named_parameters()])
        return Settings(
            caps_of(bucket_mb, first_bucket_mb),
            unused,
            reducing_in(precision, hook, module),
            guard,
            buffers=policies_from(buffers, broadcast_buffers),
            left_out=frozenset(left_out),
            delayed=frozenset(delayed),
            precision=precision,
        )

    comm = comm_for(group, mesh)
    Replica(module, comm, or_refuse(comm, read))
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


def _agree_and_take_state(
    module: nn.Module, comm: Comm, settings: Settings, replaces: Replica | None
) -> None:
    agree_to_start(
        comm,
        lambda: _check(module, settings, replaces),
        lambda: [*traits_of(module, settings.own(module)), *settings.traits()],
    )
    if settings.take_state and comm.size > 1:
        finish_broadcast(start_broadcast(_state(module, settings.own(module)), comm))


def _agree_on_hook(hook: Hook, watched: Sequence[tuple[str, nn.Parameter]], comm: Comm) -> None:
    """Let the hook get to know the parameters. One that cannot, on one rank, makes all ranks raise."""
    if isinstance(hook, StatefulHook):
        agree_to_start(comm, lambda: bind(hook, watched, comm), lambda: [])


@functools.cache
def _rest_at_exit() -> None:
    atexit.register(wait_for_workers, EXIT_SECONDS)


def _wiring(name: bytes, comm: Comm, settings: Settings, buffers: BufferSync) -> Wiring:
    return Wiring(
        name,
        comm,
        control_over(comm),
        settings.hook,
        settings.unused,
        None if comm.size == 1 else buffers,
        settings.skip_unused,
    )


def _facts(replica: Replica) -> Facts:
    """Collect what there is to say about a replica."""
    settings, plan, reducer = replica.settings, replica.plan, replica.reducer
    module = replica._module()
    wrapper = None if replica.wrapper is None else replica.wrapper()
    return Facts(
        type(module).__name__,
        replica.rank,
        replica.size,
        plan,
        backend=backend_name(replica),
        seconds=replica.comm.seconds,
        step=replica.step,
        left_out=sorted(settings.left_out),
        is_plan_learned=reducer is not None and reducer.is_plan_learned,
        plan_changes=reducer.recorder.plan_changes if reducer else 0,
        hook=name_of(replica.hook),
        unused=settings.unused,
        skip_unused=settings.skip_unused,
        guard=settings.guard,
        buffers=[] if module is None else _buffer_facts(module, settings),
        precision=settings.precision,
        consumer=reducer.wiring.consumer if reducer else None,
        joining=reducer.wiring.joining if reducer else None,
        rows={} if wrapper is None else wrapper.rows_to_explain(),
    )


def _buffer_facts(module: nn.Module, settings: Settings) -> list[tuple[Policy, int]]:
    """Return the policy and the size of each buffer."""
    own = settings.own(module)
    return [
        ("never" if name in own else settings.buffers.of_buffer(name), buffer.nbytes)
        for name, buffer in module.named_buffers()
    ]


def backend_name(replica: Replica) -> str:
    """Name what a replica's gradients travel over; nothing for a process alone."""
    comm, kinds = replica.comm, sorted({spec.device.type for spec in replica.plan.specs})
    found = [backend_of(comm.group, kind) for kind in kinds] if isinstance(comm, GroupComm) else []
    return ", ".join(backend for backend in found if backend)


def _check(module: nn.Module, settings: Settings, replaces: Replica | None) -> None:
    check_model(module, settings)
    _check_overlap(module, {key: other for key, other in _replicas.items() if other is not replaces})


def _check_overlap(module: nn.Module, replicas: Mapping[int, Replica]) -> None:
    kind = type(module).__name__
    if id(module) in replicas:
        raise ValueError(
            f"this {kind} is replicated already; use paceline.replica(module), or detach() it first"
        )
    inside = [name for name, part in module.named_modules() if id(part) in replicas]
    if inside:
        raise ValueError(
            f"{kind} holds parts that are replicated already: {name_some(inside)}; detach() them first"
        )
    owned = {id(p) for other in replicas.values() for p in other.parameters()}
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
