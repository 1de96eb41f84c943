"""Watches parameters: the first gradient opens a backward, the engine's callback closes it.

The reducer owns what outlives a backward: the plan, the step count, the settings, and which gradients are
local to this rank. Its parameters' hooks are in watched.py, what it does about exceptions in trouble.py.
Whether a backward is reduced is decided when its first gradient arrives, by what surrounds backward().
"""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.across import Across
from paceline.activity import trainer
from paceline.backward import LocalBackward, SyncedBackward
from paceline.buffers import BufferSync
from paceline.clocks import clocks_for
from paceline.comm import Comm
from paceline.crossings import Care, others_on
from paceline.errors import (
    PeerLost,
    RanksDisagree,
    UnusedParameters,
    name_ranks,
    name_some,
)
from paceline.frames import Kind, Opening
from paceline.hooks import Hook, StatefulHook, name_of
from paceline.interrupts import interrupts
from paceline.local import LocalGradients
from paceline.orphans import Orphan
from paceline.pass_gate import PassGate
from paceline.passes import Pass, Passes, Stage, who_of
from paceline.places import here
from paceline.plan import Caps, Plan, Wishes
from paceline.planner import Planner
from paceline.recorder import Recorder
from paceline.riders import Rider
from paceline.shelf import NOTED, Layout, Shelf
from paceline.stats import Stats
from paceline.stepping import StepCount
from paceline.surroundings import Surroundings
from paceline.tally import BACKWARD, Outcome, ended
from paceline.torch_private import agent_is_set, current_task
from paceline.tree import Tree
from paceline.trouble import Trouble
from paceline.watched import Named, Watched
from paceline.watches.engine import engine_watch
from paceline.watches.passes import pass_watch
from paceline.weights import Ledger
from paceline.wiring import Consumer, Joining, Wiring

Look = Callable[[Callable[[], set[int]] | None], None]  # only if these leaves are the module's


