"""One backward, from its first gradient to gradients that all ranks agree on.

    opening     the first gradient has arrived: the ranks tell each other step and plan
    collecting  a bucket whose slots are all there, and whose turn in the plan has come, goes out
    closing     backward has ended: the other buckets go out, and the ranks tell each other what they used
    done        gradients are views of the reduced buckets, or every rank got the same exception

A rank whose backward raises still sends every bucket, empty, and says why in its closing frame. So the ranks'
collectives always match, and training can go on.
"""

import enum
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from paceline.buffers import BufferSync, Turn
from paceline.comm import Comm, Pending
from paceline.control import Control
from paceline.errors import (
    InputsExhausted,
    PeerFailed,
    RanksDisagree,
    UnusedParameters,
    name_ranks,
    name_some,
)
from paceline.frames import Closing, Opening, Round
from paceline.hooks import GradBucket, Hook, average, is_sure, name_of, way_of
from paceline.landing import Flight, hook_failed, land, land_in_rounds
from paceline.plan import Plan
from paceline.recorder import CountedComm, StepRecord
from paceline.shelf import Packet, Shelf, SparseGradient
from paceline.sparse import Share

TELL_SECONDS = 60.0  # how long a rank that has failed waits for the others to hear of it

NOWHERE = (-1, None)
APART = (-2, None)  # sparse: it has no slot

Unused = Literal["allow", "error"]

# Steps some parameters whose gradients all ranks have agreed on, and frees these gradients.
Consumer = Callable[[Sequence[torch.Tensor]], None]


class Phase(enum.Enum):
    """Where a backward stands."""

    OPEN = enum.auto()  # buckets may still have to be sent, and the closing frame
    CLOSED = enum.auto()  # every rank has this rank's closing frame: nothing can be taken back
    DONE = enum.auto()


@dataclass(frozen=True)
class Joining:
    """How ranks that run out of batches are treated."""

    divide_by: Literal["active", "initial"] = "active"
    early: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True)
class Wiring:
    """What every backward of one replica works with."""

    name: bytes  # the same on all ranks, different for each replica
    comm: Comm
    control: Control
    hook: Hook
    unused: Unused = "allow"
    buffers: BufferSync | None = None
    skip_unused: bool = False  # do not send buckets that no rank has put anything into
    joining: Joining | None = None  # set inside join()
    consumer: Consumer | None = None  # the optimizer, if it runs inside backward

    def scale_on(self, device: torch.device) -> float:
        """Return the factor that copying a gradient folds in: the mean's, if the hook is the plain mean."""
        return self.comm.mean_factor(device) if self.hook is average and not self.joining else 1.0

    @cached_property
    def terms(self) -> list[str]:
        """What has to be the same on every rank besides the plan, in words."""
        settings = [f"hook {name_of(self.hook)}", f"skip_unused={self.skip_unused}"]
        settings += [f"inside join({self.joining})"] if self.joining else []
        return [*settings, "optimizer in backward"] if self.consumer else settings

    @cached_property
    def terms_digest(self) -> int:
        """Four bytes that stand for the terms."""
        return zlib.crc32("|".join(self.terms).encode())


@dataclass(frozen=True)
class Outcome:
    """What the ranks told each other in a backward that succeeded."""

    missing: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by parameter, who did not use it
    missing_everywhere: frozenset[int] = frozenset()
    arrival: tuple[int, ...] = ()  # of the first rank that took part
    sparse: frozenset[int] = frozenset()  # whose gradient came without its zeros


