"""Watches parameters: the first gradient opens a backward, the engine's callback closes it.

The reducer owns what outlives a backward: the hooks, the plan, the step count, and which gradients are
local to this rank. Whether a backward is reduced is decided when its first gradient arrives, by what
surrounds backward().
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.backward import LocalBackward, SyncedBackward, TooLate
from paceline.clocks import clocks_for
from paceline.comm import Comm
from paceline.errors import (
    InputsExhausted,
    PeerFailed,
    PeerLost,
    RanksDisagree,
    UnusedParameters,
    name_ranks,
    name_some,
    words_of,
)
from paceline.hooks import Hook, StatefulHook, name_of
from paceline.plan import Caps, Plan, Spec, Wishes, plan_buckets
from paceline.recorder import Recorder, is_counted
from paceline.remote import Context
from paceline.shelf import Layout
from paceline.stats import Stats
from paceline.tally import Outcome
from paceline.torch_private import accumulator_of, agent_is_set, engine_watch
from paceline.wiring import Consumer, Joining, Wiring

Named = tuple[str, torch.nn.Parameter]


class Reducer:
    """Reduces the gradients of some parameters over a comm."""

    def __init__(
        self, named: Sequence[Named], wiring: Wiring, caps: Caps, wishes: Wishes | None = None
    ) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._wiring = wiring
        self.name = wiring.name
        self._caps = caps
        self._wishes = self._first_wishes = wishes or Wishes()
        self.step = 0  # reduced backwards that were started, failed ones included
        self.sync = True  # no_sync() switches it off
        self.last_active: Sequence[int] = range(wiring.comm.size)  # who had a batch in the last backward
        self.context: Context | None = None  # of distributed autograd, if the next backward is its
        self._is_remote = False  # the present backward is one of distributed autograd
        self._micro_batches = 0  # of accumulate(): backwards to come, the reduced one included
        self._local: set[int] = set()  # parameters whose gradient only this rank has
        self._held: set[int] = set()  # parameters that autograd comes back to within one backward
        self._backward: SyncedBackward | LocalBackward | None = None
        self._armed = False
        self._kept_company = False  # since it ran out of batches
        self._awaited: list[Any] = []  # futures of a buffer hook
        self._peer_lost: PeerLost | None = None
        self._broken = ""  # how this rank failed when the others could not be told any more
        self._closed = False  # the present backward has been closed here
        self._plan_is_guess = True
        self._plan_is_disputed = False
        self._unused_last: frozenset[int] = frozenset()
        self._missing_last: Mapping[int, Sequence[int]] | None = None  # by parameter, who did not use it
        self._is_use_constant = True
        self._misses: Counter[int] = Counter()
        self._backwards_on_plan = 0
        self.recorder = Recorder(clocks_for(self._parameters))
        self._watch()
        self._plan_from_scratch()
        engine_watch.add(self)

    # ---- the parameters --------------------------------------------------------------------------

    def _watch(self) -> None:
        # Frozen parameters too: if one is unfrozen later, its first gradient has to be noticed. The nodes
        # are kept because the hooks live and die with them.
        self._nodes = [accumulator_of(parameter) for parameter in self._parameters]
        self._handles = [node.register_hook(self._on_gradient_of(i)) for i, node in enumerate(self._nodes)]
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self._parameters]
        self._addresses = self._addresses_now()

    def _on_gradient_of(self, index: int) -> Callable[[Any, Any], None]:
        def on_gradient(_inputs: Any, _outputs: Any) -> None:
            """Pass the news on. Called by the autograd thread that has just written the gradient."""
            backward = self._backward
            if backward is None:
                backward = self._open(index)
            backward.arrived(index)

        return on_gradient

    def _specs(self) -> list[Spec]:
        return [spec_of(name, p) for name, p in zip(self._names, self._parameters, strict=True)]

    def _trainable(self) -> list[int]:
        return [index for index, parameter in enumerate(self._parameters) if parameter.requires_grad]

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self.recorder.plans(plan.digest)
        self._layout = Layout(plan, self._parameters)
        planned = set(plan.members)
        self._left_out = [p for index, p in enumerate(self._parameters) if index not in planned]
        self._misses.clear()
        self._backwards_on_plan = 0
        self._note_plan()

    def _note_plan(self) -> None:
        """Let the hook know the order that it has to save."""
        if isinstance(self._wiring.hook, StatefulHook) and not self._plan_is_guess:
            self._wiring.hook.planned = tuple(self._names[index] for index in self.plan.basis)

    def _plan_from_scratch(self) -> None:
        """Plan as at the start: what every rank can do alike, whatever came before."""
        self._plan_is_guess = True
        self._set_plan(self._plan_for(self._trainable()[::-1]))
        self._plan_is_disputed = False
        self._unused_last = frozenset()

    def _plan_for(self, order: Sequence[int]) -> Plan:
        return plan_buckets(self._specs(), self._caps, order=order, wishes=self._wishes)

    def _notice_changes(self) -> None:
        """Plan anew if parameters were frozen or unfrozen; every rank does so at the same backward."""
        if self._plan_is_disputed:
            self._plan_from_scratch()
            return
        self._take_saved_plan()
        frozen = any(not self._parameters[index].requires_grad for index in self._unused_last)
        if not frozen and not any(parameter.requires_grad for parameter in self._left_out):
            return
        trainable = self._trainable()
        kept = [index for index in self.plan.members if index in set(trainable)]
        new = [index for index in reversed(trainable) if index not in set(kept)]
        self._set_plan(self._plan_for([*kept, *new]))
        self._plan_is_guess = True

    def _take_saved_plan(self) -> None:
        """Go on with the plan of a saved run, where a hook's memory depends on it."""
        hook = self._wiring.hook
        if not isinstance(hook, StatefulHook) or hook.plan_to_take is None:
            return
        places = {name: index for index, name in enumerate(self._names)}
        order = [places[name] for name in hook.plan_to_take if name in places]
        hook.plan_to_take = None
        if sorted(order) == sorted(self.plan.members):
            self._plan_is_guess = False
            self._set_plan(self._plan_for(order))

    # ---- a backward ------------------------------------------------------------------------------

    def _open(self, first: int) -> SyncedBackward | LocalBackward:
        """Start a backward. Called by the hook of its first gradient."""
        backward: SyncedBackward | LocalBackward
        if self.context is not None and not self.context.holds(self._parameters[first]):
            self.context = None  # an ordinary backward inside of it
        # A gradient that is nowhere to be seen belongs to a context that nobody has told us of.
        self._is_remote = self.context is not None or (
            self._parameters[first].grad is None and agent_is_set()
        )
        if self.wants_sync:
            with self._settling_contexts():
                backward = self._start_synced(in_graph=torch.is_grad_enabled(), hold=self._is_remote)
        else:
            backward = self._backward = LocalBackward(self._local)
            self.recorder.counts_local()
        self._arm()
        if engine_watch.nested():
            self.on_nested_begin()
        return backward

    def _start_synced(
        self, *, in_graph: bool = False, hold: bool = False, joined: bool = False, failure: str = ""
    ) -> SyncedBackward:
        self.check_usable()
        if self._broken and not failure:
            failure = (
                f"this rank failed while gradients were handed out, so its weights are behind: {self._broken}"
            )
        self._notice_changes()
        self._local -= {index for index in self._local if self._parameters[index].grad is None}
        record = self.recorder.start(
            self.step, in_backward=engine_watch.inside(), is_counted=is_counted(self._wiring.hook)
        )
        local = self._local if self.context is None else set()
        backward = SyncedBackward(self._wiring, self._layout, record, local, self._held)
        self._backward = backward
        with self._noting_lost_peers():
            backward.open(in_graph=in_graph, hold=hold, joined=joined, failure=failure)
        return backward

    @property
    def wants_sync(self) -> bool:
        """Whether a backward started now would be reduced."""
        return self.sync and self._micro_batches <= 1

    def _arm(self) -> None:
        # A callback queued inside a nested backward would fire at the nested end; on_nested_end() queues it
        # on the outer one instead.
        self._armed = not engine_watch.nested()
        if not self._armed:
            self.hurry()
        if self._armed:
            others = engine_watch.call_at_end(self)
            for reducer in (*others, self) if others else ():
                reducer.hurry()
            if others and self._wiring.joining is not None:
                raise RuntimeError(
                    "join(): one backward reaches several models, and a rank that has run out of batches "
                    "could not follow. Run one backward for each model, in the order given to join()"
                )

    def hurry(self) -> None:
        """Put nothing off: several replicas in one backward have to send in the same order on every rank."""
        if isinstance(self._backward, SyncedBackward):
            with self._noting_lost_peers():
                self._backward.hurry()

    def on_nested_begin(self) -> None:
        """See BackwardListener: what is on its way must not be added to."""
        if isinstance(self._backward, SyncedBackward):
            self._backward.hide()

    def on_nested_end(self) -> None:
        """See BackwardListener: from here on the outer backward can be asked to call us at its end."""
        if self._backward is not None and not self._armed:
            self._arm()

    def on_backward_over(self) -> None:
        """See BackwardListener: send what has not gone out."""
        if isinstance(self._backward, SyncedBackward) and not self._is_remote:
            with self._noting_lost_peers():
                self._backward.send_rest()

    def on_backward_end(self) -> None:
        """See BackwardListener: hand out the reduced gradients."""
        if isinstance(self._backward, SyncedBackward):
            with self._settling_contexts():
                with self.context.lent(self._parameters) if self.context else contextlib.nullcontext():
                    self._finish(self._backward)
        self.context, self._is_remote = None, False
        self._backward = None
        self._closed = True
        while self._awaited:
            self._awaited.pop(0).wait()
        self._micro_batches = max(0, self._micro_batches - 1)

    def _finish(self, backward: SyncedBackward) -> None:
        with self._noting_lost_peers():
            outcome = backward.finish(learn=self._plan_is_guess)
        if self.context is not None:
            self._check_contexts(outcome, backward)
        self.step = backward.step + 1
        self.recorder.finish(backward.record, backward.step, backward.active)
        self.last_active = backward.active
        if self.context is None:
            self._local.difference_update(self.plan.members)
        self._learn_from(outcome)

    def _check_contexts(self, outcome: Outcome, backward: SyncedBackward) -> None:
        """Refuse gradients that some contexts of distributed autograd have no place for, on every rank."""
        missing = {
            index: [r for r in ranks if r in backward.active] for index, ranks in outcome.missing.items()
        }
        partly = {i: ranks for i, ranks in missing.items() if 0 < len(ranks) < len(backward.active)}
        if partly:
            shown = [f"{self._names[index]} ({name_ranks(ranks)})" for index, ranks in partly.items()]
            raise UnusedParameters(
                f"step {backward.step}: a pass of distributed autograd has to compute the same gradients "
                f"on every rank, but these are missing: {name_some(shown)}. Use them in the loss on every "
                "rank, or freeze them.",
                {self._names[index]: tuple(ranks) for index, ranks in partly.items()},
            )

    def reduce_now(self) -> None:
        """Reduce what is there without a backward. At this point every rank does so, or runs a backward."""
        try:
            self._finish(self._start_synced())
        except BaseException as error:
            self.on_backward_raised(error)
            raise
        self._backward = None

    def keep_company(self) -> Sequence[int]:
        """Take part in the next backward of the ranks that still have batches, with nothing to add.

        Returns these ranks; none, when all have run out.
        """
        try:
            backward = self._start_synced(joined=True)
            with self._noting_lost_peers():
                backward.agree()
            if backward.active:
                self._kept_company = True
                self._finish(backward)
        except BaseException as error:
            self.on_backward_raised(error)
            raise
        self._backward = None
        return backward.active

    # ---- distributed autograd --------------------------------------------------------------------

    def note_context(self, context: Context | None) -> None:
        """Hear in which context of distributed autograd a forward runs, if in any."""
        if self._backward is not None and not engine_watch.inside():
            # The engine of distributed autograd does not say when it fails.
            self.on_backward_raised(RuntimeError("a backward of distributed autograd did not end"))
        self.context = context

    @contextlib.contextmanager
    def _settling_contexts(self) -> Iterator[None]:
        """Settle a failure at once if no door of the engine is going to tell us of it."""
        try:
            yield
        except BaseException as error:
            if self._is_remote:
                self.context, self._is_remote = None, False
                self.on_backward_raised(error)
            raise

    # ---- a backward that raised ------------------------------------------------------------------

    def on_backward_begin(self) -> None:
        """See BackwardListener."""
        self._closed = False
        self.recorder.backward_begins()

    def on_backward_failing(self, error: BaseException, leaves: Callable[[], set[int]]) -> None:
        """See BackwardListener: open, as failed, what was going to be opened."""
        if self._backward is None and self._lost is None and self._was_to_be_reduced(leaves):
            with contextlib.suppress(PeerLost):
                self._start_synced(failure=words_of(error))

    def on_backward_raised(self, error: BaseException) -> None:
        """See BackwardListener: settle the matter with the other ranks before the user sees the error."""
        backward = self._backward
        engine_watch.forget(self)
        if backward is None or isinstance(backward, LocalBackward):
            self._backward = None
            if self._lost is not None:
                self._drop_gradients()
            return
        self.recorder.fail(backward.step + 1, words_of(error))
        if isinstance(error, PeerLost):
            self._peer_lost = self._peer_lost or error
        if self._lost is None:
            self._settle(backward, error)
        else:
            self._drop_gradients()
        # What is told needs to know that a backward is under way: only now it is over.
        self._backward = None
        if backward.is_out_of_step:
            self._end_for_good(error)

    def _end_for_good(self, error: BaseException) -> None:
        """End every replica over this group: what it sends next would meet what the hook has left behind."""
        own = PeerFailed(
            f"the communication hook raised on this rank: {words_of(error)}", text=words_of(error)
        )
        known = isinstance(error, PeerFailed | PeerLost | RanksDisagree)
        self._wiring.control.ended = error if known else own  # type: ignore[assignment]

    def _was_to_be_reduced(self, leaves: Callable[[], set[int]]) -> bool:
        """Tell whether a backward that raised before our first gradient was going to be reduced here."""
        if self._closed or not self.wants_sync:
            return False
        return any(id(parameter) in leaves() for parameter in self._parameters)

    def _settle(self, backward: SyncedBackward, error: BaseException) -> None:
        """Tell the other ranks what happened here, and forget the gradients."""
        failure = words_of(error)
        try:
            self._tell(backward, failure)
        except (PeerFailed, RanksDisagree, InputsExhausted):
            pass  # the others had something to say as well; this rank raises its own exception
        except TooLate:
            self._broken = failure
        except Exception as trouble:
            error.add_note(f"paceline could not tell the other ranks: {trouble}")
        if backward.is_behind:
            self._broken = failure
        _told_by(error).add(self.name)
        self._drop_gradients()
        self._plan_is_disputed |= isinstance(error, RanksDisagree)

    def _tell(self, backward: SyncedBackward, failure: str) -> None:
        with self._noting_lost_peers():
            try:
                backward.abandon(failure)
            finally:
                self.step = backward.step + 1

    def _drop_gradients(self) -> None:
        """Forget the gradients of a step that did not succeed, so that nothing half-reduced is used."""
        for index in self.plan.members:
            self._parameters[index].grad = None
        self._local.difference_update(self.plan.members)
        if isinstance(self._wiring.hook, StatefulHook):
            self._wiring.hook.forget()

    @contextlib.contextmanager
    def _noting_lost_peers(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as lost:
            self._peer_lost = lost
            raise

    # ---- the plan gets better --------------------------------------------------------------------

    def _learn_from(self, outcome: Outcome) -> None:
        """Re-plan from what all ranks know, so that all come to the same plan."""
        self._is_use_constant &= self._missing_last in (None, outcome.missing)
        self._missing_last = outcome.missing
        self._unused_last = outcome.missing_everywhere
        if outcome.sparse:
            self._wishes = dataclasses.replace(self._wishes, sparse=self._wishes.sparse | outcome.sparse)
            self._set_plan(self.plan.with_sparse(outcome.sparse))
            return
        if self._plan_is_guess:
            self._plan_is_guess = False
            self._set_plan(self.plan.reordered(outcome.arrival))
            return
        self._misses.update(outcome.missing.keys())
        self._backwards_on_plan += 1
        count = self._backwards_on_plan
        if self._misses and count >= 8 and count & (count - 1) == 0:
            better = self.plan.with_late({index: n / count for index, n in self._misses.items()})
            if better.digest != self.plan.digest:
                self._set_plan(better)

    # ---- what others ask -------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, *, enabled: bool = True) -> Iterator[None]:
        """Keep the gradients of the backwards inside local to this rank."""
        before, self.sync = self.sync, self.sync and not enabled
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def accumulate(self, micro_batches: int) -> Iterator[None]:
        """Reduce in the last of ``micro_batches`` backwards, or when the block ends with fewer."""
        if self._micro_batches:
            raise RuntimeError("accumulate() inside accumulate(): end the outer block first")
        self._micro_batches = micro_batches
        try:
            yield
        except BaseException as error:
            due, self._micro_batches = self._micro_batches > 0 and self.sync, 0
            if due:
                self.tell_failure(error)  # the others are going to wait for this rank's share
            raise
        due, self._micro_batches = self._micro_batches > 0 and self.sync, 0
        if due:
            self.reduce_now()

    def check_may_join(self) -> None:
        """Refuse a hook that cannot do without a rank's steps."""
        if not getattr(self._wiring.hook, "may_join", True):
            raise ValueError(
                f"the hook {name_of(self._wiring.hook)} cannot be used inside join(): a rank that has run "
                "out of batches makes no step, and would not average its weights with the others. Give every "
                "rank the same number of batches"
            )

    def set_joining(self, joining: Joining | None) -> None:
        """Say how ranks that run out of batches are treated, or that none may."""
        self._wiring = dataclasses.replace(self._wiring, joining=joining)
        if joining is None and self._kept_company:
            self._kept_company = False
            for index in self.plan.members:  # the others' gradients, of steps that this rank has not made
                self._parameters[index].grad = None
        self.last_active = range(self._wiring.comm.size)

    @property
    def _lost(self) -> Exception | None:
        """Why nothing can be reduced any more."""
        return self._peer_lost or self._wiring.control.ended

    def check_usable(self) -> None:
        """Raise if nothing can be sent any more."""
        if (lost := self._lost) is not None:
            rank = getattr(lost, "rank", -1)
            raise PeerLost(f"no reduction is possible any more: {lost}", rank) from lost

    def exchange(self, kind: bytes, frame: bytes) -> list[bytes]:
        """Tell every rank something outside of a backward, and hear what every rank tells."""
        self.check_usable()
        topic = self.name + b"." + kind
        self._wiring.control.post(topic, frame)
        with self._noting_lost_peers():
            return self._wiring.control.collect(topic, self._wiring.comm.seconds)

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know, in their next backward, that this rank's loop has ended with an exception."""
        self.open_failure(error)
        if isinstance(self._backward, SyncedBackward):
            self._settle(self._backward, error)
            self._backward = None

    def open_failure(self, error: BaseException) -> None:
        """Say so, without waiting for anybody. Of several replicas, all do this before one waits."""
        if self.name not in _told_by(error) and self._lost is None and self._backward is None:
            with contextlib.suppress(PeerLost):
                self._start_synced(failure=words_of(error))

    @property
    def hook(self) -> Hook:
        """What is done with a bucket on its way."""
        return self._wiring.hook

    def set_hook(self, hook: Hook) -> None:
        """Take another hook, from the next backward on; every rank has to do so at the same point."""
        self.check_may_change("the hook")
        bind(hook, list(zip(self._names, self._parameters, strict=True)), self._wiring.comm)
        old, self._wiring = self._wiring.hook, dataclasses.replace(self._wiring, hook=hook)
        if isinstance(old, StatefulHook) and old is not hook:
            old.settle()
            old.unbind()
        self._note_plan()

    def set_consumer(self, consumer: Consumer | None) -> None:
        """Have an optimizer step inside backward, from the next backward on."""
        self.check_may_change("the optimizer")
        self._wiring = dataclasses.replace(self._wiring, consumer=consumer)

    def rewire(self, wiring: Wiring, step: int) -> None:
        """Work with other ranks from now on."""
        self.check_may_change("the group")
        bind(wiring.hook, list(zip(self._names, self._parameters, strict=True)), wiring.comm)
        self._wiring, self.name, self.step, self._peer_lost = wiring, wiring.name, step, None
        self._broken, self._missing_last, self._wishes = "", None, self._first_wishes
        # What the old ranks agreed on, the new ones have not.
        self._local.update(i for i in self.plan.members if self._parameters[i].grad is not None)
        self._plan_from_scratch()

    def uses(self) -> list[int]:
        """Count, for each parameter that has a gradient to travel, the ranks that used it last time."""
        everyone = self._wiring.comm.size
        return [
            everyone - len((self._missing_last or {}).get(index, ())) for index in sorted(self.plan.members)
        ]

    @property
    def is_use_constant(self) -> bool:
        """Whether all backwards so far have left out the same parameters."""
        return self._is_use_constant

    def stats(self) -> Stats:
        """Return the figures of the last step, and means over the steps that were timed."""
        last = self.recorder.last
        active = set() if last is None else set(last.active)
        missing = {i: active.intersection(ranks) for i, ranks in (self._missing_last or {}).items()}
        return self.recorder.stats(
            rank=self._wiring.comm.rank,
            size=self._wiring.comm.size,
            bucket_nbytes=tuple(bucket.nbytes for bucket in self.plan.buckets),
            unused=tuple(self._names[i] for i, ranks in sorted(missing.items()) if ranks == active),
            unused_somewhere=tuple(
                self._names[i] for i, ranks in sorted(missing.items()) if ranks and ranks != active
            ),
            hook=name_of(self._wiring.hook),
        )

    @property
    def is_plan_learned(self) -> bool:
        """Whether the plan follows the order in which gradients were seen to arrive."""
        return not self._plan_is_guess

    def check_idle(self) -> None:
        """Raise if a backward is still running."""
        if self._backward is not None:
            raise RuntimeError("a backward is still running, or was never finished")

    def wait_at_end(self, futures: Any) -> None:
        """Wait for futures when the next backward ends, or at once if there is none to come."""
        while self._awaited:  # of a forward that no backward has followed
            self._awaited.pop(0).wait()
        self._awaited.extend(futures if isinstance(futures, list | tuple) else [futures])

    @property
    def wiring(self) -> Wiring:
        """What the backwards work with."""
        return self._wiring

    def check_may_change(self, what: str) -> None:
        """Refuse to change something while a backward works with it."""
        if self._backward is not None:
            raise RuntimeError(f"{what} cannot be changed while a backward is running; do it between steps")

    def named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that are watched, with their names."""
        return zip(self._names, self._parameters, strict=True)

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that are watched, frozen ones included."""
        return self._parameters

    @property
    def all_agreed(self) -> bool:
        """Whether no gradient is local to this rank."""
        return self._backward is None and not self._local and not engine_watch.inside()

    def why_unsynced(self) -> str:
        """Say where unsynced gradients come from, and what helps."""
        if self._is_running():
            return "The backward that computes them is still running: step after it"
        return (
            "They were computed inside no_sync() or accumulate(): run one backward outside of it before the "
            "step, or drop them with zero_grad()"
        )

    def _is_running(self) -> bool:
        """Tell whether this thread is in a backward that is going to be reduced, opened here or not yet."""
        return isinstance(self._backward, SyncedBackward) or (engine_watch.inside() and self.wants_sync)

    def unsynced(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters whose gradients only this rank has."""
        suspects: Iterable[int] = sorted(self._local)
        if self._is_running():
            settled = self._backward.settled if isinstance(self._backward, SyncedBackward) else ()
            suspects = (index for index in self.plan.members if index not in settled)
        return {self._names[i]: p for i in suspects if (p := self._parameters[i]).grad is not None}

    def _addresses_now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def moved(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that were cast or moved: torch forgets their hooks then.

        Asked before every optimizer step, so it looks at addresses first: who moves gets a new one.
        """
        addresses = self._addresses_now()
        if addresses == self._addresses:
            return {}
        kinds = zip(self._names, self._parameters, self._kinds, strict=True)
        moved = {name: p for name, p, kind in kinds if (p.dtype, p.device) != kind}
        if not moved:
            self._addresses = addresses  # other memory of the same kind: the hooks are still there
        return moved

    def close(self) -> None:
        """Take every hook off again."""
        engine_watch.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []
        if isinstance(self._wiring.hook, StatefulHook):
            self._wiring.hook.unbind()


def bind(hook: Hook, named: Sequence[Named], comm: Comm) -> None:
    """Let a hook get to know the parameters and the ranks, if it wants to."""
    if isinstance(hook, StatefulHook):
        hook.bind(named, comm)


def _told_by(error: BaseException) -> set[bytes]:
    """Return the names of the replicas that have told the other ranks of an exception."""
    told: set[bytes] = error.__dict__.setdefault("_paceline_told", set())
    return told


def spec_of(name: str, parameter: torch.Tensor) -> Spec:
    """Describe a parameter to the plan, with the strides that its gradient is going to have."""
    strides = parameter.stride()
    if not _fills_its_memory(parameter):
        strides = torch.empty(parameter.shape, device="meta").stride()
    return Spec(name, tuple(parameter.shape), parameter.dtype, parameter.device, tuple(strides))


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements lie in one gapless block, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
