"""A replica: the engine attached to a module, in place.

The module keeps its class, its keys and its forward: it is the parameters that are watched, so every way of
computing with them is covered. Nothing of ours is stored in the module, so copies and pickles of it are
plain.
"""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from paceline import auditing, finite
from paceline.across import Across, across_for
from paceline.activity import trainer
from paceline.agreement import agree_to_start, traits_of
from paceline.buffer_policies import FORWARD, Due, Policy
from paceline.buffers import BufferSync, finish_broadcast, start_broadcast
from paceline.comm import Comm, comm_over, group_of_mesh, name_of_mesh
from paceline.compile.installing import install as get_ready_to_compile
from paceline.control import control_over
from paceline.errors import name_some
from paceline.explain import explain
from paceline.facts import facts_of
from paceline.farewell import rest_at_exit
from paceline.following import Following
from paceline.fused_optim import Per, StepInBackward, norm_gate
from paceline.guard import guard as the_guard
from paceline.hooks import Hook, name_of, way_of
from paceline.interrupts import interrupts
from paceline.loaders import SameBatch
from paceline.localized import adopt
from paceline.module_hooks import around_forward, watch_forward
from paceline.norms import clip_grad_norm, grad_norm
from paceline.own_hooks import stay_out_of_scripts
from paceline.plan import Caps, Plan, plan_buckets
from paceline.planner import spec_of
from paceline.precision import LowPrecision
from paceline.preflight import preflight
from paceline.recorder import check_rate
from paceline.reducer import Reducer, bind
from paceline.registry import registry
from paceline.reporter import reporter
from paceline.riders import Rider
from paceline.settings import (
    Settings,
    check_beside_optimizer,
    check_deterministic,
    check_hook,
    reducing_in,
    watched_in,
    wishes_for,
)
from paceline.sharded import leaf_of
from paceline.sharing import Sharing, keepers_of
from paceline.starting import agree_and_take_state, agree_on_hook, gradients_of_its_own
from paceline.stats import Stats
from paceline.torch_private import agent_is_set
from paceline.trouble import Trouble, tell_all
from paceline.warming import total_of, warm_up
from paceline.watches.engine import engine_watch
from paceline.watches.loaders import watch_loaders
from paceline.watches.modules import module_watch
from paceline.weights import read_weight
from paceline.wiring import Consumer, Joining, Wiring

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
        adopt(module)
        if original is None:
            replaces = replaces or registry.ended(module)
            if keepers_of(module, settings.left_out, registry.everyone(replaces)):
                gc.collect()  # what nobody can reach any more holds nothing
            others = registry.everyone(replaces)
            agree_and_take_state(module, comm, settings, registry.modules(replaces), others)
            rest_at_exit()
            module_watch.start()
            watch_loaders()
            get_ready_to_compile()
            stay_out_of_scripts()
        self.sharing = Sharing(keepers_of(module, settings.left_out, registry.everyone(replaces)))
        watched = self.sharing.own(watched_in(module, settings.left_out))
        if original is None:
            agree_on_hook(settings.hook, watched, comm)
        else:
            bind(settings.hook, [(name, leaf_of(p)) for name, p in watched], comm)
        self.sharing.begin(self)  # before the old one goes: it may be the last that needs a keeper
        if replaces is not None:
            self.sharing.take_over(self, replaces)
            replaces._detach()
        self.low_precision: LowPrecision | None = None
        if settings.precision is not None:
            self.low_precision = LowPrecision(module, settings.precision, settings.left_out)
        control = control_over(comm)
        self.name = control.new_name() if original is None else original._name_of_copy()
        self._copies = 0
        wishes = wishes_for(module, watched, settings)
        settings = dataclasses.replace(settings, caps=settings.caps.among(is_local=control.is_local))
        self.comm = comm
        self.settings = settings
        self._module = weakref.ref(module)
        self._model = type(module).__name__
        self.watched = watched
        self.wrapper: weakref.ref[Any] | None = None  # what explains itself beside the module
        specs = [spec_of(name, leaf_of(p)) for name, p in watched]
        trained = [index for index, (_, p) in enumerate(watched) if p.requires_grad]
        self.first_plan = plan_buckets(specs, settings.caps, order=trained[::-1], wishes=wishes)
        self.due = Due(FORWARD)
        self.buffers = BufferSync(module, comm, settings.buffers, settings.left_out, self.due)
        if original is None and settings.take_state:
            self.buffers.note_equal()
        self._wishes = wishes
        self._following = Following(self, module)
        self.reducer: Reducer | None = None
        self._schedule: auditing.Schedule | None = None
        if self._is_of_use and (settings.deterministic or settings.check_finite or not comm.is_solo):
            self.reducer = self._make_reducer()
            self.reducer.set_across(self.link_across(original))
            self._renew_checks()
            if original is None:
                self._note_found(self.reducer)
        self._guard()
        self.is_joining = False
        self._forward_began_at = 0  # the step at which the last forward began
        self._forward_handles = self._watch_forward(module)
        registry.add(module, self)
        weakref.finalize(module, self.end).atexit = False

    def _guard(self) -> None:
        if self.reducer and self.settings.guard and self.size > 1:
            the_guard.add(self.reducer)

    def link_across(self, original: "Replica | None" = None) -> Across | None:
        """Link the ranks that hold other parts of the parameters, if there are any."""
        if original is None:
            return across_for(parameter for _, parameter in self.watched)
        theirs = original.reducer.wiring.across if original.reducer else None
        return theirs and theirs.for_copy(self.name.rpartition(b"/")[2])

    def _name_of_copy(self) -> bytes:
        self._copies += 1
        return self.name + b"/%d" % self._copies

    @property
    def module(self) -> nn.Module | None:
        """The replicated module, as long as it is there."""
        return self._module()

    @property
    def _is_of_use(self) -> bool:
        """Whether the module has anything that can have a gradient."""
        return bool(self.watched or self.sharing.keepers)

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
        return _all_of(reducer.around.no_sync(enabled=enabled) for reducer in self.reducers())

    def accumulate(self, micro_batches: int) -> AbstractContextManager[None]:
        """Reduce once for several backwards: in the last of ``micro_batches``, or when the block ends early.

        Ranks may run different numbers of backwards inside. Losses are not rescaled: divide by the number
        yourself.
        """
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(f"micro_batches has to be a positive number, got {micro_batches!r}")
        return _all_of(reducer.around.accumulate(micro_batches) for reducer in self.reducers())

    @contextmanager
    def weight(self, samples: float) -> Iterator[None]:
        """Let the backwards inside stand for this many samples or tokens: the mean is sum(w g) / sum(w).

        Every rank uses it, or none; a weight of 0 leaves this rank's gradients out, whatever they are.
        """
        reducers = self.reducers()
        if not reducers:
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
            tell_all((reducer.trouble for reducer in reducers), error)
            raise
        with _all_of(reducer.around.weight(weight) for reducer in reducers):
            yield

    def skip(self) -> None:
        """Leave this rank's batch out, in place of its backward; the others' gradients come here as well.

        So step the optimizer after it as after a backward.
        """
        self._refuse_shared("skip()", "Run a backward inside weight(model, 0) in its place")
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

    def warmup(
        self,
        *inputs: Any,
        forward: Callable[..., Any] | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Run a forward and a backward that leave nothing behind, so that everything is compiled afterwards.

        A collective: it returns when all ranks have done so. ``forward`` is what is called with the inputs
        (default: the replicated module; give what torch.compile() returned), ``loss`` makes a number of its
        output (default: the sum of all outputs).
        """
        module = self._module()
        assert module is not None
        with self.busy("compiling"), self.no_sync():
            run = module if forward is None else forward  # what is compiled may have a length, and no truth
            warm_up(module, self.reducer, run, total_of if loss is None else loss, inputs, kwargs)

    def batch(self) -> AbstractContextManager[None]:
        """Put this around what is done with one batch, up to its backward: exactly that is checked.

        If it raises before its backward was reduced, the others raise PeerFailed; if it ends without a
        reduced backward or a skip(), all ranks raise.
        """
        self._refuse_shared("batch()", "Leave it out")
        return self.reducer.around.batch() if self.reducer else _nothing()

    def _reducer_even_alone(self) -> Reducer | None:
        """Return the reducer; a process alone gets one, so that it does what it does among many."""
        if self.reducer is None and self._is_of_use:
            self.reducer = self._make_reducer()
            self._renew_checks()
        return self.reducer

    def _make_reducer(self) -> Reducer:
        reducer = Reducer(self.watched, self._wiring(), self.settings.caps, self._wishes)
        reducer.look_again = self._following.look_again
        return reducer

    def _note_found(self, reducer: Reducer) -> None:
        """Tell gradients that are there already, and are this rank's own. Every rank does so."""
        if self.size > 1:
            tell = functools.partial(reducer.exchange, b"gradients")
            reducer.note_found(gradients_of_its_own(reducer.leaves, tell))

    def _wiring(self) -> Wiring:
        """Return what its backwards are to work with."""
        several, settings = self.size > 1, self.settings
        return Wiring(
            self.name,
            self.comm,
            control_over(self.comm),
            settings.hook,
            settings.unused,
            self.buffers if several else None,
            settings.skip_unused,
            deterministic=settings.deterministic,
            riders=_riders(settings) if several else (),
            model=self._model,
            may_use_differ=settings.may_use_differ,
        )

    def reducers(self) -> list[Reducer]:
        """Return the reducers of all its parameters: those of its keepers, and its own."""
        found = [each._reducer_even_alone() for each in (*self.sharing.keepers, self)]
        return [reducer for reducer in found if reducer is not None]

    def reducers_in_use(self) -> list[Reducer]:
        """Return those that there are."""
        return [each.reducer for each in (*self.sharing.keepers, self) if each.reducer is not None]

    def troubles(self) -> list[Trouble]:
        """Return what deals with the exceptions of each."""
        return [reducer.trouble for reducer in self.reducers_in_use()]

    def _refuse_shared(self, what: str, advice: str) -> None:
        """Refuse what cannot be done by several replicas at once."""
        module = self._module()
        if self.sharing.keepers and module is not None:
            left = name_some([name for name, _ in self.sharing.left(module, self.settings.left_out)])
            raise ValueError(
                f"{what} is not for a {self._model} that shares parameters with a module which was "
                f"replicated before, and reduces them: {left}. {advice}"
            )

    def _refuse_entrusted(self, what: str, advice: str) -> None:
        """Refuse what those who leave parameters to this replica would not know of."""
        if self.sharing.is_needed:
            names = {leaver._model for leaver in self.sharing.leavers}
            raise ValueError(
                f"{what} is not for this {self._model}: it reduces parameters that it shares with "
                f"{name_some(sorted(names))}, which was replicated later. {advice}"
            )

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
        return grad_norm(self._named(), self.reducers_in_use(), norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the reduced gradients so that their norm is at most ``max_norm``; return what it was.

        It does what ``torch.nn.utils.clip_grad_norm_`` does, with a few operators for each bucket in place of
        some for each parameter. All ranks have the same gradients, so nothing is sent.
        """
        return clip_grad_norm(self._named(), self.reducers_in_use(), max_norm, norm_type, error_if_nonfinite)

    def _named(self) -> Sequence[tuple[str, torch.Tensor]]:
        named: list[tuple[str, torch.Tensor]] = [*(self.reducer.named() if self.reducer else self.watched)]
        module = self._module()
        if self.sharing.keepers and module is not None:
            named += self.sharing.left(module, self.settings.left_out)
        return named

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

    def set_buckets(
        self, bucket_mb: float | Sequence[float], *, first_bucket_mb: float | None = None
    ) -> None:
        """Take buckets of other sizes, between two steps and at the same point on every rank.

        Compiled code stays as it is.
        """
        caps = Caps.of_sizes(bucket_mb, first_bucket_mb)
        caps = caps.among(is_local=control_over(self.comm).is_local)
        self.settings = dataclasses.replace(self.settings, caps=caps)
        if self.reducer is not None:
            self.reducer.set_caps(caps)

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
        self._refuse_shared("An optimizer inside backward", "Step after backward()")
        self._refuse_entrusted("An optimizer inside backward", "Step after backward()")
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
        self._refuse_shared("Another group", "detach() this one first")
        self._refuse_entrusted("Another group", "detach() that one first")
        if self.reducer is not None:
            self.reducer.check_may_change("the group")
        comm = comm_for(group, None, module)
        agree_to_start(comm, lambda: None, lambda: [*traits_of(module, self.settings.own(module))])
        comm.set_patience(self.settings.timeout_seconds, self.settings.stall_seconds)
        step = max(int(frame) for frame in comm.gather_bytes(b"%d" % self.step))
        self.comm = comm
        control = control_over(comm)
        self.name = control.new_name()
        self.buffers = BufferSync(module, comm, self.settings.buffers, self.settings.left_out, self.due)
        caps = self.settings.caps.among(is_local=control.is_local)
        self.settings = dataclasses.replace(self.settings, caps=caps, hook=self.hook)
        if self.reducer is not None:
            self.reducer.set_caps(caps)
            kept = self.reducer.wiring
            wiring = dataclasses.replace(self._wiring(), consumer=kept.consumer, across=kept.across)
            self.reducer.rewire(wiring, step)
            self._renew_checks()
        elif self.watched and not comm.is_solo:
            self.reducer = self._make_reducer()
            self._renew_checks()
            self._note_found(self.reducer)
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
        self._refuse_shared("join()", "Give every rank the same number of batches")
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

    def take_state(self, source: int) -> None:
        """Take one rank's parameters, and those buffers that are kept equal while the module is trained.

        Every rank calls this at the same point.
        """
        with interrupts:
            self.copy_state(source)
            if self.reducer is not None and self.size > 1:
                self.reducer.agree_on_plan()

    def copy_state(self, source: int) -> None:
        """Take one rank's state, where all ranks have made the same backwards. Every rank calls this."""
        if self.comm.is_over:
            return
        with interrupts:
            self.take_parameters(source)
            if self.size > 1:
                self.buffers.sync(self._tell, source, only=self.buffers.kept)

    def take_parameters(self, source: int) -> None:
        """Take one rank's parameters. Every rank calls this at the same point."""
        module, left_out = self._module(), self.settings.left_out
        if module is not None and self.size > 1:
            parameters = [p.detach() for name, p in module.named_parameters() if name not in left_out]
            finish_broadcast(start_broadcast(parameters, self.comm, source))
            for reducer in self.reducers_in_use():
                # The weights are equal now, whatever was done before.
                reducer.steps.count = 0
                reducer.trouble.broken = ""

    # ---- buffers ---------------------------------------------------------------------------------

    def sync_buffers(self, source: int = 0, *, in_passing: bool = False) -> None:
        """Make the buffers equal to one rank's now, except those that are each rank's own from the beginning.

        Every rank calls this at the same point, for instance before one of them saves the module.
        ``in_passing`` never makes a GPU wait, and so sends what has not changed, too.
        """
        if self.size > 1:
            with interrupts:
                self.buffers.sync(self._tell, source, in_passing=in_passing)

    def _watch_forward(self, module: nn.Module) -> list[Any]:
        policies = self.buffers.policies.values()
        before, after = (
            functools.partial(self._on_forward, when) if when in policies and self.size > 1 else None
            for when in ("before_forward", "after_forward")
        )
        handles = around_forward(module, before, after, self.due)
        if self.reducer is not None and self.size > 1:
            handles += watch_forward(module, self._on_forward_begin, self._on_forward_failed)
        return handles

    def _on_forward_begin(self) -> None:
        """Notice changes of the module. Called by a hook of the module."""
        self._forward_began_at = self.step
        if (
            agent_is_set()
            and self.reducer is not None
            and self.reducer.gate.note_forward()
            and self.settings.guard
        ):
            the_guard.watch_remote_steps()  # if RPC was not there yet when the module was replicated
        if self._following.has_news and self._trains_here():
            self._following.look_again()

    def _on_forward_failed(self, error: BaseException) -> None:
        """Tell the others that no backward is going to follow. Called by a hook of the module."""
        if self._trains_here():
            troubles = self.troubles()
            for trouble in troubles:
                trouble.forget_told(error, self._forward_began_at)
            tell_all(troubles, error, "in its forward")

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

    def _on_forward(self, when: Policy) -> None:
        """Make the buffers equal that are due. Called by a hook of the module, around its forward.

        Not in evaluation, which one rank may do alone; not where ranks may run different numbers of forwards;
        and not where a backward computes a forward again.
        """
        module = self._module()
        if module is None or not module.training or engine_watch.inside():
            return
        if self.reducer is None or (self.reducer.wants_sync and self.reducer.wiring.joining is None):
            with interrupts:
                self.buffers.sync(self._tell, only={when}, in_passing=True)

    def _tell(self, frame: bytes) -> Sequence[bytes]:
        """Tell every rank something about the buffers, and hear what every rank tells."""
        if self.reducer is not None:
            return self.reducer.exchange(b"buffers", frame)
        control, topic = control_over(self.comm), self.name + b".buffers"
        return control.exchange(topic, frame, self.comm.seconds)

    def detach(self) -> nn.Module | None:
        """Take everything off again. The module stays as it is, a plain module from now on."""
        if self.sharing.is_needed:
            names = {leaver._model for leaver in self.sharing.leavers}
            raise ValueError(
                f"this {self._model} reduces parameters that it shares with {name_some(sorted(names))}, "
                "which was replicated later: detach() that one first"
            )
        return self._detach()

    def end(self) -> None:
        """Hear that the module or its wrapper is gone: nothing is left here but what others need."""
        if not self.sharing.is_needed:
            self._detach()
            return
        self.sharing.is_over = True
        self.sharing.let_go(self)
        registry.remove(self)
        while self._forward_handles:
            self._forward_handles.pop().remove()

    def _detach(self) -> nn.Module | None:
        registry.remove(self)
        if self.low_precision is not None:
            self.low_precision.remove()
            self.low_precision = None
        while self._forward_handles:
            self._forward_handles.pop().remove()
        if self.reducer is not None:
            the_guard.remove(self.reducer)
            self.reducer.close()
            self.reducer = None
        self.sharing.let_go(self)
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
        return explain(facts_of(self))

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that are watched."""
        return self.reducer.parameters if self.reducer else [parameter for _, parameter in self.watched]


def replica(module: nn.Module) -> Replica:
    """Return the handle of a replicated module, also from what it is wrapped in.

    That may be a DistributedDataParallel, or what torch.compile() returns.
    """
    found: Replica | None = registry.find(module)
    if found is None:
        raise ValueError(
            f"this {type(module).__name__} is not replicated; call paceline.replicate(module) first"
        )
    return found


def comm_for(group: Any, mesh: Any, module: object) -> Comm:
    """Choose the comm from a group or a one-dimensional mesh, but not both.

    The first call for a group is a collective: it is made sure that its link returns what was sent.
    """
    if group is not None and mesh is not None:
        raise ValueError("give a process group or a device mesh, not both")
    tensors = module.parameters() if isinstance(module, nn.Module) else iter(())
    device = next((tensor.device for tensor in tensors), None)
    comm = comm_over(group if mesh is None else group_of_mesh(mesh), device)
    preflight(comm, module, "" if mesh is None else name_of_mesh(mesh))
    return comm


def _riders(settings: Settings) -> list[Rider]:
    """Return what every backward takes along."""
    return [SameBatch()] if settings.loader_check else []


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _all_of(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
