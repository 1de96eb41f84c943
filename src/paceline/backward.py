"""One backward, from its first gradient to gradients that all ranks agree on.

    opening     the first gradient has arrived: the ranks tell each other step and plan
    collecting  a bucket whose slots are all there, and whose turn in the plan has come, goes out
    closing     backward has ended: the other buckets go out, and the ranks tell each other what they used
    done        gradients are views of the reduced buckets, or every rank got the same exception

A rank whose backward raises still sends every bucket, empty, and says why in its closing frame. So the ranks'
collectives always match, and training can go on.
"""

import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.accumulation import accumulate
from paceline.across import Verdict
from paceline.apart import Apart
from paceline.buffers import Turn
from paceline.crossings import Crossings
from paceline.errors import PacelineError, PeerLost, PeerTimeout, RanksDisagree
from paceline.foretold import Foretold
from paceline.frames import Closing, Kind, Opening
from paceline.hooks import InOrder, StatefulHook
from paceline.landing import hook_failed
from paceline.meeting import Meeting
from paceline.outbox import Outbox
from paceline.recorder import StepRecord
from paceline.shelf import APART, NOWHERE, Expected, Layout, Packet
from paceline.tally import Outcome, Tally, mixed_up, peer_failed
from paceline.torch_private import shown_in_profiles
from paceline.tree import Tree
from paceline.watches.engine import engine_watch
from paceline.weights import NOTHING, Ledger
from paceline.wiring import Wiring

TELL_SECONDS = 60.0  # how long a rank that has failed waits for the others to hear of it


Order = Callable[[], Sequence[int]]  # waits for the order in which gradients arrived on one rank


class Phase(enum.Enum):
    """Where a backward stands."""

    OPEN = enum.auto()  # buckets may still have to be sent, and the closing frame
    CLOSED = enum.auto()  # every rank has this rank's closing frame: nothing can be taken back
    DONE = enum.auto()


class TooLate(Exception):
    """A rank failed after it had told the others that all is well."""


NONE: frozenset[int] = frozenset()
_AS_IT_IS = contextlib.nullcontext()


