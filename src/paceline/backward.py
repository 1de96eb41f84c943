"""One backward, from its first gradient to gradients that all ranks agree on.

    opening     the first gradient has arrived: the ranks tell each other step and plan
    collecting  a bucket whose slots are all there, and whose turn in the plan has come, goes out
    closing     backward has ended: the other buckets go out, and the ranks tell each other what they used
    done        gradients are views of the reduced buckets, or every rank got the same exception

A rank whose backward raises still sends every bucket, empty, and says why in its closing frame. So the ranks'
collectives always match, and training can go on.
"""

import contextlib
import enum
from collections.abc import Sequence

import torch

from paceline.buffers import Turn
from paceline.comm import Comm, Pending
from paceline.errors import PacelineError, RanksDisagree, name_ranks, name_some
from paceline.frames import Closing, Opening, Round
from paceline.hooks import GradBucket, StatefulHook, is_sure, way_of
from paceline.landing import Flight, hook_failed, land, land_in_rounds
from paceline.recorder import CountedComm, StepRecord
from paceline.remote import refuse_context
from paceline.shelf import APART, NOWHERE, Layout, Packet, SparseGradient
from paceline.sparse import Share, gather_rows
from paceline.tally import Outcome, Tally, exhausted, mixed_up, peer_failed
from paceline.wiring import Consumer, Wiring

TELL_SECONDS = 60.0  # how long a rank that has failed waits for the others to hear of it


class Phase(enum.Enum):
    """Where a backward stands."""

    OPEN = enum.auto()  # buckets may still have to be sent, and the closing frame
    CLOSED = enum.auto()  # every rank has this rank's closing frame: nothing can be taken back
    DONE = enum.auto()


class TooLate(Exception):
    """A rank failed after it had told the others that all is well."""


class LocalBackward:
    """A backward inside ``no_sync()``: it only notes what now differs between the ranks."""

    def __init__(self, local: set[int]) -> None:
        self._local = local

    def arrived(self, parameter: int) -> None:
        self._local.add(parameter)


