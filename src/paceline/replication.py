"""``replicate()``: the engine attached to a module, in place.

The module keeps its class, its keys and its forward: it is the parameters that are watched, so every way of
computing with them is covered. Nothing of ours is stored in the module, so copies and pickles of it are
plain.
"""

import atexit
import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from paceline import auditing, finite
from paceline.activity import trainer
from paceline.agreement import agree_to_start, or_refuse, traits_of
from paceline.buffer_policies import Policy
from paceline.buffers import BufferSync, finish_broadcast, names_of, start_broadcast
from paceline.comm import Comm, GroupComm, comm_over, group_of_mesh
from paceline.control import Control, control_over
from paceline.errors import name_some
from paceline.explain import Facts, explain
from paceline.fused_optim import Per, StepInBackward, norm_gate
from paceline.guard import guard as the_guard
from paceline.hooks import Hook, StatefulHook, average, name_of, way_of
from paceline.loaders import SameBatch
from paceline.module_hooks import around_forward, watch_forward
from paceline.norms import clip_grad_norm, grad_norm
from paceline.plan import Plan, plan_buckets
from paceline.precision import LowPrecision, Precision
from paceline.preflight import preflight
from paceline.quiet import wait_for_workers
from paceline.recorder import check_rate
from paceline.reducer import Reducer, bind, spec_of
from paceline.reporter import reporter
from paceline.riders import Rider
from paceline.settings import (
    Settings,
    caps_of,
    check_beside_optimizer,
    check_deterministic,
    check_hook,
    check_model,
    check_names,
    hook_for,
    policies_from,
    read_seconds,
    read_timeout,
    reducing_in,
    sparse_in,
    watched_in,
    wishes_for,
)
from paceline.stats import Stats
from paceline.torch_private import backend_of, engine_watch, module_watch, watch_loaders
from paceline.waiting import STALL_SECONDS
from paceline.weights import read_weight
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
        trainer.prepares()
        comm.set_patience(settings.timeout_seconds, settings.stall_seconds)
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
        self._model = type(module).__name__
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
        self._schedule: auditing.Schedule | None = None
        if watched and (settings.deterministic or settings.check_finite or not comm.is_solo):
            wiring = _wiring(self.name, comm, settings, self.buffers, self._model)
            self.reducer = self._make_reducer(wiring=wiring)
            self._renew_checks()
        self._guard()
        self.is_joining = False
        self._changes = module_watch.changes
        self._buffer_names = names_of(module)
        if self.reducer is not None:
            self.reducer.look_again = self._look_again
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
        reducer = self._reducer_even_alone()
        return reducer.no_sync(enabled=enabled) if reducer else _nothing()

    def accumulate(self, micro_batches: int) -> AbstractContextManager[None]:
        """Reduce once for several backwards: in the last of ``micro_batches``, or when the block ends early.

        Ranks may run different numbers of backwards inside. Losses are not rescaled: divide by the number
        yourself.
        """
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(f"micro_batches has to be a positive number, got {micro_batches!r}")
        reducer = self._reducer_even_alone()
        return reducer.accumulate(micro_batches) if reducer else _nothing()

    @contextmanager
    def weight(self, samples: float) -> Iterator[None]:
        """Let the backwards inside stand for this many samples or tokens: the mean is sum(w g) / sum(w).

        Every rank uses it, or none; a weight of 0 leaves this rank's gradients out, whatever they are.
        """
        reducer = self._reducer_even_alone()
        if reducer is None:
            yield
            return
        try:
            if way_of(self.hook) != "mean":
                raise ValueError(
                    f"weight() needs a mean over the ranks, but the hook {name_of(self.hook)} takes none; "
                    "scale the loss yourself, or use another hook"
                )
            weight = read_weight(samples)
        except (TypeError, ValueError) as error:
            reducer.tell_failure(error)
            raise
        with reducer.weight(weight):
            yield

    def skip(self) -> None:
        """Leave this rank's batch out, in place of its backward; the others' gradients come here as well.

        So step the optimizer after it as after a backward.
        """
        reducer = self._reducer_even_alone()
        if reducer is not None:
            reducer.skip()

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Say what this rank does inside, such as "evaluating", and stop the clock for those who wait for it.

        Without it they raise PeerTimeout when their time is over. This rank alone calls it.
        """
        if not isinstance(what, str) or not what.strip():
            raise TypeError(f"busy() takes a few words that say what this rank does, got {what!r}")
        return reporter.busy(what) if self.size > 1 else _nothing()

    def batch(self) -> AbstractContextManager[None]:
        """Put this around what is done with one batch, up to its backward: exactly that is checked.

        If it raises before its backward was reduced, the others raise PeerFailed; if it ends without a
        reduced backward or a skip(), all ranks raise.
        """
        return self.reducer.batch() if self.reducer else _nothing()

    def _reducer_even_alone(self) -> Reducer | None:
        """Return the reducer; a process alone gets one, so that it does what it does among many."""
        if self.reducer is None and self._watched:
            self.reducer = self._make_reducer(
                wiring=_wiring(self.name, self.comm, self.settings, self.buffers, self._model)
            )
            self._renew_checks()
        return self.reducer

    # ---- what the ranks compare ------------------------------------------------------------------

    def check_finite(self, check: bool | finite.Mode = True) -> None:
        """Look for NaN and Inf in each rank's gradients from now on, as ``replicate(check_finite=...)`` does.

        Between two steps, at the same point on every rank. False switches it off.
        """
        mode = finite.read_mode(check)
        if self.reducer is not None and self.reducer.wiring.consumer is not None:
            finite.refuse_beside_optimizer(mode)
        self.settings = dataclasses.replace(self.settings, check_finite=mode)
        if self._reducer_even_alone() is not None:
            self._renew_checks()

    def audit(self, every: int | None = 50, heal: bool = False) -> None:
        """Compare all parameters and their optimizer state between the ranks, in every n-th reduced step.

        All ranks raise RanksDisagree if something differs, or ``heal`` it from the majority, if there is one.
        Between two steps, at the same point on every rank. ``every=0`` switches it off.
        """
        schedule = auditing.read_schedule(every, heal)
        if schedule is not None:
            auditing.refuse_hook(self.hook)
        if self.reducer is not None and self.reducer.wiring.consumer is not None:
            auditing.refuse_beside_optimizer(schedule)
        self._schedule = schedule
        self._renew_checks()

    def _renew_checks(self) -> None:
        """Take along the checks that are asked for now, and no others."""
        reducer = self.reducer
        if reducer is None:
            return
        riders = [r for r in reducer.wiring.riders if not isinstance(r, finite.FiniteCheck | auditing.Audit)]
        if self.settings.check_finite is not None:
            tell = functools.partial(reducer.exchange, b"finite")
            riders.append(finite.FiniteCheck(self.settings.check_finite, tell))
        if self._schedule is not None:
            riders.append(auditing.Audit(self._schedule, reducer))
        reducer.set_riders(riders)

    # ---- the norm of the gradients ---------------------------------------------------------------

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all reduced gradients as one vector; parameters that are left out do not count.

        On a GPU nothing waits for it.
        """
        return grad_norm(self._named(), self.reducer, norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the reduced gradients so that their norm is at most ``max_norm``; return what it was.

        It does what ``torch.nn.utils.clip_grad_norm_`` does, with a few operators for each bucket in place of
        some for each parameter. All ranks have the same gradients, so nothing is sent.
        """
        return clip_grad_norm(self._named(), self.reducer, max_norm, norm_type, error_if_nonfinite)

    def _named(self) -> Sequence[tuple[str, torch.Tensor]]:
        return list(self.reducer.named()) if self.reducer else self._watched

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
        if self.settings.deterministic:
            check_deterministic(hook)
        if self._schedule is not None:
            auditing.refuse_hook(hook)
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
        finite.refuse_beside_optimizer(self.settings.check_finite)
        auditing.refuse_beside_optimizer(self._schedule)
        if self.settings.deterministic:
            raise ValueError(
                "deterministic=True and an optimizer inside backward exclude each other: sums in a fixed "
                "order are complete when backward has ended. Step after backward()"
            )
        reducer = self._reducer_even_alone()
        if reducer is None:
            return
        if reducer.wiring.consumer is not None and consumer is not None:
            raise ValueError("an optimizer steps inside this model's backward already; there can be one")
        reducer.set_consumer(consumer)
        norm_gate.add(reducer)

    def change_group(self, group: Any) -> None:
        """Work with the ranks of another group from now on: each of them calls this, nothing is copied."""
        module = self._module()
        assert module is not None
        if self.reducer is not None:
            self.reducer.check_may_change("the group")
        comm = comm_for(group, None, module)
        agree_to_start(comm, lambda: None, lambda: [*traits_of(module, self.settings.own(module))])
        comm.set_patience(self.settings.timeout_seconds, self.settings.stall_seconds)
        step = max(int(frame) for frame in comm.gather_bytes(b"%d" % self.step))
        self.comm = comm
        self.name = control_over(comm).new_name()
        self.buffers = BufferSync(module, comm, self.settings.buffers, self.settings.left_out)
        settings = dataclasses.replace(self.settings, hook=self.hook)
        wiring = _wiring(self.name, comm, settings, self.buffers, self._model)
        if self.reducer is not None:
            kept = self.reducer.wiring
            self.reducer.rewire(dataclasses.replace(wiring, consumer=kept.consumer, riders=kept.riders), step)
        elif self._watched and not comm.is_solo:
            self.reducer = self._make_reducer(wiring=wiring)
            self._renew_checks()
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
        handles = around_forward(module, before, after)
        if self.reducer is not None and self.size > 1:
            handles += watch_forward(module, self._on_forward_begin, self._on_forward_failed)
        return handles

    def _on_forward_begin(self) -> None:
        """Notice changes of the module. Called by a hook of the module."""
        if module_watch.changes != self._changes and self._trains_here():
            self._look_again()

    def _on_forward_failed(self, error: BaseException) -> None:
        """Tell the others that no backward is going to follow. Called by a hook of the module."""
        if self.reducer is not None and self._trains_here():
            self.reducer.tell_failure(error, "in its forward")

    def _trains_here(self) -> bool:
        """Tell whether a forward that runs now is to be followed by a reduced backward."""
        module, reducer = self._module(), self.reducer
        return (
            module is not None
            and module.training
            and reducer is not None
            and reducer.wants_sync
            and torch.is_grad_enabled()
            and not engine_watch.inside()
        )

    def _look_again(self, leaves: Callable[[], set[int]] | None = None) -> None:
        """Watch the parameters that the module has now. What is new starts as rank 0's.

        With ``leaves``, of a backward, only if that is one of this module: other ranks may leave it out.
        """
        module, reducer = self._module(), self.reducer
        if module is None or reducer is None or module_watch.changes == self._changes:
            return
        changes = module_watch.changes
        watched = watched_in(module, self.settings.left_out)
        if not all(isinstance(p, nn.Parameter) and p.is_leaf for _, p in watched):
            return  # something stands in for the parameters, for this forward: the backward is going to look
        if [id(p) for _, p in watched] == [id(p) for p in reducer.parameters]:
            self._changes = changes
            return
        if leaves is not None and leaves().isdisjoint(id(p) for _, p in watched):
            return
        # Not noted before all ranks have agreed: if one of them fails, it is looked for again.
        new: list[torch.Tensor] = [
            parameter.detach()
            for parameter in reducer.rewatch(watched, wishes_for(module, watched, self.settings))
        ]
        self._changes, self._watched = changes, watched
        if self._low_precision is not None:
            self._low_precision.attach_anew(self.settings.left_out)
        before = set(self._buffer_names)
        self._buffer_names = names_of(module)
        self.buffers = BufferSync(module, self.comm, self.settings.buffers, self.settings.left_out)
        reducer.set_buffers(self.buffers)
        own = self.settings.own(module)
        new += [b for name, b in module.named_buffers() if name not in before and name not in own]
        if self.settings.take_state and new:
            finish_broadcast(start_broadcast(new, self.comm))

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


def _progress() -> str:
    """Say how far an open backward has come. Called by the thread that reports."""
    reducers = (found.reducer for found in _replicas.copy().values())
    return next((told for each in reducers if each is not None and (told := each.progress)), "")


reporter.progress = _progress


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
    reduce: Literal["mean", "sum"] = "mean",
    left_out: Collection[str] = (),
    delayed: Collection[str] = (),
    precision: Precision | None = None,
    deterministic: bool = False,
    check_finite: bool | finite.Mode = False,
    loader_check: bool = True,
    stall_seconds: float = STALL_SECONDS,
    timeout_seconds: float | None = None,
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
    paceline.hooks); ``reduce="sum"`` is for those who scale the loss themselves. ``left_out`` names
    parameters and buffers that are each rank's own, ``delayed`` parameters that are reduced last, in one
    bucket. ``precision`` has the module compute, and reduce, in other dtypes than its parameters'.
    ``deterministic=True`` sums gradients in one order: the same bits across bucket sizes, steps and numbers
    of ranks (docs/determinism.md). ``check_finite=True`` looks for NaN and Inf in each rank's gradients: all
    ranks raise NotFinite, or, with "skip", drop the step (docs/checks.md). ``loader_check=False`` lets ranks
    draw different numbers of batches from their DataLoaders for one backward.

    After ``stall_seconds`` of waiting for other ranks a line tells for whom, and what they do; after
    ``timeout_seconds`` (default: the process group's own timeout) PeerTimeout is raised.
    """

    def read() -> Settings:
        if not isinstance(module, nn.Module):
            raise TypeError(f"replicate() takes a torch.nn.Module, got {type(module).__name__}")
        if unused not in ("allow", "error"):
            raise ValueError(f'unused has to be "allow" or "error", got {unused!r}')
        hook_now = hook_for(hook, reduce)
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(f"precision has to be a paceline.Precision, got {type(precision).__name__}")
        check_names(module, "left_out", left_out, [*module.named_parameters(), *module.named_buffers()])
        check_names(module, "delayed", delayed, [*module.named_parameters()])
        if deterministic:
            check_deterministic(reducing_in(precision, hook_now, module), sparse_in(module))
        return Settings(
            caps_of(bucket_mb, first_bucket_mb),
            unused,
            reducing_in(precision, hook_now, module),
            guard,
            buffers=policies_from(buffers, broadcast_buffers),
            left_out=frozenset(left_out),
            delayed=frozenset(delayed),
            precision=precision,
            deterministic=deterministic,
            check_finite=finite.read_mode(check_finite),
            loader_check=loader_check,
            stall_seconds=read_seconds("stall_seconds", stall_seconds),
            timeout_seconds=read_timeout(timeout_seconds),
        )

    comm = comm_for(group, mesh, module)
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


def replicas_beside(control: Control) -> list[Replica]:
    """Return the handles of all modules whose comm has brought along this control plane."""
    return [found for found in _replicas.copy().values() if found.comm.own_control() is control]


def no_sync(module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Keep the gradients of the backwards inside local to this rank. See Replica.no_sync."""
    return replica(module).no_sync(enabled)


def accumulate(module: nn.Module, micro_batches: int) -> AbstractContextManager[None]:
    """Reduce once for several backwards. See Replica.accumulate."""
    return replica(module).accumulate(micro_batches)


def weight(module: nn.Module, samples: float) -> AbstractContextManager[None]:
    """Let the backwards inside stand for this many samples or tokens. See Replica.weight."""
    return replica(module).weight(samples)


def batch(module: nn.Module) -> AbstractContextManager[None]:
    """Hold this rank to one reduced backward inside. See Replica.batch."""
    return replica(module).batch()


def skip(module: nn.Module) -> None:
    """Leave this rank's batch out. See Replica.skip."""
    replica(module).skip()


def audit(module: nn.Module, every: int | None = 50, heal: bool = False) -> None:
    """Compare parameters and optimizer state between the ranks. See Replica.audit."""
    replica(module).audit(every, heal)


def busy(module: nn.Module, what: str) -> AbstractContextManager[None]:
    """Say what this rank does inside, and stop the clock for the others. See Replica.busy."""
    return replica(module).busy(what)


def comm_for(group: Any, mesh: Any, module: object) -> Comm:
    """Choose the comm from a group or a one-dimensional mesh, but not both.

    The first call for a group is a collective: it is made sure that its link returns what was sent.
    """
    if group is not None and mesh is not None:
        raise ValueError("give a process group or a device mesh, not both")
    comm = comm_over(group if mesh is None else group_of_mesh(mesh))
    preflight(comm, module)
    return comm


def _agree_and_take_state(
    module: nn.Module, comm: Comm, settings: Settings, replaces: Replica | None
) -> None:
    agree_to_start(
        comm,
        lambda: _check(module, comm, settings, replaces),
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
    atexit.register(say_goodbye)
    module_watch.start()
    watch_loaders()
    _tell_of_uncaught_exceptions()


def say_goodbye(error: BaseException | None = None) -> None:
    """Tell the ranks of every replica, without waiting, that this one ends; and of which error, if any."""
    for each in list(_replicas.values()):
        if each.reducer is not None and error is None:
            each.reducer.say_goodbye()
        elif each.reducer is not None and error is not None:
            each.reducer.open_failure(error)


def _tell_of_uncaught_exceptions() -> None:
    before = sys.excepthook

    def tell(kind: Any, error: BaseException, trace: Any) -> None:
        with contextlib.suppress(Exception):
            say_goodbye(error)
        before(kind, error, trace)

    sys.excepthook = tell


def _wiring(name: bytes, comm: Comm, settings: Settings, buffers: BufferSync, model: str) -> Wiring:
    return Wiring(
        name,
        comm,
        control_over(comm),
        settings.hook,
        settings.unused,
        None if comm.size == 1 else buffers,
        settings.skip_unused,
        deterministic=settings.deterministic,
        riders=_riders(settings) if comm.size > 1 else (),
        model=model,
    )


def _riders(settings: Settings) -> list[Rider]:
    """Return what every backward takes along."""
    return [SameBatch()] if settings.loader_check else []


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
    if comm.own_control() is not None:
        return "threads"  # a rehearsal
    found = [backend_of(comm.group, kind) for kind in kinds] if isinstance(comm, GroupComm) else []
    return ", ".join(backend for backend in found if backend)


def _check(module: nn.Module, comm: Comm, settings: Settings, replaces: Replica | None) -> None:
    check_model(module, settings)
    comm.claim(module)
    # A copy: other threads may replicate meanwhile.
    _check_overlap(module, {key: other for key, other in _replicas.copy().items() if other is not replaces})


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