class Layout:
    """A plan laid over the real parameters."""

    def __init__(self, plan: Plan, parameters: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.shelves = [Shelf(plan, bucket, parameters) for bucket in plan.buckets]
        self.counts = [len(shelf.indices) for shelf in self.shelves]
        # For each parameter: its bucket, and its position there if it is to be copied as soon as it arrives.
        self.route = {
            index: (place, position if shelf.is_hot(position) else None)
            for place, shelf in enumerate(self.shelves)
            for position, index in enumerate(shelf.indices)
        }
        self.route |= dict.fromkeys(plan.sparse, APART)
        self.parameters = parameters


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
        self._skipped: set[int] = set()  # buckets that no rank has put anything into
        self.settled: set[int] = set()  # parameters that the optimizer has stepped already
        self._waiting = list(layout.counts)
        self._packets = [Packet(shelf, wiring.scale_on(shelf.bucket.device)) for shelf in layout.shelves]
        self._flights: list[Flight] = []
        self._sending = False
        self._agreed = False
        self._comm: Comm = CountedComm(wiring.comm, record)
        self._joined = False
        self.active: Sequence[int] = range(wiring.comm.size)  # the ranks that have batches
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
        self._wiring.control.post(self._topic(b"opening"), frame)

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
        if not self._waiting[place] and place == len(self._flights) and not self._sending:
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
        elif self._hidden:
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
        self._sending = True
        try:
            while len(self._flights) < len(self._waiting) and not self._waiting[len(self._flights)]:
                self._send_next()
        finally:
            self._sending = False

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
            if not (empty or self._joined or self._in_graph):
                packet.put_views(self._seen, hide=self._hidden)
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
            self._seen.pop(indices[position], None)  # autograd may have come by with nothing in its hands

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
        if bucket.index in self._skipped:
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
                self.settled.update(flight.packet.shelf.indices)
                consumer(flight.packet.shelf.parameters)
                flight.release()

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
            raise _peer_failed(self.step, failed)
        if not alike:
            raise self._disagreement(openings)
        self._count_active([rank for rank, opening in enumerate(openings) if not opening.joined])

    def _count_active(self, active: Sequence[int]) -> None:
        """Find out who still has batches; who has none sends zeros."""
        joining, everyone = self._wiring.joining, range(self._wiring.comm.size)
        self.active = active
        if joining is None or len(active) in (0, len(everyone)):
            return
        if joining.early == "stop":
            self._phase = Phase.DONE
            raise _exhausted([rank for rank in everyone if rank not in active])
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
        self._wiring.control.post(self._topic(b"plan"), lines)
        plans: list[set[str]] = [set(frame.decode().split("\n")) for frame in self._collect(b"plan")]
        odd = sorted(set().union(*plans) - plans[0].intersection(*plans))
        who = [f"{line} ({name_ranks([r for r, plan in enumerate(plans) if line in plan])})" for line in odd]
        return RanksDisagree(
            f"step {self.step}: the ranks would send different buckets. Only some ranks have: "
            f"{name_some(who) if who else 'another order of the same parameters'}. Give every rank the "
            "same parameters, frozen and trainable alike, the same bucket sizes and the same hook. The "
            "gradients were dropped on every rank."
        )

    def _topic(self, kind: bytes) -> bytes:
        return self._wiring.name + b"." + kind

    def _collect(self, kind: bytes, seconds: float | None = None) -> list[bytes]:
        try:
            return self._wiring.control.collect(self._topic(kind), seconds or self._wiring.comm.seconds)
        except RanksDisagree:
            self._phase = Phase.DONE  # every rank knows
            raise

    # ---- backward ends ---------------------------------------------------------------------------

    def send_rest(self) -> None:
        """Send the buckets that have not gone out, with zeros in the slots that got no gradient."""
        self.record.has_computed()
        self.agree()
        if self._wiring.skip_unused and not self._skipped:
            self._skipped = self._empty_everywhere()
        while len(self._flights) < len(self._waiting):
            self._send_next()

    def _empty_everywhere(self) -> set[int]:
        """Find the buckets into which no rank has put anything."""
        rest = enumerate(self._layout.shelves[len(self._flights) :], len(self._flights))
        have = self._seen.keys() | self._local
        mine = {place for place, shelf in rest if have.isdisjoint(shelf.indices)}
        frames = self._exchange(b"rest", ",".join(map(str, sorted(mine))).encode())
        return mine.intersection(
            *({int(number) for number in frame.split(b",") if number} for frame in frames)
        )

    def finish(self, *, learn: bool = False) -> Outcome:
        """Hear what the others used, and hand out the reduced gradients.

        With ``learn`` the outcome holds the order in which gradients arrived on rank 0.
        """
        self.send_rest()
        shares = {} if self._joined else self._shares()
        turn = self._buffers_due()
        closings = self._close(
            Closing(
                self._wiring.control.trace,
                self._used(),
                tuple(self._seen) if learn else (),
                tuple(sorted(self._late)),
                tuple(n for i, share in shares.items() for n in (i, share.count, share.came_dense)),
                buffers=turn.tell() if turn else b"",
            )
        )
        # By now every rank has sent everything, so what follows waits for no one's computation.
        failed = {rank: closing.failure for rank, closing in enumerate(closings) if closing.failure}
        if any(closing.stuck for closing in closings):
            self._phase, self.is_out_of_step = Phase.DONE, True
            raise hook_failed(self.step, failed)
        self._phase = Phase.CLOSED
        with torch.no_grad():
            if turn and not failed:
                self._send_buffers(turn, closings)
            self._land(surely=bool(failed))
            if turn:
                turn.take()
            if not failed:
                self._add_late(sorted({index for closing in closings for index in closing.late}))
        outcome = self._outcome(closings)
        if failed:
            self._end_with_failure(outcome, failed)
        if len({closing.trace for closing in closings}) > 1:
            self._wiring.control.trace = 0
            self._phase = Phase.DONE
            raise RanksDisagree(
                f"step {self.step}: the ranks sent the buckets of several models in different orders, so "
                "that sums were mixed up. The models are reached by one backward, in different orders on "
                "different ranks; run one backward for each. The gradients were dropped on every rank."
            )
        self._check_unused(closings)
        with torch.no_grad():
            rows = self._gather_rows(shares, closings)
        self.record.has_landed()
        self._phase = Phase.DONE
        # To a rank that has joined as well: what steps there, as ZeroRedundancyOptimizer does, must not step
        # on gradients of its last batch.
        self._hand_out(outcome.missing_everywhere, rows)
        if turn and turn.is_disputed:
            raise self._buffers_differ(turn)
        return outcome

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
        stuck = self.is_out_of_step
        with torch.no_grad():
            while len(self._flights) < len(self._waiting) and not stuck:
                self._send_next(empty=True)
            trace = self._wiring.control.trace
            closings = self._close(Closing(trace, self._used(), failure=failure, stuck=stuck), TELL_SECONDS)
            self._phase = Phase.DONE
            if not any(closing.stuck for closing in closings):
                self._land(surely=True)
                self._step_anyway(self._outcome(closings))

    def _step_anyway(self, outcome: Outcome) -> None:
        """Let an optimizer inside backward go on after a failure: it has begun, on every rank."""
        if self._wiring.consumer is not None:
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

    def _exchange(self, kind: bytes, frame: bytes, seconds: float | None = None) -> list[bytes]:
        self._wiring.control.post(self._topic(kind), frame)
        return self._collect(kind, seconds)

    def _close(self, closing: Closing, seconds: float | None = None) -> list[Closing]:
        return [Closing.unpack(frame) for frame in self._exchange(b"closing", closing.pack(), seconds)]

    def _buffers_due(self) -> Turn | None:
        """Return the turn of the buffers that are made equal at the end of this backward."""
        buffers = self._wiring.buffers
        # Among ranks that may run out of batches no forward can be waited for.
        with_forward = self._wiring.joining is not None
        return None if buffers is None else buffers.turn_after_backward(self.step, with_forward=with_forward)

    def _send_buffers(self, turn: Turn, closings: Sequence[Closing]) -> None:
        turn.send([closing.buffers for closing in closings], self.active[0])
        self.record.counts(turn.tensors, turn.messages)

    def _buffers_differ(self, turn: Turn) -> RanksDisagree:
        end = "" if self._wiring.consumer else " The gradients were dropped on every rank."
        return turn.dispute(lambda frame: self._exchange(b"buffers", frame), f"step {self.step}: ", end)

    def _end_with_failure(self, outcome: Outcome, failed: dict[int, str]) -> None:
        """Raise what another rank has said."""
        self._phase = Phase.DONE
        self._step_anyway(outcome)
        raise _peer_failed(self.step, failed, is_stepped=self._wiring.consumer is not None)

    def _used(self) -> bytes:
        """Mark the parameters that have something to add: from this backward, or from earlier ones in
        no_sync().
        """
        order = self._layout.plan.order
        if len(self._seen) == len(order):
            return b""
        used = bytearray(len(self._layout.plan.specs))
        for index in order:
            used[index] = index in self._seen or index in self._local
        return bytes(used)

    def _missing(self, closings: Sequence[Closing]) -> dict[int, tuple[int, ...]]:
        """Return, for each parameter that some rank has not used, these ranks."""
        if not any(closing.used for closing in closings):
            return {}
        holes = [(rank, closing.used) for rank, closing in enumerate(closings) if closing.used]
        missing = {
            index: tuple(rank for rank, used in holes if not used[index])
            for index in self._layout.plan.members
        }
        return {index: ranks for index, ranks in missing.items() if ranks}

    def _outcome(self, closings: Sequence[Closing]) -> Outcome:
        missing = self._missing(closings)
        everywhere = (index for index, ranks in missing.items() if len(ranks) == len(closings))
        sparse = frozenset(index for closing in closings for index in closing.sparse[::3])
        return Outcome(
            missing,
            frozenset(everywhere),
            next((closing.arrival for closing in closings if closing.arrival), ()),
            sparse.intersection(self._layout.plan.order),
        )

    def _check_unused(self, closings: Sequence[Closing]) -> None:
        if self._wiring.unused == "error" and (missing := self._missing(closings)):
            missing = {index: tuple(r for r in ranks if r in self.active) for index, ranks in missing.items()}
            missing = {index: ranks for index, ranks in missing.items() if ranks}
            if missing:
                self._phase = Phase.DONE
                raise self._unused(missing)

    def _unused(self, missing: dict[int, tuple[int, ...]]) -> UnusedParameters:
        named = {self._layout.plan.specs[index].name: ranks for index, ranks in sorted(missing.items())}
        shown = [f"{name} ({name_ranks(ranks)})" for name, ranks in named.items()]
        return UnusedParameters(
            f"step {self.step}: unused='error', and these parameters got no gradient in this backward: "
            f"{name_some(shown)}. Use them in the loss, freeze them, or replicate with unused='allow'. The "
            "gradients were dropped on every rank.",
            named,
        )

    def _add_late(self, late: Sequence[int]) -> None:
        """Reduce gradients that came, on some rank, after their bucket was out, and add them to it."""
        for index in late:
            place, _ = self._layout.route[index]
            shelf = self._layout.shelves[place]
            position = shelf.indices.index(index)
            view, parameter = self._packets[place].views[position], shelf.parameters[position]
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
        parameters = self._layout.parameters
        apart = {
            i: parameters[i].grad for i in self._layout.plan.sparse if i in self._seen or i in self._local
        }
        return {i: Share(gradient, parameters[i]) for i, gradient in {**apart, **self._aside}.items()}

    def _gather_rows(self, shares: dict[int, Share], closings: Sequence[Closing]) -> dict[int, torch.Tensor]:
        """Return the reduced gradients of all parameters that had a sparse one on some rank."""
        way = way_of(self._wiring.hook)
        if not any(closing.sparse for closing in closings) or way == "own":
            return dict(self._aside)
        told = [_triples(closing.sparse) for closing in closings]
        divisor = self._comm.divisor if way == "mean" else 1
        rows = {}
        for index in sorted(set().union(*told)):
            share = shares.get(index) or Share(None, self._layout.parameters[index])
            counts = [rank.get(index, (0, False))[0] for rank in told]
            gradient = share.gather(counts, self._comm, divisor)
            is_dense = any(rank.get(index, (0, False))[1] for rank in told)
            rows[index] = gradient.to_dense() if is_dense else gradient
        self._add_dense(rows, told, closings)
        return rows

    def _add_dense(
        self, rows: dict[int, torch.Tensor], told: Sequence[dict[int, Any]], closings: Sequence[Closing]
    ) -> None:
        """Add what other ranks have put into the slot of a gradient that was sparse here, or the reverse."""
        for index in rows.keys() & set(self._layout.plan.order):
            used = [not closing.used or bool(closing.used[index]) for closing in closings]
            if all(index in rank for rank, uses in zip(told, used, strict=True) if uses):
                continue
            place, _ = self._layout.route[index]
            view = self._packets[place].views[self._layout.shelves[place].indices.index(index)]
            rows[index] = view.add(rows[index])

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
        self.settled.update(rest)
        self._wiring.consumer([self._layout.parameters[index] for index in rest])


def _triples(numbers: Sequence[int]) -> dict[int, tuple[int, bool]]:
    """Read what a closing frame says of sparse gradients: for each, how many rows, and if it was dense."""
    threes = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return {index: (count, bool(dense)) for index, count, dense in threes}


def _set_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.requires_grad:
        # Part of a graph (create_graph=True): the same tensor, with the agreed value.
        gradient.data.copy_(value)
    else:
        parameter.grad = value


def _peer_failed(step: int, failed: dict[int, str], *, is_stepped: bool = False) -> PeerFailed:
    rank, text = min(failed.items())
    others = f" ({name_ranks(sorted(failed)[1:])} failed too)" if len(failed) > 1 else ""
    end = (
        "The optimizer runs inside backward and has made this step with what was there, so the weights are "
        f"equal on every rank, but the step lacks gradients. Mend the cause on rank {rank}, and load the "
        "last checkpoint."
        if is_stepped
        else f"The gradients of this step were dropped on every rank. Mend the cause on rank {rank}, or "
        "catch this on every rank and go on with the next step."
    )
    return PeerFailed(
        f"step {step}: rank {rank} raised during its backward{others}: {text}\n{end}", rank, text
    )


def _exhausted(ranks: Sequence[int]) -> InputsExhausted:
    return InputsExhausted(
        f'{name_ranks(ranks)} ran out of batches, and join(early="stop") ends the loop on every rank then. '
        "The gradients of this step were dropped on every rank.",
        ranks,
    )