class SyncedBackward:
    """A backward whose gradients are reduced.

    ``local`` are the parameters whose gradient holds something that was never reduced. ``held`` are those
    that autograd comes back to in one backward: their buckets wait for its end.
    """

    def __init__(
        self, wiring: Wiring, layout: Layout, record: StepRecord, local: set[int], held: set[int]
    ) -> None:
        self._wiring = wiring
        self.record = record
        self._layout = layout
        self._route = layout.route
        self._local = local
        self._held = held
        self._in_graph = False
        self._hold = False
        self._hidden = False
        self._phase = Phase.OPEN
        self._seen: dict[int, None] = {}
        record.arrival = self._seen
        self._late: set[int] = set()
        self._aside: dict[int, torch.Tensor] = {}  # sparse gradients that came where dense ones were expected
        self._skipped: set[int] | None = (
            None  # buckets that no rank has put anything into, once that is known
        )
        self.settled: set[int] = set()  # parameters that the optimizer has stepped already
        self._waiting = list(layout.counts)
        self._packets = [Packet(shelf, wiring.scale_on(shelf.bucket.device)) for shelf in layout.shelves]
        self._flights: list[Flight] = []
        self._sending = False
        self._is_due = False  # a bucket is complete, but not every rank has opened
        self._hurries = wiring.consumer is not None  # what is put off would take up memory
        self._agreed = False
        self._comm: Comm = CountedComm(wiring.comm, record)
        self._joined = False
        self.active: Sequence[int] = range(wiring.comm.size)  # the ranks that have batches
        self.is_behind = (
            False  # the optimizer inside backward raised, so this rank's weights are not the others'
        )
        self.is_out_of_step = False  # the ranks' collectives do not match any more
        self.step = record.step  # after the opening: the highest step that any rank is at

    def open(
        self, *, in_graph: bool = False, hold: bool = False, joined: bool = False, failure: str = ""
    ) -> None:
        """Tell the others that a backward starts here, or that it cannot. Does not wait for them.

        ``in_graph`` says that the gradients are part of a graph themselves (create_graph=True), ``hold`` that
        nothing can be sent before the end, ``joined`` that this rank has no batch and only keeps the others
        company.
        """
        self._in_graph, self._joined = in_graph, joined
        self._hold = in_graph or hold
        terms = self._wiring.terms_digest
        frame = Opening(self.step, self._layout.plan.digest, terms, joined, failure).pack()
        self._wiring.control.post(self._wiring.topic(b"opening"), frame)

    # ---- gradients arrive ------------------------------------------------------------------------

    def arrived(self, parameter: int) -> None:
        """Note a gradient, and send what is complete. Called by the autograd thread that wrote it."""
        if parameter in self._seen:
            self._arrived_again(parameter)
            return
        place, position = self._route.get(parameter, NOWHERE)
        if place < 0:
            self._arrived_apart(parameter, place)
            return
        self._seen[parameter] = None
        if self._hold or parameter in self._held:
            return
        if position is not None:
            self._packets[place].take(position, hide=self._hidden)
        self._waiting[place] -= 1
        # Several device threads may be here at once; one of them sends.
        is_next = not self._waiting[place] and place == len(self._flights)
        if (is_next or self._is_due) and not self._sending:
            self._send_complete()

    def _arrived_apart(self, parameter: int, place: int) -> None:
        """Note a gradient without a slot: a sparse one, or one of a parameter frozen since its forward."""
        if place == APART[0]:
            self._seen[parameter] = None
        else:
            self._local.add(parameter)  # it stays this rank's

    def hide(self) -> None:
        """Prepare for a backward inside this backward (re-entrant checkpointing).

        It may come back to parameters whose gradient has been taken. Their ``.grad`` is emptied, so that what
        comes is not added to a buffer that is on its way.
        """
        if not self._hidden and not self._in_graph:
            self._hidden = True
            for packet in self._packets:
                packet.hide()

    def _arrived_again(self, parameter: int) -> None:
        """Note a second gradient; from now on its bucket waits for the end of a backward."""
        self._held.add(parameter)
        place, position = self._layout.route[parameter]
        if place < 0:
            return
        if self._hold or place >= len(self._flights):
            if position is not None and not self._hold:
                self._packets[place].take(position, hide=self._hidden)  # adds to what was taken before
        elif self._hidden and parameter not in self.settled:
            self._late.add(parameter)
        else:
            name = self._layout.plan.specs[parameter].name
            raise RuntimeError(
                f"{name} got a second gradient while the first one was on its way, from a nested backward "
                "that did not go through torch.autograd.backward(). From the next step on it will be "
                "waited for"
            )

    def _send_complete(self) -> None:
        # In plan order, never in arrival order: two ranks that start the same two buckets in different
        # orders wait for each other forever.
        # A rank that is ahead goes on computing until the others have opened, too.
        opening = self._wiring.topic(b"opening")
        self._is_due = not (self._agreed or self._hurries or self._wiring.control.ready(opening))
        if self._is_due:
            return
        self._sending = True
        try:
            while len(self._flights) < len(self._waiting) and not self._waiting[len(self._flights)]:
                self._send_next()
        finally:
            self._sending = False

    def hurry(self) -> None:
        """Wait for the others' openings from now on, where a bucket is complete."""
        self._hurries = True
        if self._is_due:
            self._send_complete()

    def _send_next(self, *, empty: bool = False) -> None:
        """Send the next bucket of the plan; an empty one matches the others' collectives after a failure."""
        self.agree()
        packet = self._packets[len(self._flights)]
        with torch.no_grad():
            if empty or self._joined:
                packet.fill_with_zeros()
            else:
                self._fill(packet)
            self._flights.append(Flight(packet, self._start(packet)))
            if empty or self._joined:
                return
            if not self._in_graph:
                packet.put_views(self._seen.keys() - self._aside.keys(), hide=self._hidden)
            self._consume(self._flights[:-1])

    def _fill(self, packet: Packet) -> None:
        indices = packet.shelf.indices
        # Only what this backward has added to may be reduced in place: the rest keeps what it has until the
        # others have spoken.
        touched = not self._waiting[len(self._flights)] or self._seen.keys() >= set(indices)
        in_place = touched and not self._in_graph
        try:
            missing = packet.fill(in_place=in_place)
        except SparseGradient:
            aside = packet.set_aside_sparse()
            self._aside |= {indices[position]: gradient for position, gradient in aside.items()}
            missing = [position for position in packet.fill(in_place=in_place) if position not in aside]
        for position in missing:
            # Autograd may have come by with nothing in its hands.
            if self._seen.pop(indices[position], 0) is None:
                refuse_context(packet.shelf.names[position])

    def _start(self, packet: Packet) -> Pending:
        shelf = packet.shelf
        bucket = GradBucket(
            shelf.bucket.index,
            packet.flat,
            shelf.parameters,
            shelf.names,
            is_last=len(self._flights) + 1 == len(self._waiting),
            split=shelf.views,
            is_scaled=self._wiring.scale_on(packet.flat.device) != 1,
        )
        if self._skipped and bucket.index in self._skipped:
            return Pending(packet.flat)
        self._wiring.control.note(b"%b %d" % (self._wiring.name, bucket.index))
        self.record.hands_over()
        try:
            return self._wiring.hook(bucket, self._comm)
        except BaseException:
            self.is_out_of_step = True  # the others have started what this rank has not
            raise

    def _consume(self, flights: Sequence[Flight]) -> None:
        """Let the optimizer have the buckets that are complete, and free them. On a GPU nothing waits.

        A bucket with a gap is kept until the ranks have said which parameters none of them has used.
        """
        consumer = self._wiring.consumer
        if consumer is None or self._hidden or self._in_graph:
            return
        for flight in flights:
            if not flight.is_consumed and flight.packet.is_out_of_hand:
                flight.land()
                self._step_on(flight.packet.shelf.indices, consumer)
                flight.release()

    def _step_on(self, indices: Sequence[int], consumer: Consumer) -> None:
        self.settled.update(indices)
        try:
            consumer([self._layout.parameters[index] for index in indices])
        except BaseException:
            self.is_behind = True
            raise

    # ---- the ranks agree -------------------------------------------------------------------------

    def agree(self) -> None:
        """Wait for everybody's opening, if that has not been done."""
        if not self._agreed:
            self._agree()

    def _agree(self, seconds: float | None = None) -> None:
        """Wait for everybody's opening. Nothing is added up unless all are at the same step with the same
        plan.
        """
        since = self.record.waits()
        openings = [Opening.unpack(frame) for frame in self._collect(b"opening", seconds)]
        self.record.has_waited(since)
        self._agreed = True
        self.step = max(opening.step for opening in openings)
        failed = {rank: opening.failure for rank, opening in enumerate(openings) if opening.failure}
        alike = len({(opening.step, opening.digest, opening.terms) for opening in openings}) == 1
        if failed or not alike:
            self._phase = Phase.DONE
        if failed:
            raise peer_failed(self.step, failed)
        if not alike:
            raise self._disagreement(openings)
        self._count_active([rank for rank, opening in enumerate(openings) if not opening.joined])
        if isinstance(self._wiring.hook, StatefulHook) and self.active:
            self._wiring.hook.begin()

    def _count_active(self, active: Sequence[int]) -> None:
        """Find out who still has batches; who has none sends zeros."""
        joining, everyone = self._wiring.joining, range(self._wiring.comm.size)
        self.active = active
        if joining is None or len(active) in (0, len(everyone)):
            return
        if joining.early == "stop":
            self._phase = Phase.DONE
            raise exhausted([rank for rank in everyone if rank not in active])
        if joining.divide_by == "active":
            self._comm = self._comm.among(len(active))

    def _disagreement(self, openings: Sequence[Opening]) -> RanksDisagree:
        steps = [opening.step for opening in openings]
        if len(set(steps)) > 1:
            where = ", ".join(f"rank {rank} is at step {step}" for rank, step in enumerate(steps))
            return RanksDisagree(
                f"the ranks are not at the same step: {where}. A rank has run a backward more or less than "
                "the others; make every rank run the same number of backwards. The gradients were dropped "
                "on every rank."
            )
        lines = "\n".join([*self._layout.plan.lines(), *self._wiring.terms]).encode()
        plans: list[set[str]] = [set(f.decode().split("\n")) for f in self._exchange(b"plan", lines)]
        odd = sorted(set().union(*plans) - plans[0].intersection(*plans))
        who = [f"{line} ({name_ranks([r for r, plan in enumerate(plans) if line in plan])})" for line in odd]
        return RanksDisagree(
            f"step {self.step}: the ranks would send different buckets. Only some ranks have: "
            f"{name_some(who) if who else 'another order of the same parameters'}. Give every rank the "
            "same parameters, frozen and trainable alike, the same bucket sizes and the same hook. The "
            "gradients were dropped on every rank."
        )

    def _exchange(self, kind: bytes, frame: bytes, seconds: float | None = None) -> list[bytes]:
        self._wiring.control.post(self._wiring.topic(kind), frame)
        return self._collect(kind, seconds)

    def _collect(self, kind: bytes, seconds: float | None = None) -> list[bytes]:
        try:
            return self._wiring.control.collect(
                self._wiring.topic(kind), seconds or self._wiring.comm.seconds
            )
        except RanksDisagree:
            self._phase = Phase.DONE  # every rank knows
            raise

    # ---- backward ends ---------------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send the buckets that have not gone out, with zeros in the slots that got no gradient."""
        self.record.has_computed()
        self.agree()
        self._find_skipped()
        while len(self._flights) < len(self._waiting):
            self._send_next()

    def _find_skipped(self, seconds: float | None = None, *, failed: bool = False) -> None:
        """Agree on the buckets into which no rank has put anything; a rank that has failed has not."""
        if not self._wiring.skip_unused or self._skipped is not None:
            return
        rest = enumerate(self._layout.shelves[len(self._flights) :], len(self._flights))
        have = set() if failed else self._seen.keys() | self._local
        mine = {place for place, shelf in rest if have.isdisjoint(shelf.indices)}
        frames = self._exchange(b"rest", b",".join(b"%d" % place for place in sorted(mine)), seconds)
        theirs = ({int(number) for number in frame.split(b",") if number} for frame in frames)
        self._skipped = mine.intersection(*theirs)

    def finish(self, *, learn: bool = False) -> Outcome:
        """Hear what the others used, and hand out the reduced gradients.

        With ``learn`` the outcome holds the order in which gradients arrived on rank 0.
        """
        self.send_rest()
        shares = self._shares()
        turn = self._buffers_due()
        tally = self._close(self._closing(shares, turn, learn=learn))
        # By now every rank has sent everything, so what follows waits for no one's computation.
        if tally.is_stuck:
            self._phase, self.is_out_of_step = Phase.DONE, True
            raise hook_failed(self.step, tally.failed)
        self._phase = Phase.CLOSED
        with torch.no_grad():
            self._receive(tally, turn)
            self._refuse(tally)
            rows = self._gather_rows(shares, tally)
        self.record.has_landed()
        # To a rank that has joined as well: what steps there, as ZeroRedundancyOptimizer does, must not step
        # on gradients of its last batch.
        self._hand_out(tally.outcome.missing_everywhere, rows)
        self._phase = Phase.DONE
        if turn and turn.is_disputed:
            raise self._buffers_differ(turn)
        return tally.outcome

    def _closing(self, shares: dict[int, Share], turn: Turn | None, *, learn: bool) -> Closing:
        return Closing(
            self._wiring.control.trace,
            self._used(),
            tuple(self._seen) if learn else (),
            tuple(sorted(self._late)),
            tuple(n for i, share in shares.items() for n in (i, share.count, share.came_dense)),
            buffers=turn.tell() if turn else b"",
        )

    def _receive(self, tally: Tally, turn: Turn | None) -> None:
        """Wait for everything that is on its way."""
        if turn and not tally.failed:
            self._send_buffers(turn, tally)
        self._land(surely=bool(tally.failed))
        if turn:
            turn.take()
        if not tally.failed:
            self._add_late(tally.late)

    def _refuse(self, tally: Tally) -> None:
        """Raise, on every rank alike, if this backward cannot be used."""
        if tally.failed:
            self._phase = Phase.DONE
            self._step_anyway(tally.outcome)
            raise peer_failed(self.step, tally.failed, is_stepped=self._wiring.consumer is not None)
        error: PacelineError | None = mixed_up(self.step) if tally.is_mixed_up else None
        if self._wiring.unused == "error":
            error = error or tally.unused()
        if error is not None:
            self._phase = Phase.DONE
            self._wiring.control.trace = 0
            self._step_anyway(tally.outcome)
            raise error

    def abandon(self, failure: str) -> None:
        """End a backward that has raised here: tell the others, and leave no collective of theirs
        unanswered.
        """
        if self._phase is Phase.DONE:
            return
        if self._phase is Phase.CLOSED:
            raise TooLate(failure)
        if not self._agreed:
            self._agree(TELL_SECONDS)
        self._find_skipped(TELL_SECONDS, failed=True)
        with torch.no_grad():
            self._send_empty()
            trace, stuck = self._wiring.control.trace, self.is_out_of_step
            tally = self._close(Closing(trace, self._used(), failure=failure, stuck=stuck), TELL_SECONDS)
            self._phase = Phase.DONE
            if not tally.is_stuck:
                self._land(surely=True)
                self._step_anyway(tally.outcome)

    def _send_empty(self) -> None:
        """Send what is left, empty. If the hook raises on that as well, the others hear it in the closing."""
        with contextlib.suppress(Exception):
            while len(self._flights) < len(self._waiting) and not self.is_out_of_step:
                self._send_next(empty=True)

    def _step_anyway(self, outcome: Outcome) -> None:
        """Let an optimizer inside backward go on after a failure: it has begun, on every rank."""
        if self._wiring.consumer is not None and not self.is_behind:
            for flight in self._flights:
                if not flight.is_consumed:
                    self._put_back(flight.packet, outcome.missing_everywhere)
            self._consume_rest(outcome.missing_everywhere.union(self._layout.plan.sparse))

    def _land(self, *, surely: bool) -> None:
        """Wait for the buckets. After a failure no result is used, and nothing has to be confirmed."""
        flights = [flight for flight in self._flights if not flight.is_consumed]
        if is_sure(self._wiring.hook) or surely:
            land(flights)
            return
        try:
            land_in_rounds(flights, self._confirm, self.step)
        except BaseException:
            self._phase, self.is_out_of_step = Phase.DONE, True
            raise

    def _confirm(self, told: Round) -> list[Round]:
        return [Round.unpack(frame) for frame in self._exchange(b"round", told.pack())]

    def _close(self, closing: Closing, seconds: float | None = None) -> Tally:
        frames = self._exchange(b"closing", closing.pack(), seconds)
        return Tally([Closing.unpack(frame) for frame in frames], self._layout.plan, self.step, self.active)

    def _buffers_due(self) -> Turn | None:
        """Return the turn of the buffers that are made equal at the end of this backward."""
        buffers = self._wiring.buffers
        # Among ranks that may run out of batches no forward can be waited for.
        with_forward = self._wiring.joining is not None
        return None if buffers is None else buffers.turn_after_backward(self.step, with_forward=with_forward)

    def _send_buffers(self, turn: Turn, tally: Tally) -> None:
        turn.send([closing.buffers for closing in tally.closings], self.active[0])
        self.record.counts(turn.tensors, turn.messages)

    def _buffers_differ(self, turn: Turn) -> RanksDisagree:
        end = "" if self._wiring.consumer else " The gradients were dropped on every rank."
        return turn.dispute(lambda frame: self._exchange(b"buffers", frame), f"step {self.step}: ", end)

    def _used(self) -> bytes:
        """Mark the parameters that have something to add: from this backward, or from earlier ones in
        no_sync().
        """
        members = self._layout.plan.members
        if len(self._seen) == len(members):
            return b""
        used = bytearray(len(self._layout.plan.specs))
        for index in members:
            used[index] = index in self._seen or index in self._local
        return bytes(used)

    def _add_late(self, late: Sequence[int]) -> None:
        """Reduce gradients that came, on some rank, after their bucket was out, and add them to it."""
        for index in late:
            place, position = self._layout.place_of(index)
            view, parameter = self._packets[place].views[position], self._layout.parameters[index]
            mine = parameter.grad if index in self._late else None
            flat = torch.zeros_like(view) if mine is None else mine.clone(memory_format=torch.preserve_format)
            view.add_(self._reduce_late(flat.contiguous()).view_as(view))
            if mine is not None:
                parameter.grad = None

    def _reduce_late(self, flat: torch.Tensor) -> torch.Tensor:
        way = way_of(self._wiring.hook)
        if way == "own":
            return flat
        return (self._comm.average(flat) if way == "mean" else self._comm.total(flat)).wait()

    # ---- gradients that travel by rows -----------------------------------------------------------

    def _shares(self) -> dict[int, Share]:
        """Bring this rank's sparse gradients into the form in which they travel."""
        if self._joined:
            return {}
        parameters = self._layout.parameters
        # Those of earlier backwards as well: if another rank has added to one, all of it is reduced anew.
        there = {i: parameters[i].grad for i in self._layout.plan.sparse if parameters[i].grad is not None}
        gradients = {**there, **self._aside}
        return {index: Share(gradient, parameters[index]) for index, gradient in gradients.items()}

    def _gather_rows(self, shares: dict[int, Share], tally: Tally) -> dict[int, torch.Tensor]:
        """Return the reduced gradients of all parameters that had a sparse one on some rank."""
        way = way_of(self._wiring.hook)
        if way == "own" or not any(tally.rows):
            return dict(self._aside)
        divisor = self._comm.divisor if way == "mean" else 1
        told = [
            {index: rows for index, rows in rank.items() if index not in tally.outcome.missing_everywhere}
            for rank in tally.rows
        ]
        rows = gather_rows(shares, told, self._layout.parameters, self._comm, divisor)
        for index in rows.keys() & set(self._layout.plan.order):
            users = [rank for rank in range(len(tally.closings)) if tally.is_used(index, rank)]
            if not all(index in tally.rows[rank] for rank in users):
                # Somebody has put a dense gradient into the slot.
                place, position = self._layout.place_of(index)
                rows[index] = self._packets[place].views[position].add(rows[index])
        return rows

    # ---- gradients are handed out ----------------------------------------------------------------

    def _hand_out(self, untouched: frozenset[int], rows: dict[int, torch.Tensor]) -> None:
        """Make every gradient a view of its reduced bucket; leave alone what no rank has added to."""
        quick = not untouched and not rows and not self._hidden and not self._in_graph
        for flight in self._flights:
            packet = flight.packet
            if flight.is_consumed:
                continue
            packet.shelf.remember(packet.flat)
            if not quick or not packet.is_out_of_hand:
                self._put_back(packet, untouched)
        for index, gradient in rows.items():
            self._layout.parameters[index].grad = gradient
        self.record.is_handed_out()
        self._consume_rest(untouched)

    @staticmethod
    def _put_back(packet: Packet, untouched: frozenset[int]) -> None:
        shelf = packet.shelf
        views = packet.views or shelf.views(packet.flat)
        for index, parameter, view in zip(shelf.indices, shelf.parameters, views, strict=True):
            if index not in untouched:
                _set_gradient(parameter, view)

    def _consume_rest(self, untouched: frozenset[int]) -> None:
        """Let the optimizer have everything that it has not had yet."""
        if self._wiring.consumer is None:
            return
        rest = [i for i in self._layout.plan.members if i not in self.settled and i not in untouched]
        self._step_on(rest, self._wiring.consumer)


def _set_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.requires_grad:
        # Part of a graph (create_graph=True): the same tensor, with the agreed value.
        gradient.data.copy_(value)
    else:
        parameter.grad = value