class Reducer:
    """Reduces the gradients of some parameters over a comm."""

    def __init__(
        self, named: Sequence[Named], wiring: Wiring, caps: Caps, wishes: Wishes | None = None
    ) -> None:
        self._watched = Watched(named)
        self.gate = PassGate(self, wiring.name)  # of distributed autograd
        self._wiring = self._with_passes(wiring)
        self.name = wiring.name
        self.step = 0  # reduced backwards that were started, failed ones included
        self._changes = 0  # of the module, that all ranks have agreed on; each has counted as a step
        self.look_again: Look = _do_nothing  # at the module, before a reduced backward
        self.before_first: weakref.WeakMethod[Any] | None = None  # to be called before the first backward
        self.steps = StepCount(self.parameters)  # of optimizers
        self.last_active: Sequence[int] = range(wiring.comm.size)  # who had a batch in the last backward
        # In a fixed order all ranks use one unit.
        self._local = LocalGradients(self.leaves, Ledger(of_one=wiring.deterministic))
        self.around = Surroundings(self, self._local.ledger)
        self._held: set[int] = set()  # parameters that autograd comes back to within one backward
        self._backward: SyncedBackward | LocalBackward | None = None
        self._handed_out: Layout | None = None  # what the present gradients lie in
        self._armed = False
        self._kept_company = False  # since it ran out of batches
        self.care = Care(may_use_differ=wiring.may_use_differ)  # with collectives of the script's own
        self._began_at: int | None = None  # the script's collectives before the backward that is under way
        self._awaited: list[Any] = []  # futures of a buffer hook
        self.trouble = Trouble(self)
        self.has_closed = False  # the present backward has been closed here
        self.recorder = Recorder(clocks_for(self.parameters))
        self._planner = Planner(
            self._watched.named_leaves, caps, wishes or Wishes(), wiring.hook, self.recorder
        )
        self._caps = caps
        self._orphans: list[Orphan] = []  # were watched once
        self.watch = 0  # counts how often other parameters were watched
        self._watch()
        self._place = here()
        engine_watch.add(self)
        pass_watch.add(self.gate)

    # ---- the parameters --------------------------------------------------------------------------

    def _watch(self) -> None:
        self.watch += 1
        self._tree = Tree(self.leaves, self._names) if self._wiring.deterministic else None
        self._watched.hear(self._on_gradient_of)
        if self._tree is not None:
            self._watched.hear_before(self._before_gradient_of)

    @property
    def _names(self) -> Sequence[str]:
        return self._watched.names

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The tensors by which the parameters are reduced."""
        return self._watched.leaves

    def _on_gradient_of(self, index: int) -> Callable[[Any, Any], None]:
        def on_gradient(_inputs: Any, outputs: Any) -> None:
            """Pass the news on. Called by the autograd thread that has just written the gradient."""
            backward = self._backward
            expected = None if backward is None else backward.expected.pop(index, None)
            if backward is None or expected is None:
                self._on_heard(index, outputs[0])
                return
            if expected is not NOTED:
                place, position = expected
                backward.packets[place].take(position)
            backward.seen[index] = None  # not before: another thread may send what is complete

        return on_gradient

    def _on_heard(self, index: int, came: torch.Tensor | None) -> None:
        """Hear of a gradient for which more is to be done than to note it."""
        backward = self._backward
        if backward is None or backward.is_pass:
            backward = self._open(index, came)
        if came is not None or index not in backward.seen:
            backward.arrived(index)

    def _before_gradient_of(self, index: int) -> Callable[[Any], Any]:
        def before_gradient(gradients: Any) -> Any:
            """Make room for a gradient, and weigh it. Called by the thread that is going to write it."""
            if self._tree is None or not self._local.counts:
                return None
            self._tree.make_room(index)
            scale = self._local.ledger.scale
            return None if scale == 1 else tuple(None if g is None else g * scale for g in gradients)

        return before_gradient

    def note_found(self, indices: Collection[int]) -> None:
        """Hear which gradients that only this rank has were there when the module was replicated."""
        self._local.note_found(indices)

    def rewatch(self, named: Sequence[Named], wishes: Wishes) -> list[torch.nn.Parameter]:
        """Watch other parameters from now on, which every rank has to do at the same point.

        Returns those that were not watched before; what the ranks hold of them is not agreed on yet. If a
        rank has failed, or has not changed, nothing is changed here.
        """
        before, wishes_before = list(self.named()), self._planner.first_wishes
        local = set(self._local.indices)
        swapped = {id(parameter) for parameter in self._watched.unheard().values()}
        self._watch_others(named, wishes)
        try:
            self._agree_on_change()
        except BaseException:
            self._watch_others(before, wishes_before)
            raise
        known = {id(parameter) for _, parameter in before}
        present = {id(parameter) for parameter in self.parameters}
        self._orphans = [orphan for orphan in self._orphans if orphan.is_alive]
        self._orphans += [
            Orphan(name, parameter, is_touched=index in local)
            for index, (name, parameter) in enumerate(before)
            if id(parameter) not in present
        ]
        self._local.note_strangers(
            index for index, parameter in enumerate(self.parameters) if id(parameter) in swapped
        )
        return [parameter for parameter in self.parameters if id(parameter) not in known]

    def _watch_others(self, named: Sequence[Named], wishes: Wishes) -> None:
        # The new ones first: the nodes of parameters that stay live on, and with them others' hooks there.
        watched = Watched(named, before=self._watched)
        self._watched.let_go()
        self._watched = watched
        self._local.move_to(self.leaves)
        self._held.clear()
        self.steps.move_to(self.parameters)
        tree = self._tree
        self._watch()
        if tree is not None and self._tree is not None:
            self._tree.take_over(tree)
        bind(self._wiring.hook, self._watched.named_leaves, self._wiring.comm)
        self._planner = Planner(
            self._watched.named_leaves, self._caps, wishes, self._wiring.hook, self.recorder
        )

    def _agree_on_change(self) -> None:
        try:
            backward = self.start_synced(Kind.CHANGED)
            with self.trouble:
                backward.agree()
        except BaseException as error:
            self.on_backward_raised(error)
            raise
        self._backward = None
        self.step = backward.step + 1
        self._changes += 1

    def set_across(self, across: Across | None) -> None:
        """Agree on every step with the ranks that hold other parts from now on."""
        self._wiring = dataclasses.replace(self._wiring, across=across)

    def set_buffers(self, buffers: BufferSync) -> None:
        """Keep other buffers equal from now on."""
        self._wiring = dataclasses.replace(self._wiring, buffers=buffers)

    # ---- a backward ------------------------------------------------------------------------------

    @property
    def may_take(self) -> bool:
        """Whether gradients may be taken out of the middle of a compiled backward."""
        return self._tree is None and not agent_is_set()

    def take(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> None:
        """Take gradients out of the middle of a compiled backward. Called by the thread that computes them.

        Autograd comes by afterwards with nothing for these parameters, or with more.
        """
        backward = self._backward
        if backward is None:
            backward = self._open(indices[0], gradients[0], is_taken=True)
        backward.take(indices, gradients)

    @property
    def nodes(self) -> Mapping[Any, int]:
        """The parameters by the autograd nodes that write their gradients."""
        return self._watched.by_node

    def _open(
        self, first: int, came: torch.Tensor | None, *, is_taken: bool = False
    ) -> SyncedBackward | LocalBackward:
        """Start a backward, with its first gradient: autograd has written it, or it is to be taken."""
        return self.gate.open(first, came, is_taken=is_taken) if agent_is_set() else self.open_now()

    def open_now(self) -> SyncedBackward | LocalBackward:
        """Start an ordinary backward with its first gradient."""
        backward: SyncedBackward | LocalBackward
        if self._note_start():
            backward = self.start_synced(in_graph=torch.is_grad_enabled(), hold=self._must_hold)
            if self.care.is_crossed:
                backward.hurry()
        else:
            counts = self._local.counts
            backward = LocalBackward(self.leaves, self._local.indices, self._tree, counts=counts)
            self._backward = backward
        self._arm()
        if engine_watch.nested():
            self.on_nested_begin()
        return backward

    def _note_start(self) -> bool:
        """Note that a backward starts; tell whether it is going to be reduced."""
        is_reduced = self.wants_sync
        self._local.note_backward(is_reduced=is_reduced)
        for _, rider in self._wiring.hearing["begins"]:
            rider.begins()
        if not is_reduced:
            self.recorder.counts_local()
        return is_reduced

    def start_synced(
        self,
        kind: Kind = Kind.BACKWARD,
        *,
        in_graph: bool = False,
        hold: bool = False,
        failure: str = "",
        where: str = BACKWARD,
    ) -> SyncedBackward:
        """Open a backward that is going to be reduced, or in its place tell of a failure."""
        self.trouble.check_usable()
        if self.trouble.broken and not failure:
            failure = (
                "this rank failed while gradients were handed out, so its weights are behind: "
                f"{self.trouble.broken}. Until every rank has called take_state() of the replica, no "
                "backward is reduced"
            )
        self._planner.notice_changes()
        self._local.forget_cleared()
        record = self.recorder.start(
            self.step, in_backward=engine_watch.inside(), is_counted=self._wiring.is_counted
        )
        is_pass = self.passes.present is not None
        local = set() if is_pass else self._local.indices
        backward = SyncedBackward(
            self._wiring, self._planner.layout, record, local, self._held, self._tree, self._began_at
        )
        backward.knows_of_others = self.care.is_crossed
        # While a failure is told, gradients of a pass may come on another thread.
        backward.is_pass = is_pass or (bool(failure) and agent_is_set())
        if backward.is_pass:
            backward.expected = {}  # before another thread sees it
        self._backward = backward
        with self.trouble:
            backward.open(
                kind,
                self._local.ledger,
                stepped=self.steps.count if self._steps_alike else 0,
                in_graph=in_graph,
                hold=hold,
                set_back=None if self._local.counts else self._local.set_back,
                is_alone=engine_watch.has_one_listener(self._place),
                failure=failure,
                where=where,
            )
        return backward

    @property
    def _steps_alike(self) -> bool:
        """Whether all ranks make the same optimizer steps, seen from outside of backward."""
        return self._wiring.consumer is None and self._wiring.way != "own"

    @property
    def _must_hold(self) -> bool:
        """Whether nothing may be sent before the end.

        It is not known yet what autograd comes back to, or which collectives of the script's own the backward
        holds. An optimizer that steps inside backward waits for that only if it has to: gradients take memory
        meanwhile.
        """
        is_first = self._planner.is_guess
        if self._tree is not None and is_first:
            return True
        may_hold = self._wiring.consumer is None and len(self.plan.buckets) > 1
        return self.care.holds(is_first=is_first and may_hold)

    @property
    def wants_sync(self) -> bool:
        """Whether a backward started now would be reduced."""
        return self.around.wants_sync

    def _arm(self) -> None:
        # A callback queued inside a nested backward would fire at the nested end; on_nested_end() queues it
        # on the outer one instead.
        self._armed = not engine_watch.nested()
        if not self._armed:
            self.hurry()
            return
        others = engine_watch.call_at_end(self)
        if not others:
            return
        for reducer in (*others, self):
            reducer.hurry()
        if (error := self.why_not_several()) is not None:
            raise error

    def why_not_several(self) -> Exception | None:
        """Say why one backward may not reach several models, if it may not."""
        if self._wiring.joining is None:
            return None
        return RuntimeError(
            "join(): one backward reaches several models, and a rank that has run out of batches "
            "could not follow. Run one backward for each model, in the order given to join()"
        )

    def hurry(self) -> None:
        """Put nothing off: several replicas in one backward have to send in the same order on every rank."""
        if isinstance(self._backward, SyncedBackward):
            with self.trouble:
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
        if isinstance(self._backward, SyncedBackward):
            with self.trouble:
                self._backward.agree()
                with interrupts:
                    self._backward.send_rest()

    def on_backward_end(self) -> None:
        """See BackwardListener: hand out the reduced gradients."""
        with interrupts:
            if isinstance(self._backward, SyncedBackward):
                self._finish(self._backward)
            elif self._backward is not None:
                self._backward.finish()
            self._close()
            self.gate.on_ordinary_end()

    def _close(self) -> None:
        self._backward = None
        self.has_closed = True
        while self._awaited:
            self._awaited.pop(0).wait()
        self.around.count_backward()

    def _finish(self, backward: SyncedBackward) -> None:
        try:
            with self.trouble:
                outcome = backward.finish(learn=self._planner.is_guess)
        finally:
            if backward.told is not None:
                self.care.learn(backward.told)
        if self.passes.present is not None:
            self._check_contexts(outcome, backward)
        self.step = backward.step + 1
        self.recorder.finish(backward.record, backward.step, backward.active)
        self.recorder.skipped += backward.is_dropped
        self.last_active = backward.active
        if self.passes.present is None:
            self._local.are_agreed(self.plan.members)
        if self._tree is not None:
            self._tree.clear() if backward.is_dropped else self._tree.finish(self.plan.members)
        self._handed_out = self._planner.layout
        self._planner.learn_from(outcome)

    def _check_contexts(self, outcome: Outcome, backward: SyncedBackward) -> None:
        """Refuse gradients that some contexts of distributed autograd have no place for, on every rank."""
        missing = {
            index: [r for r in ranks if r in backward.active] for index, ranks in outcome.missing.items()
        }
        partly = {i: ranks for i, ranks in missing.items() if 0 < len(ranks) < len(backward.active)}
        if partly:
            backward.note_refused()
            shown = [f"{self._names[index]} ({name_ranks(ranks)})" for index, ranks in partly.items()]
            raise UnusedParameters(
                f"step {backward.step}: a pass of distributed autograd has to compute the same gradients "
                f"on every rank, but these are missing: {name_some(shown)}. Use them in the loss on every "
                "rank, or freeze them.",
                {self._names[index]: tuple(ranks) for index, ranks in partly.items()},
            )

    def reduce_now(self) -> None:
        """Reduce what is there without a backward. At this point every rank does so, or runs a backward."""
        self.look_again(None)
        self._local.forget_cleared()
        self._reduce_as(Kind.BACKWARD if self._local.indices else Kind.EMPTY)

    def skip(self) -> None:
        """Leave this rank's batch out: the others' gradients are reduced without it."""
        if self._backward is not None or engine_watch.inside():
            raise RuntimeError("skip() inside a backward; call it in place of the backward of a batch")
        is_reduced = self.wants_sync
        self.around.count_backward()
        if is_reduced:
            self.look_again(None)
        self._local.forget_cleared()
        for rider in self._wiring.riders:
            rider.enters()
            rider.begins()
        if is_reduced:
            self._reduce_as(Kind.BACKWARD if self._local.indices else Kind.SKIPPED)
        elif self._tree is not None:
            self._tree.push()  # an empty leaf: the others keep their places

    def _reduce_as(self, kind: Kind) -> None:
        """Take part in a reduction without a backward."""
        with interrupts:
            try:
                self._finish(self.start_synced(kind))
            except BaseException as error:
                self.on_backward_raised(error)
                raise
            self._backward = None

    def keep_company(self) -> Sequence[int]:
        """Take part in the next backward of the ranks that still have batches, with nothing to add.

        Returns these ranks; none, when all have run out.
        """
        if self._wiring.comm.is_over:
            return ()
        with interrupts:
            try:
                backward = self.start_synced(Kind.JOINED)
                with self.trouble:
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

    def _with_passes(self, wiring: Wiring) -> Wiring:
        """Have every backward tell of which pass of distributed autograd it is."""
        others = [rider for rider in wiring.riders if not isinstance(rider, Passes)]
        return wiring if wiring.comm.size == 1 else dataclasses.replace(wiring, riders=[*others, self.passes])

    @property
    def passes(self) -> Passes:
        """The passes of distributed autograd that this replica takes part in."""
        return self.gate.passes

    def awaited(self) -> list[str]:
        """Return whose passes other ranks wait to reduce, as far as that can be seen."""
        frames = self._wiring.control.peek(self._wiring.topic(b"opening"))
        told = [part for frame in frames for part in Opening.unpack(frame).told[-1:]]  # ours comes last
        return [who for part in told if (who := who_of(part.decode()))]

    def run_pass(self, present: Pass) -> Stage:
        """Reduce a pass that has computed everything, unless it is one inside ``no_sync()``."""
        if not self._note_start():
            self._check_unweighted()
            self._close()
            return Stage.LOCAL
        backward = self.start_synced(hold=True)
        with self.trouble:
            backward.agree()
        if present.error is not None:  # the others have been told, if there are any
            raise present.error
        with self.passes.lent(self.parameters):
            for index in present.arrived(self.parameters):
                backward.arrived(index)
            self._finish(backward)
        self._close()
        return Stage.AGREED

    def _check_unweighted(self) -> None:
        if self._local.ledger.now is not None:
            raise ValueError(
                "weight() inside no_sync() or accumulate() in a context of distributed autograd: what its "
                "gradients stand for would be lost. Leave one of them out, or weigh the loss yourself"
            )

    @property
    def open_backward(self) -> SyncedBackward | LocalBackward | None:
        """The backward that is running, if one is."""
        return self._backward

    # ---- a backward that raised ------------------------------------------------------------------

    def on_backward_begin(self, leaves: Callable[[], set[int]]) -> None:
        """See BackwardListener."""
        self.has_closed = False
        if self.before_first is not None:
            act, self.before_first = self.before_first(), None
            if act is not None:
                act()
        trainer.runs_backward()
        self.recorder.backward_begins()
        for _, rider in self._wiring.hearing["enters"]:
            rider.enters()
        if self.wants_sync:
            self.look_again(leaves)
        if self._local.ledger.now is not None:
            self._local.prepare(is_reduced=self.wants_sync)
        if self._wiring.comm.size > 1:
            self._began_at = others_on(self._wiring.comm, self._wiring.control)

    def on_backward_left(self) -> None:
        """See BackwardListener."""
        self._began_at = None
        if self._local.ledger.now is not None:
            if self._tree is not None and not self._local.counts:
                self._local.set_back()
                self._tree.push()  # an empty leaf: the others keep their places
            self._local.end()

    def on_backward_failing(self, error: BaseException, leaves: Callable[[], set[int]]) -> None:
        """See BackwardListener: open, as failed, what was going to be opened."""
        self.trouble.on_failing(error, leaves)

    def on_backward_raised(self, error: BaseException) -> None:
        """See BackwardListener: settle the matter with the other ranks before the user sees the error."""
        engine_watch.forget(self)
        self.trouble.on_raised(error)

    def end_backward(self) -> None:
        """Be done with a backward that was not closed."""
        self._backward = None

    def undo_local(self) -> None:
        """Take back what a local backward that raised has done, where this rank keeps its own sums."""
        if self._tree is not None:
            self._tree.undo()

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that did not succeed, so that nothing half-reduced is used."""
        if not self.gate.keeps_gradients:
            self._local.drop(self.plan.members)
        if self._tree is not None:
            self._tree.clear()
        for rider in self._wiring.riders:
            rider.dropped()
        if isinstance(self._wiring.hook, StatefulHook):
            self._wiring.hook.forget()

    def note_failure(self, step: int, text: str) -> None:
        """Write down that a backward has failed."""
        self.recorder.fail(step, text)

    def note_disagreement(self, error: RanksDisagree) -> None:
        """Draw the conclusions from what the ranks have differed about."""
        if error.is_about_steps:
            self.steps.count = 0  # said once: what is done about it cannot be seen from here
        self._planner.is_disputed |= not error.is_known

    # ---- what others ask -------------------------------------------------------------------------

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
                self.parameters[index].grad = None
        self.steps.count = 0  # inside, the ranks have made different numbers of steps
        self.last_active = range(self._wiring.comm.size)

    def exchange(self, kind: bytes, frame: bytes) -> list[bytes]:
        """Tell every rank something outside of a backward, and hear what every rank tells."""
        self.trouble.check_usable()
        with self.trouble:
            topic = self._wiring.topic(kind)
            try:
                return self._wiring.control.exchange(topic, frame, self._wiring.comm.seconds, self)
            except PeerLost as error:
                if (farewell := self._farewell_of(error.rank)) is not None:
                    raise farewell from None
                raise

    def _farewell_of(self, rank: int) -> RanksDisagree | None:
        """Return what a rank that is gone has said before, if it has ended its loop in good order."""
        told = map(Opening.unpack, self._wiring.control.peek(self._wiring.topic(b"opening")))
        left = next((opening.step for opening in told if opening.kind is Kind.LEFT), None)
        return None if left is None else ended(self.step, {rank: left})

    @property
    def stall_seconds(self) -> float:
        """See Waiter."""
        return self._wiring.comm.stall_seconds

    def waits_for(self, topic: bytes) -> str:
        """See Waiter."""
        kind = topic.rpartition(b".")[2].decode()
        return f"before step {self.step} of {self._wiring.title} for an exchange about {kind}"

    @property
    def progress(self) -> str:
        """How far an open backward has come, if there is one. Asked by another thread."""
        backward = self._backward
        return backward.progress if isinstance(backward, SyncedBackward) else ""

    @property
    def reduced(self) -> int:
        """How many reduced backwards there were, and batches left out."""
        return self.step - self._changes

    @property
    def plan(self) -> Plan:
        """The buckets that gradients travel in."""
        return self._planner.plan

    @property
    def hook(self) -> Hook:
        """What is done with a bucket on its way."""
        return self._wiring.hook

    def set_hook(self, hook: Hook) -> None:
        """Take another hook, from the next backward on; every rank has to do so at the same point."""
        self.check_may_change("the hook")
        bind(hook, self._watched.named_leaves, self._wiring.comm)
        old, self._wiring = self._wiring.hook, dataclasses.replace(self._wiring, hook=hook)
        if isinstance(old, StatefulHook) and old is not hook:
            old.settle()
            old.unbind()
        self._planner.set_hook(hook)

    def set_caps(self, caps: Caps) -> None:
        """Take buckets of other sizes, from the next backward on, at the same point on every rank."""
        self.check_may_change("the bucket size")
        self._caps = caps
        self._planner.set_caps(caps)

    def set_consumer(self, consumer: Consumer | None) -> None:
        """Have an optimizer step inside backward, from the next backward on."""
        self.check_may_change("the optimizer")
        self._wiring = dataclasses.replace(self._wiring, consumer=consumer)
        self.steps.count = 0

    def set_riders(self, riders: Sequence[Rider]) -> None:
        """Take other checks along, from the next backward on; every rank has to do so at the same point."""
        self.check_may_change("what is checked")
        self._wiring = self._with_passes(dataclasses.replace(self._wiring, riders=riders))

    def rewire(self, wiring: Wiring, step: int) -> None:
        """Work with other ranks from now on."""
        self.check_may_change("the group")
        bind(wiring.hook, self._watched.named_leaves, wiring.comm)
        self._wiring, self.name, self.gate.name = self._with_passes(wiring), wiring.name, wiring.name
        self.step = step
        self.steps.count = 0
        self.trouble.forget()
        self.care = Care(may_use_differ=wiring.may_use_differ)
        # What the old ranks agreed on, the new ones have not.
        if self._tree is not None:
            self._tree.clear()
        self._local.indices.update(i for i in self.plan.members if self.parameters[i].grad is not None)
        self._planner.set_hook(wiring.hook)
        self._planner.start_anew()

    def agree_on_plan(self) -> None:
        """Plan from scratch where the ranks have learned different things: one was not there at a step."""
        if len(set(self.exchange(b"learned", self._planner.learned))) > 1:
            self._planner.start_anew()

    def uses(self) -> list[int]:
        """Count, for each parameter that has a gradient to travel, the ranks that used it last time."""
        return self._planner.uses(self._wiring.comm.size)

    @property
    def is_use_constant(self) -> bool:
        """Whether all backwards so far have left out the same parameters."""
        return self._planner.is_use_constant

    def stats(self) -> Stats:
        """Return the figures of the last step, and means over the steps that were timed."""
        last = self.recorder.last
        active = set() if last is None else set(last.active)
        missing = {i: active.intersection(ranks) for i, ranks in (self._planner.missing or {}).items()}
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
        return not self._planner.is_guess

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
        return zip(self._watched.names, self._watched.parameters, strict=True)

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that are watched, frozen ones included."""
        return self._watched.parameters

    @property
    def shelves(self) -> Sequence[Shelf]:
        """The buckets that gradients were handed out in last, whatever the plan is by now."""
        return self._handed_out.shelves if self._handed_out is not None else ()

    @property
    def all_agreed(self) -> bool:
        """Whether no gradient is local to this rank."""
        is_agreed = self._backward is None and not self._local.indices and not engine_watch.inside()
        return is_agreed or self._wiring.comm.is_over

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to be looked at before an optimizer steps."""
        return (
            self._backward is None
            and not self._local.indices
            and current_task() == -1
            and self._watched.have_stayed
            and not any(orphan.is_touched for orphan in self._orphans)
        ) or self._wiring.comm.is_over  # there are no other ranks any more

    def why_unsynced(self) -> str:
        """Say where unsynced gradients come from, and what helps."""
        if self._is_running():
            return "The backward that computes them is still running: step after it"
        if self.around.is_fork:
            return "This process is a fork of a rank, whose backwards stay its own: step on the rank"
        if self._local.are_found:
            return (
                "They were there before the model was replicated, and differ between the ranks: drop them "
                "with zero_grad() before the first backward"
            )
        return (
            "They were computed inside no_sync() or accumulate(): run one backward outside of it before the "
            "step, or drop them with zero_grad()"
        )

    def _is_running(self) -> bool:
        """Tell whether this thread is in a backward that is going to be reduced, opened here or not yet."""
        return isinstance(self._backward, SyncedBackward) or (engine_watch.inside() and self.wants_sync)

    def unsynced(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters whose gradients only this rank has."""
        suspects: Iterable[int] = sorted(self._local.indices)
        if self._is_running():
            settled = self._backward.settled if isinstance(self._backward, SyncedBackward) else ()
            suspects = (index for index in self.plan.members if index not in settled)
        return {self._names[i]: p for i in suspects if (p := self.parameters[i]).grad is not None}

    @property
    def hears_all(self) -> bool:
        """Whether no parameter was cast, moved or swapped: torch forgets its hooks then."""
        return self._watched.hears_all

    def moved(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that were, as far as that can be told at little cost."""
        return self._watched.moved()

    @property
    def orphans(self) -> dict[int, Orphan]:
        """The parameters that were taken out of the module and have got gradients since, by identity."""
        return {orphan.key: orphan for orphan in self._orphans if orphan.is_touched}

    def close(self) -> None:
        """Take every hook off again."""
        for orphan in self._orphans:
            orphan.end()
        engine_watch.remove(self)
        pass_watch.remove(self.gate)
        engine_watch.forget(self.gate)
        self._watched.let_go()
        if isinstance(self._wiring.hook, StatefulHook):
            self._wiring.hook.unbind()


def _do_nothing(_leaves: Callable[[], set[int]] | None) -> None:
    """Look at nothing."""


def bind(hook: Hook, named: Sequence[tuple[str, torch.Tensor]], comm: Comm) -> None:
    """Let a hook get to know the parameters and the ranks, if it wants to."""
    if isinstance(hook, StatefulHook):
        hook.bind(named, comm)