def _without_graph() -> AbstractContextManager[Any]:
    """Enter nothing where gradients are disabled already, as in all backwards that do not make a graph."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


class LocalBackward:
    """A backward inside ``no_sync()``: it only notes what now differs between the ranks."""

    packets: Sequence[Packet] = ()
    is_pass = False

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        local: set[int],
        tree: Tree | None = None,
        *,
        counts: bool = True,
    ) -> None:
        self._parameters = parameters
        self._local = local
        self.seen: Any = local  # to be asked only
        self.expected: dict[int, Expected] = {}  # every gradient is reported
        self._tree = tree
        self._counts = counts

    def arrived(self, parameter: int) -> None:
        if self._counts:
            self._local.add(parameter)

    def take(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> None:
        """Keep gradients that a compiled backward has computed."""
        accumulate([self._parameters[index] for index in indices], gradients)
        for index in indices:
            self.arrived(index)

    def finish(self) -> None:
        """Add up what has come, where that is not left to autograd."""
        if self._tree is not None and self._counts:
            self._tree.push()


class SyncedBackward:
    """A backward whose gradients are reduced.

    ``local`` are the parameters whose gradient holds something that was never reduced. ``held`` are those
    that autograd comes back to in one backward: their buckets wait for its end.
    """

    # What most backwards leave as it is.
    is_pass = False  # of distributed autograd: gradients that autograd brings now are of other ones
    _weight = 1.0
    _hold = False
    _phase = Phase.OPEN
    _agreed = False
    _adds_nothing = False
    _arrival: Sequence[int] = ()  # the order in which gradients came here, where it is asked for
    _turn: Turn | None = None  # the buffers that the ranks ask each other about
    _set_back: Callable[[], None] | None = None  # undoes what this backward has done to gradients
    _counts_across = True
    _is_told_across = False
    _has_sent_all = False
    knows_of_others = False  # it is no news that the script starts collectives of its own meanwhile
    _others = 0  # as many
    told: Outcome | None = None  # what the ranks have told each other at the end, even if they refuse it
    is_dropped = False  # all ranks have agreed to go on without these gradients

    def __init__(
        self,
        wiring: Wiring,
        layout: Layout,
        record: StepRecord,
        local: set[int],
        held: set[int],
        tree: Tree | None = None,
        began_at: int | None = None,
    ) -> None:
        self._wiring = wiring
        self.record = record
        self._layout = layout
        self._route = layout.route
        self._local = local
        self._held = held
        self._tree = tree
        self.seen: dict[int, None] = {}
        # Who hears of a gradient that is expected takes it out of here, and need not call ``arrived()``: it
        # is to be noted in ``seen``, and to be taken by its packet if it has a place there.
        self.expected, self._unheard = layout.expected.copy(), layout.unheard
        record.arrival = self.seen
        self._late: set[int] = set()
        self._waiting = list(layout.heard_counts)
        self._meeting = Meeting(wiring, layout.plan, record)
        self._outbox = Outbox(wiring, layout, record, self._meeting, in_order=tree is not None)
        self.packets, self._flights = self._outbox.packets, self._outbox.flights  # the same two lists
        self._apart = Apart(wiring, layout, self._outbox)
        self._foretold = Foretold(wiring, self._meeting, record)
        self._sending = threading.Lock()  # nobody waits for it: who comes second leaves it to the first
        self._hurries = wiring.consumer is not None  # what is put off would take up memory
        self._round = record.step  # by which ranks with other parts know this backward
        # What a hook in torch's form starts cannot be told from what the script does.
        self._crossings: Crossings | None = None
        if wiring.is_counted and wiring.comm.size > 1:
            self._crossings = Crossings(wiring.comm, wiring.control, began_at)
            record.beside = wiring.control

    @property
    def step(self) -> int:
        """Which step this is; after the opening, the highest that any rank is at."""
        return self._meeting.step

    @property
    def active(self) -> Sequence[int]:
        """The ranks that have batches."""
        return self._meeting.active

    @property
    def settled(self) -> set[int]:
        """The parameters that the optimizer has stepped already."""
        return self._outbox.settled

    @property
    def is_behind(self) -> bool:
        """Whether the optimizer inside backward raised, so that this rank's weights are not the others'."""
        return self._outbox.is_behind

    @property
    def is_out_of_step(self) -> bool:
        """Whether the ranks' collectives do not match any more."""
        return self._outbox.is_out_of_step

    def open(
        self,
        kind: Kind,
        ledger: Ledger,
        *,
        stepped: int = 0,
        in_graph: bool = False,
        hold: bool = False,
        set_back: Callable[[], None] | None = None,
        is_alone: bool = False,
        failure: str = "",
        where: str = "",
    ) -> None:
        """Tell the others that a backward starts here, or that it cannot. Does not wait for them.

        ``stepped`` counts the optimizer steps made here. ``in_graph`` says that the gradients are part of a
        graph themselves (create_graph=True), ``hold`` that nothing can be sent before the end. With
        ``set_back`` the gradients of this backward do not count: it is called before anything is sent.
        ``is_alone`` says that this process has no other replica.
        """
        self._outbox.in_graph, self._set_back = in_graph, set_back
        self._adds_nothing = kind in NOTHING
        self._weight = 1.0 if ledger.total is None else ledger.total
        self._counts_across = kind is not Kind.LEFT
        self._hold = in_graph or hold or set_back is not None
        if self._hold or self._tree is not None or self._held or self.is_pass:
            self._listen()
        step, wiring = self.step, self._wiring
        told = [rider.opens(step) for rider in wiring.riders] if not failure else ()
        digest, terms = self._layout.plan.digest, wiring.terms_digest
        foretells = is_alone and kind is Kind.BACKWARD and not failure and not self.is_pass
        buffers = self._foretold.foretell(step) if foretells else b""
        opening = Opening(step, digest, terms, kind, ledger.total, stepped, told, failure, where, buffers)
        self._meeting.open(opening, ledger.unit)

    # ---- gradients arrive ------------------------------------------------------------------------

    def arrived(self, parameter: int) -> None:
        """Note a gradient, and send what is complete. Called by the autograd thread that wrote it."""
        if parameter in self.seen:
            self._arrived_again(parameter)
            return
        place, position = self._route.get(parameter, NOWHERE)
        if place < 0:
            self._arrived_apart(parameter, place)
            return
        self.expected.pop(parameter, None)
        self.seen[parameter] = None
        if self._hold:
            self._waiting[place] -= 1  # so that it can be told how far this is
            return
        if parameter in self._held:
            return
        following = len(self._flights)
        if place < following:
            raise RuntimeError(
                f"{self._layout.plan.specs[parameter].name} got a gradient after its bucket was sent: please "
                "report this"
            )
        if position is not None and (self._tree is None or not self._tree.holds(parameter)):
            self.packets[place].take_odd(position, hide=self._outbox.hidden)
        waiting = self._waiting
        if parameter not in self._unheard:
            waiting[place] -= 1
        if following < len(waiting) and not waiting[following]:
            self._send_complete()

    def _may_wait(self) -> bool:
        """Tell whether this thread can wait for the others' openings, as it should (see crossings.py).

        One of autograd's threads for a GPU serves all backwards of the process: another one, for which other
        ranks wait, may need it. Then the bucket is put off.
        """
        if self._hurries or not self._layout.is_on_gpu:
            return True
        return self._meeting.completes_while(engine_watch.has_one_backward)

    def _next_is_complete(self) -> bool:
        """Tell whether every gradient of the next bucket is there."""
        place = len(self._flights)
        if place >= len(self._waiting) or self._waiting[place]:
            return False
        return not self._unheard or self.seen.keys() >= self._layout.unheard_in[place]

    def _listen(self) -> None:
        """Have every arrival reported from now on: parameters may get more than one gradient."""
        for index in self._unheard - self.seen.keys():
            self._waiting[self._route[index][0]] += 1
        self.expected, self._unheard = {}, NONE

    def take(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> None:
        """Take gradients out of the middle of a compiled backward, before autograd has them.

        They are copied: compiled code uses their memory again.
        """
        self.hide()  # autograd may come by later, with more for the same parameters
        if all(map(self._goes_straight, indices, gradients)):
            self._pack(indices, gradients)
            return
        # What comes again is added before anything goes out.
        order = sorted(range(len(indices)), key=lambda number: indices[number] not in self.seen)
        parameters = [self._layout.parameters[index] for index in indices]
        accumulate(parameters, gradients)
        for number in order:
            self.arrived(indices[number])

    def _goes_straight(self, index: int, gradient: torch.Tensor) -> bool:
        """Tell whether a gradient can be put into its bucket without being a ``.grad`` first."""
        place, _ = self._route.get(index, NOWHERE)
        return (
            place >= 0
            and not self._hold
            and index not in self.seen
            and index not in self._held
            and self._layout.parameters[index].grad is None
            and self.packets[place].shelf.fits(gradient)
        )

    def _pack(self, indices: tuple[int, ...], gradients: Sequence[torch.Tensor]) -> None:
        """Put gradients into their buckets, and send what is complete."""
        parcels = self._layout.places_of(indices)
        with torch.no_grad():
            for parcel in parcels:
                given = [gradients[number] for number in parcel.numbers]
                self.packets[parcel.place].take_given(parcel.positions, given)
                self._waiting[parcel.place] -= len(given)
        self.seen.update(dict.fromkeys(indices))
        self._send_complete()

    def _arrived_apart(self, parameter: int, place: int) -> None:
        """Note a gradient without a slot: a sparse one, or one of a parameter frozen since its forward."""
        if place == APART[0]:
            self.seen[parameter] = None
        else:
            self._local.add(parameter)  # it stays this rank's

    def hide(self) -> None:
        """Prepare for a backward inside this backward (re-entrant checkpointing).

        It may come back to parameters whose gradient has been taken. Their ``.grad`` is emptied, so that what
        comes is not added to a buffer that is on its way.
        """
        self._listen()
        self._outbox.hide()

    def _arrived_again(self, parameter: int) -> None:
        """Note a second gradient; from now on its bucket waits for the end of a backward."""
        self._held.add(parameter)
        if self._layout.route[parameter][0] < 0:
            return
        place, position = self._layout.place_of(parameter)
        if self._hold or place >= len(self._flights):
            packet = self.packets[place]
            if packet.holds(position):
                packet.take_odd(position, hide=self._outbox.hidden)  # adds to what was taken before
        elif self._outbox.hidden and parameter not in self.settled:
            self._late.add(parameter)
        else:
            name = self._layout.plan.specs[parameter].name
            raise RuntimeError(
                f"{name} got a second gradient while the first one was on its way, from a nested backward "
                "that did not go through torch.autograd.backward(). From the next step on it will be "
                "waited for"
            )

    def _send_complete(self) -> None:
        """Send what is complete. In plan order, never in arrival order: two ranks that start the same two
        buckets in different orders wait for each other forever.
        """
        if not self._next_is_complete() or not (self._agreed or self._may_wait()):
            return
        # Several device threads may be here at once; one of them sends.
        if self._sending.acquire(blocking=False):
            try:
                while self._next_is_complete():
                    self._send_next(complete=True)
            finally:
                self._sending.release()

    @property
    def progress(self) -> str:
        """How far it has come. Asked by another thread."""
        count, complete = len(self._waiting), self._waiting.count(0)
        return f"bucket {min(complete + 1, count)} of {count}"

    @property
    def is_void(self) -> bool:
        """Whether this backward counts on no rank, because all have dropped what was under way."""
        return self._meeting.is_void

    def hurry(self) -> None:
        """Send every bucket when its last gradient comes from now on, whichever that is.

        Among several replicas, in a nested backward, and where the script has collectives of its own, that
        has to be the same moment on every rank.
        """
        self._hurries = True
        self._listen()
        if not self._hold:
            self._send_complete()

    def _send_next(self, *, empty: bool = False, complete: bool = False) -> None:
        """Send the next bucket of the plan; an empty one matches the others' collectives after a failure."""
        self.agree()
        with _without_graph():
            if self._tree is not None and not empty:
                self._tree.fold(self.packets[len(self._flights)].shelf.indices, self._weight)
            factor = self._factor
            empty |= self._adds_nothing or not factor
            complete = complete or self._next_is_complete()
            if self._crossings is not None:
                self._crossings.note_bucket()
            self._outbox.send_next(self.seen, factor, complete=complete, empty=empty)

    # ---- the ranks agree -------------------------------------------------------------------------

    def agree(self) -> None:
        """Wait for everybody's opening, if that has not been done."""
        if not self._agreed:
            self._agree()

    def _agree(self, seconds: float | None = None) -> None:
        try:
            self._meeting.agree(seconds)
        except BaseException:
            self._note_settled()
            raise
        self._agreed = True
        comm = self._outbox.comm
        if isinstance(comm, InOrder):
            comm.factor = self._meeting.share.scale / comm.size
        if isinstance(self._wiring.hook, StatefulHook) and self.active:
            self._wiring.hook.begin()

    @property
    def _factor(self) -> float:
        """What this rank's gradients are multiplied by before the mean over all ranks."""
        factor = self._meeting.share.factor if self._wiring.way == "mean" else 1.0
        # In a fixed order the sum comes first, and then what it is divided by.
        return factor if self._tree is None else float(factor != 0)

    def _exchange(self, kind: bytes, frame: bytes, seconds: float | None = None) -> list[bytes]:
        try:
            return self._meeting.exchange(kind, frame, seconds)
        except BaseException:
            self._note_settled()
            raise

    def _note_settled(self) -> None:
        """Say no more, if every rank knows how this backward has ended."""
        if self._meeting.is_settled:
            self._phase = Phase.DONE

    # ---- backward ends ---------------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send the buckets that have not gone out, with zeros in the slots that got no gradient."""
        if self._has_sent_all:
            return
        self.record.has_computed()
        if self._crossings is not None:
            self._others = self._crossings.others
        self._forget_gradients()
        self.agree()
        self._find_skipped()
        while len(self._flights) < len(self._waiting):
            self._send_next()
        self._foretold.send()
        self._has_sent_all = True

    def _forget_gradients(self) -> None:
        """Take back what a backward has computed that does not count."""
        if self._set_back is not None:
            self._set_back()
            self._set_back = None
            self.seen.clear()
            self._waiting[:] = self._layout.counts

    def _find_skipped(self, seconds: float | None = None, *, failed: bool = False) -> None:
        """Agree on the buckets into which no rank has put anything; a rank that has failed has not."""
        if not self._wiring.skip_unused or self._outbox.skipped is not None:
            return
        rest = enumerate(self._layout.shelves[len(self._flights) :], len(self._flights))
        have = set() if failed else self.seen.keys() | self._local
        mine = {place for place, shelf in rest if have.isdisjoint(shelf.indices)}
        frames = self._exchange(b"rest", b",".join(b"%d" % place for place in sorted(mine)), seconds)
        theirs = ({int(number) for number in frame.split(b",") if number} for frame in frames)
        self._outbox.skipped = mine.intersection(*theirs)

    def finish(self, *, learn: bool = False) -> Outcome:
        """Hear what the others used, and hand out the reduced gradients.

        With ``learn`` the outcome holds the order in which gradients arrived on rank 0, or on the first rank
        that has any.
        """
        self.send_rest()
        self._arrival = tuple(self.seen) if learn else ()
        if not self._adds_nothing:
            self._apart.collect(self._factor)
        self._apart.show(self._late)
        turn = self._turn = self._foretold.rest(self.step)
        closing = self._closing(turn, len(self._arrival))
        self._meeting.tell(closing)
        if not closing.buffers:
            self._outbox.linger()
        tally = self._hear()
        self.told = tally.outcome
        arrival, rows = self._receive_all(tally)
        self.record.has_landed()
        # To a rank that has joined as well: what steps there, as ZeroRedundancyOptimizer does, must not step
        # on gradients of its last batch.
        if self.is_dropped:
            self._drop()
        else:
            self._outbox.hand_out(tally.outcome.missing_everywhere, rows)
        try:
            for _, rider in self._wiring.hearing["handed_out"]:
                rider.handed_out(self.step)
            if turn and turn.is_disputed:
                raise self._buffers_differ(turn)
        except Exception:  # on every rank alike
            self._phase = Phase.DONE
            raise
        return dataclasses.replace(tally.outcome, arrival=arrival) if arrival else tally.outcome

    def _receive_all(self, tally: Tally) -> tuple[Sequence[int], Mapping[int, torch.Tensor]]:
        """Wait for everything that is on its way, and raise if this backward cannot be used.

        Every rank has sent everything by now, so nothing here waits for anyone's computation. Returns the
        order of arrival that was asked for, and the gradients that travelled by rows.
        """
        if tally.is_stuck:
            self._phase = Phase.DONE
            raise hook_failed(self.step, tally.failed, is_over=not self._outbox.catch_up())
        self._phase = Phase.CLOSED
        with _without_graph():
            order = self._receive(tally, self._turn, self._arrival)
            self._refuse(tally)
            arrival = self._wait_for(order)
            self._agree_across()
            return arrival, {} if tally.is_plain else self._apart.gather(tally)

    def _closing(self, turn: Turn | None, arrived: int) -> Closing:
        riders = self._wiring.riders
        with shown_in_profiles("paceline::search_unused_parameters"):
            used = self._used()
        return Closing(
            self._wiring.control.trace,
            used,
            arrived,
            tuple(sorted(self._late)),
            self._apart.told(),
            buffers=turn.tell() if turn else b"",
            told=[rider.closes(self.step) for rider in riders] if self._wiring.hearing["closes"] else (),
            crossed=self._others > 0 and not self.knows_of_others,
            others=self._others,
            order=self._crossings.order if self._others and self._crossings is not None else 0,
        )

    def _ask_order(self, tally: Tally, mine: Sequence[int]) -> Order:
        """Start to send one rank's order of arrival to all; there may be none to learn from.

        The closing frames decide, so that no rank waits for a broadcast that another does not join.
        """
        guide = tally.guide
        if guide is None:
            return tuple
        if self._wiring.comm.size == 1:
            return lambda: mine
        count = tally.closings[guide].arrived
        device = self._layout.parameters[self._layout.plan.members[0]].device
        self.record.sends_numbers(count)
        return self._wiring.comm.numbers_of(guide, mine, count, device)

    def _wait_for(self, order: Order) -> Sequence[int]:
        if order is tuple:
            return ()
        self._wiring.comm.waits(self._meeting)
        try:
            return order()
        finally:
            self._wiring.comm.waits(None)

    def _receive(self, tally: Tally, turn: Turn | None, mine: Sequence[int]) -> Order:
        """Wait for everything that is on its way, but not for the order of arrival."""
        if tally.is_plain:
            self._land(surely=False)
            self._foretold.take()
            return tuple
        # Before others are sent: one of these may be asked for again, and comes to where it is then.
        self._foretold.drop() if tally.failed else self._foretold.take()
        # What a rank sends beside its buckets is on its way before anything here can fail. But a hook in
        # torch's form may start collectives from callbacks until its buckets have landed.
        beside = self._wiring.is_counted
        order = self._send_beside(tally, turn, mine) if beside else tuple
        self._land(surely=bool(tally.failed))
        if not beside:
            order = self._send_beside(tally, turn, mine)
        if turn:
            turn.take()
        if not tally.failed:
            self._outbox.add_late(tally.late, self._late, self._factor)
        return order

    def _send_beside(self, tally: Tally, turn: Turn | None, mine: Sequence[int]) -> Order:
        if turn and not tally.failed:
            self._send_buffers(turn, tally)
        return self._ask_order(tally, mine)

    def _refuse(self, tally: Tally) -> None:
        """Raise, on every rank alike, if this backward cannot be used."""
        if tally.is_plain:
            self._ask_riders(tally)
            return
        if tally.failed:
            self._phase = Phase.DONE
            self._outbox.step_anyway(tally.outcome)
            raise peer_failed(self.step, tally.failed, is_stepped=self._wiring.consumer is not None)
        error: PacelineError | None = mixed_up(self.step) if tally.is_mixed_up else None
        if self._wiring.unused == "error":
            error = error or tally.unused()
        if error is not None:
            self._phase = Phase.DONE
            self._wiring.control.trace = 0
            self._outbox.step_anyway(tally.outcome)
            raise error
        self._ask_riders(tally)

    def _ask_riders(self, tally: Tally) -> None:
        try:
            self.is_dropped = self._meeting.asks_to_drop(tally)
        except Exception:
            self._phase = Phase.DONE
            raise

    def _agree_across(self) -> None:
        """Go on only if the step has succeeded on the ranks that hold other parts, too."""
        across = self._wiring.across
        if across is None or self._is_told_across:
            return
        self._is_told_across = True
        mine = Verdict(is_dropped=self.is_dropped, weights=list(self._meeting.weights))
        try:
            self.is_dropped = across.agree(self._round, mine, self._wiring.comm.seconds, self._meeting)
        except Exception:
            self._phase = Phase.DONE
            raise

    def note_refused(self) -> None:
        """Note that every rank has refused what came of it."""
        self._phase = Phase.DONE

    @property
    def is_over(self) -> bool:
        """Whether every rank knows how it has ended, or nothing is left to tell."""
        return self._phase is Phase.DONE

    def tell_across(self, error: BaseException) -> None:
        """Let the ranks that hold other parts know of a failure, unless they do. Waits for nobody."""
        if self._wiring.across is not None and not self._is_told_across and self._counts_across:
            self._is_told_across = True
            with contextlib.suppress(PeerLost):
                self._wiring.across.tell(self._round, error)

    def _drop(self) -> None:
        """Leave no gradient, on any rank."""
        for index in self._layout.plan.members:
            self._layout.parameters[index].grad = None
        if isinstance(self._wiring.hook, StatefulHook):
            self._wiring.hook.forget()
        self.record.is_handed_out()

    def abandon(self, failure: str) -> None:
        """End a backward that has raised here: tell the others, and leave no collective of theirs
        unanswered.
        """
        if self._phase is Phase.DONE or self._meeting.is_void:
            return
        if self._meeting.has_told and self._phase is Phase.OPEN:
            # Interrupted while it waited for the others, to whom this backward has succeeded, if to anybody.
            self._receive_all(self._hear(TELL_SECONDS))
        if self._phase is Phase.CLOSED:
            if self.is_dropped:
                return
            raise TooLate(failure)
        if not self._agreed:
            self._agree_or_leave_word(failure)
        self._find_skipped(TELL_SECONDS, failed=True)
        with torch.no_grad():
            self._send_empty()
            trace, stuck = self._wiring.control.trace, self.is_out_of_step or self._foretold.are_missing
            tally = self._close(Closing(trace, self._used(), failure=failure, stuck=stuck), TELL_SECONDS)
            self._phase = Phase.DONE
            if tally.is_stuck:
                self._outbox.catch_up(TELL_SECONDS)
            else:
                self._land(surely=True)
                self._foretold.drop()
                self._outbox.step_anyway(tally.outcome)

    def _agree_or_leave_word(self, failure: str) -> None:
        """Wait for everybody's opening. Who comes later than that finds a closing that says what happened."""
        try:
            self._agree(TELL_SECONDS)
        except PeerTimeout:
            self._meeting.tell(Closing(self._wiring.control.trace, failure=failure, stuck=True))
            raise

    def _send_empty(self) -> None:
        """Send what is left, empty, and the buffers that the others wait for. If anything raises on that as
        well, they hear it in the closing.
        """
        with contextlib.suppress(Exception):
            while len(self._flights) < len(self._waiting) and not self.is_out_of_step:
                self._send_next(empty=True)
            if not self.is_out_of_step:
                self._foretold.send()

    def _land(self, *, surely: bool) -> None:
        """Wait for the buckets. After a failure no result is used."""
        try:
            self._outbox.land(surely=surely)
        except BaseException:
            if not surely and not self._wiring.is_sure:  # the ranks have told each other, or cannot
                self._phase = Phase.DONE
            raise

    def _close(self, closing: Closing, seconds: float | None = None) -> Tally:
        self._meeting.tell(closing)
        return self._hear(seconds)

    def _hear(self, seconds: float | None = None) -> Tally:
        try:
            return self._meeting.hear(seconds)
        except BaseException:
            self._note_settled()
            raise

    def _send_buffers(self, turn: Turn, tally: Tally) -> None:
        turn.send([closing.buffers for closing in tally.closings], self._meeting.source)
        self.record.counts(turn.tensors, turn.messages)

    def _buffers_differ(self, turn: Turn) -> RanksDisagree:
        end = "" if self._wiring.consumer else " The gradients were dropped on every rank."
        return turn.dispute(lambda frame: self._exchange(b"buffers", frame), f"step {self.step}: ", end)

    def _used(self) -> bytes:
        """Mark the parameters that have something to add: from this backward, or from earlier ones in
        no_sync().
        """
        members = self._layout.plan.members
        if len(self.seen) == len(members):
            return b""
        used = bytearray(len(self._layout.plan.specs))
        for index in members:
            used[index] = index in self.seen or index in self._local
        return bytes(used)
