"""The buckets of one backward, from the first gradient in them to gradients handed out.

    filled    this rank's gradients are in the flat tensor, scaled
    out       the hook has it, and its collectives are under way
    landed    the flat tensor holds what all ranks have agreed on
    settled   the optimizer inside backward has stepped on it, and it is freed
    handed    every gradient is a view of it

What is sent when, the backward decides. Here is how.
"""

import functools
from collections.abc import Mapping, Sequence

import torch

from paceline.comm import Comm, Pending
from paceline.hooks import GradBucket, InOrder
from paceline.landing import Flight, land, land_in_rounds, linger
from paceline.meeting import Meeting
from paceline.recorder import CountedComm, StepRecord
from paceline.remote import refuse_context
from paceline.retrace import Retraceable
from paceline.sharded import owner_of
from paceline.shelf import Layout, Packet, SparseGradient
from paceline.tally import Outcome
from paceline.wiring import Consumer, Wiring


class Outbox:
    """Fills, sends, lands and hands out the buckets of one backward, in plan order."""

    hidden = False  # autograd may come back to what has been taken: its ``.grad`` stays empty meanwhile
    in_graph = False  # the gradients are part of a graph themselves
    is_behind = False  # the optimizer inside backward raised, so this rank's weights are not the others'
    is_out_of_step = False  # the ranks' collectives do not match any more
    skipped: set[int] | None = None  # buckets that no rank has put anything into, once that is known

    def __init__(
        self, wiring: Wiring, layout: Layout, record: StepRecord, meeting: Meeting, *, in_order: bool
    ) -> None:
        self._wiring = wiring
        self._layout = layout
        self._record = record
        self._meeting = meeting
        self.packets = [Packet(shelf, wiring.scale_on(shelf.bucket.device)) for shelf in layout.shelves]
        self.flights: list[Flight] = []
        self.aside: dict[int, torch.Tensor] = {}  # sparse gradients that came where dense ones were expected
        self.settled: set[int] = set()  # parameters that the optimizer has stepped already
        counted = CountedComm(wiring.comm, record)
        self.comm: Comm = InOrder(counted) if in_order else counted
        if not wiring.is_sure:
            self.comm = Retraceable(self.comm)

    # ---- out -------------------------------------------------------------------------------------

    def send_next(self, seen: dict[int, None], factor: float, *, complete: bool, empty: bool) -> None:
        """Send the next bucket. ``seen``: whose gradients have come; those that are not there are taken out.

        ``complete`` says that all of this bucket have come, ``empty`` that the others' collectives are to be
        matched, and nothing else. Without autograd.
        """
        packet = self.packets[len(self.flights)]
        if empty:
            packet.fill_with_zeros()
        else:
            self._fill(packet, seen, complete=complete)
            if factor != 1:
                packet.flat.mul_(factor)
        self.flights.append(Flight(packet, self._start(packet)))
        if empty:
            return
        if not self.in_graph:
            packet.put_views(seen.keys() - self.aside.keys() if self.aside else seen, hide=self.hidden)
        if self._wiring.consumer is not None:
            self._consume(self.flights[:-1])

    def _fill(self, packet: Packet, seen: dict[int, None], *, complete: bool) -> None:
        indices = packet.shelf.indices
        # Only what this backward has added to may be reduced in place: the rest keeps what it has until the
        # others have spoken.
        in_place = not self.in_graph and (complete or seen.keys() >= set(indices))
        try:
            missing = packet.fill(in_place=in_place)
        except SparseGradient:
            aside = packet.set_aside_sparse()
            self.aside |= {indices[position]: gradient for position, gradient in aside.items()}
            missing = [position for position in packet.fill(in_place=in_place) if position not in aside]
        for position in missing:
            # Autograd may have come by with nothing in its hands.
            if seen.pop(indices[position], 0) is None:
                refuse_context(packet.shelf.names[position])

    def _start(self, packet: Packet) -> Pending:
        shelf = packet.shelf
        bucket = GradBucket(
            shelf.bucket.index,
            packet.flat,
            shelf.parameters,
            shelf.names,
            is_last=len(self.flights) + 1 == len(self.packets),
            split=shelf.views,
            is_scaled=packet.scale != 1,
        )
        if self.skipped and bucket.index in self.skipped:
            return Pending(packet.flat)
        for _, rider in self._wiring.hearing["goes_out"]:
            rider.goes_out(bucket)
        self._wiring.control.note(b"%b %d" % (self._wiring.name, bucket.index))
        self._record.hands_over()
        try:
            return self._wiring.hook(bucket, self.comm)
        except BaseException:
            self.is_out_of_step = True  # the others have started what this rank has not
            raise

    def hide(self) -> None:
        """Empty ``.grad`` where it is a view of what has been taken, because autograd may come back to it."""
        if not self.hidden and not self.in_graph:
            self.hidden = True
            for packet in self.packets:
                packet.hide()

    # ---- landed ----------------------------------------------------------------------------------

    def linger(self) -> None:
        """Sleep while the buckets travel, as long as that is no longer than usual."""
        linger(self.flights)

    def land(self, *, surely: bool) -> None:
        """Wait for the buckets. With ``surely`` no result is used, and nothing has to be confirmed."""
        flights = [flight for flight in self.flights if not flight.is_consumed]
        self._wiring.comm.waits(self._meeting)
        try:
            if surely or self._wiring.is_sure:
                land(flights)
            else:
                land_in_rounds(flights, self._meeting.confirm, self.catch_up, self._meeting.step)
        finally:
            self._wiring.comm.waits(None)

    def catch_up(self, seconds: float | None = None) -> bool:
        """Bring the ranks' collectives level after a hook has raised on some; tell whether that is done."""
        self.is_out_of_step = True
        if isinstance(self.comm, Retraceable):
            exchange = functools.partial(self._meeting.exchange, b"retrace", seconds=seconds)
            self.is_out_of_step = not self.comm.catch_up(exchange)
            self._wiring.control.trace = 0
        return not self.is_out_of_step

    def add_late(self, late: Sequence[int], mine: set[int], factor: float) -> None:
        """Reduce gradients that came, on some rank, after their bucket was out, and add them to it."""
        for index in late:
            place, position = self._layout.place_of(index)
            view, parameter = self.packets[place].views[position], self._layout.parameters[index]
            own = parameter.grad if index in mine else None
            if own is not None and own.layout is not torch.strided:
                own = own.to_dense()
            flat = torch.zeros_like(view) if own is None else own.clone(memory_format=torch.preserve_format)
            view.add_(self._reduce_late(flat.contiguous().view(-1), factor).view_as(view))
            if own is not None:
                parameter.grad = None

    def _reduce_late(self, flat: torch.Tensor, factor: float) -> torch.Tensor:
        way = self._wiring.way
        if way == "own":
            return flat
        if factor != 1:
            flat.mul_(factor)
        return (self.comm.average(flat) if way == "mean" else self.comm.total(flat)).wait()

    # ---- settled ---------------------------------------------------------------------------------

    def _consume(self, flights: Sequence[Flight]) -> None:
        """Let the optimizer have the buckets that are complete, and free them. On a GPU nothing waits.

        A bucket with a gap is kept until the ranks have said which parameters none of them has used.
        """
        consumer = self._wiring.consumer
        if consumer is None or self.hidden or self.in_graph:
            return
        for flight in flights:
            if not flight.is_consumed and flight.packet.is_out_of_hand:
                flight.land()
                self._step_on(flight.packet.shelf.indices, consumer)
                flight.release()

    def _step_on(self, indices: Sequence[int], consumer: Consumer) -> None:
        self.settled.update(indices)
        try:
            consumer([owner_of(self._layout.parameters[index]) for index in indices])
        except BaseException:
            self.is_behind = True
            raise

    def _consume_rest(self, untouched: frozenset[int]) -> None:
        """Let the optimizer have everything that it has not had yet."""
        if self._wiring.consumer is None:
            return
        rest = [i for i in self._layout.plan.members if i not in self.settled and i not in untouched]
        self._step_on(rest, self._wiring.consumer)

    def step_anyway(self, outcome: Outcome) -> None:
        """Let an optimizer inside backward go on after a failure: it has begun, on every rank."""
        if self._wiring.consumer is not None and not self.is_behind:
            for flight in self.flights:
                if not flight.is_consumed:
                    self._put_back(flight.packet, outcome.missing_everywhere)
            self._consume_rest(outcome.missing_everywhere.union(self._layout.plan.sparse))

    # ---- handed out ------------------------------------------------------------------------------

    def hand_out(self, untouched: frozenset[int], rows: Mapping[int, torch.Tensor]) -> None:
        """Make every gradient a view of its reduced bucket; leave alone what no rank has added to.

        ``rows`` are gradients that have travelled by rows.
        """
        quick = not untouched and not rows and not self.hidden and not self.in_graph
        for flight in self.flights:
            packet = flight.packet
            if flight.is_consumed:
                continue
            packet.shelf.remember(packet.flat)
            if not quick or not packet.is_out_of_hand:
                self._put_back(packet, untouched)
        for index, gradient in rows.items():
            self._layout.parameters[index].grad = gradient
        self._record.is_handed_out()
        self._consume_rest(untouched)

    @staticmethod
    def _put_back(packet: Packet, untouched: frozenset[int]) -> None:
        shelf = packet.shelf
        views = packet.views or shelf.views(packet.flat)
        for index, parameter, view in zip(shelf.indices, shelf.parameters, views, strict=True):
            if index not in untouched:
                _set_gradient(parameter, view)
        if packet.kept:
            packet.write_kept(views, untouched)


def _set_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.requires_grad:
        # Part of a graph (create_graph=True): the same tensor, with the agreed value.
        gradient.data.copy_(value)
    else:
        parameter.grad = value
