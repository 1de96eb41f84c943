"""One backward, from its first gradient to gradients that all ranks agree on.

    opening     the first gradient has arrived: the ranks tell each other step and plan
    collecting  a bucket whose slots are all there, and whose turn in the plan has come, goes out
    closing     backward has ended: the other buckets go out, and the ranks tell each other what they used
    done        gradients are views of the reduced buckets, or every rank got the same exception

A rank whose backward raises still sends every bucket, empty, and says why in its closing frame. So the ranks'
collectives always match, and training can go on.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.buffers import BufferSync, finish_broadcast
from paceline.comm import Comm, Pending
from paceline.control import Control
from paceline.errors import PeerFailed, RanksDisagree, UnusedParameters, name_ranks, name_some
from paceline.frames import Closing, Opening
from paceline.hooks import GradBucket, Hook, average
from paceline.plan import Plan
from paceline.shelf import Packet, Shelf

TELL_SECONDS = 60.0  # how long a rank that has failed waits for the others to hear of it

NOWHERE = (-1, None)

Unused = Literal["allow", "error"]


class Phase(enum.Enum):
    """Where a backward stands."""

    OPEN = enum.auto()  # buckets may still have to be sent, and the closing frame
    CLOSED = enum.auto()  # every rank has this rank's closing frame: nothing can be taken back
    DONE = enum.auto()


@dataclass(frozen=True)
class Wiring:
    """What every backward of one replica works with."""

    name: bytes  # the same on all ranks, different for each replica
    comm: Comm
    control: Control
    hook: Hook
    unused: Unused = "allow"
    buffers: BufferSync | None = None

    def scale_on(self, device: torch.device) -> float:
        """Return the factor that copying a gradient folds in: the mean's, if the hook is the plain mean."""
        return self.comm.mean_factor(device) if self.hook is average else 1.0


@dataclass(frozen=True)
class Outcome:
    """What the ranks told each other in a backward that succeeded."""

    missing_somewhere: frozenset[int] = frozenset()
    missing_everywhere: frozenset[int] = frozenset()
    arrival: tuple[int, ...] = ()  # rank 0's


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


class TooLate(Exception):
    """A rank failed after it had told the others that all is well."""


class LocalBackward:
    """A backward inside ``no_sync()``: it only notes what now differs between the ranks."""

    def __init__(self, local: set[int]) -> None:
        self._local = local

    def arrived(self, parameter: int) -> None:
        self._local.add(parameter)


@dataclass(frozen=True)
class Flight:
    """A bucket that is out."""

    packet: Packet
    pending: Pending

    def land(self) -> None:
        """Wait for the collective, and see to it that the result is in the flat tensor."""
        result = self.pending.wait()
        if result is not self.packet.flat:
            self.packet.flat.copy_(result.view_as(self.packet.flat))


class SyncedBackward:
    """A backward whose gradients are reduced.

    ``local`` are the parameters whose gradient holds something that was never reduced. ``held`` are those
    that autograd comes back to in one backward: their buckets wait for its end.
    """

    def __init__(self, wiring: Wiring, layout: Layout, step: int, local: set[int], held: set[int]) -> None:
        self._wiring = wiring
        self._layout = layout
        self._route = layout.route
        self._local = local
        self._held = held
        self._in_graph = False
        self._hidden = False
        self._phase = Phase.OPEN
        self._seen: dict[int, None] = {}
        self._late: set[int] = set()
        self._waiting = list(layout.counts)
        self._packets = [Packet(shelf, wiring.scale_on(shelf.bucket.device)) for shelf in layout.shelves]
        self._flights: list[Flight] = []
        self._sending = False
        self._agreed = False
        self.step = step  # after the opening: the highest step that any rank is at

    def open(self, *, in_graph: bool = False, failure: str = "") -> None:
        """Tell the others that a backward starts here, or that it cannot. Does not wait for them.

        ``in_graph`` says that the gradients are part of a graph themselves (create_graph=True).
        """
        self._in_graph = in_graph
        frame = Opening(self.step, self._layout.plan.digest, failure).pack()
        self._wiring.control.post(self._topic(b"opening"), frame)

    # ---- gradients arrive ------------------------------------------------------------------------

    def arrived(self, parameter: int) -> None:
        """Note a gradient, and send what is complete. Called by the autograd thread that wrote it."""
        if parameter in self._seen:
            self._arrived_again(parameter)
            return
        place, position = self._route.get(parameter, NOWHERE)
        if place < 0:  # frozen again since its forward: it has no slot, and its gradient stays this rank's
            self._local.add(parameter)
            return
        self._seen[parameter] = None
        if self._in_graph or parameter in self._held:
            return
        if position is not None:
            self._packets[place].take(position, hide=self._hidden)
        self._waiting[place] -= 1
        # Several device threads may be here at once; one of them sends.
        if not self._waiting[place] and place == len(self._flights) and not self._sending:
            self._send_complete()

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
        if self._in_graph or place >= len(self._flights):
            if position is not None and not self._in_graph:
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
        if not self._agreed:
            self._agree()
        packet = self._packets[len(self._flights)]
        with torch.no_grad():
            if empty:
                packet.fill_with_zeros()
            else:
                self._fill(packet)
            self._flights.append(Flight(packet, self._start(packet)))
            if not empty and not self._in_graph:
                packet.put_views(self._seen, hide=self._hidden)

    def _fill(self, packet: Packet) -> None:
        indices = packet.shelf.indices
        # Only what this backward has added to may be reduced in place: the rest keeps what it has until the
        # others have spoken.
        touched = not self._waiting[len(self._flights)] or self._seen.keys() >= set(indices)
        for position in packet.fill(in_place=touched and not self._in_graph):
            self._seen.pop(indices[position], None)  # autograd may have come by with nothing in its hands

    def _start(self, packet: Packet) -> Pending:
        bucket = GradBucket(
            packet.shelf.bucket.index,
            packet.flat,
            packet.shelf.parameters,
            is_last=len(self._flights) + 1 == len(self._waiting),
            is_scaled=self._wiring.scale_on(packet.flat.device) != 1,
        )
        self._wiring.control.note(b"%b %d" % (self._wiring.name, bucket.index))
        return self._wiring.hook(bucket, self._wiring.comm)

    # ---- the ranks agree -------------------------------------------------------------------------

    def _agree(self, seconds: float | None = None) -> None:
        """Wait for everybody's opening. Nothing is added up unless all are at the same step with the same
        plan.
        """
        openings = [Opening.unpack(frame) for frame in self._collect(b"opening", seconds)]
        self._agreed = True
        self.step = max(opening.step for opening in openings)
        failed = {rank: opening.failure for rank, opening in enumerate(openings) if opening.failure}
        alike = len({(opening.step, opening.digest) for opening in openings}) == 1
        if failed or not alike:
            self._phase = Phase.DONE
        if failed:
            raise _peer_failed(self.step, failed)
        if not alike:
            raise self._disagreement(openings)

    def _disagreement(self, openings: Sequence[Opening]) -> RanksDisagree:
        steps = [opening.step for opening in openings]
        if len(set(steps)) > 1:
            where = ", ".join(f"rank {rank} is at step {step}" for rank, step in enumerate(steps))
            return RanksDisagree(
                f"the ranks are not at the same step: {where}. A rank has run a backward more or less than "
                "the others; make every rank run the same number of backwards. The gradients were dropped "
                "on every rank."
            )
        lines = "\n".join(self._layout.plan.lines()).encode()
        self._wiring.control.post(self._topic(b"plan"), lines)
        plans: list[set[str]] = [set(frame.decode().split("\n")) for frame in self._collect(b"plan")]
        odd = sorted(set().union(*plans) - plans[0].intersection(*plans))
        who = [f"{line} ({name_ranks([r for r, plan in enumerate(plans) if line in plan])})" for line in odd]
        return RanksDisagree(
            f"step {self.step}: the ranks would send different buckets. Only some ranks have: "
            f"{name_some(who) if who else 'another order of the same parameters'}. Give every rank the "
            "same parameters, frozen and trainable alike, and the same bucket sizes. The gradients were "
            "dropped on every rank."
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
        while len(self._flights) < len(self._waiting):
            self._send_next()
        if not self._agreed:
            self._agree()

    def finish(self, *, learn: bool = False) -> Outcome:
        """Hear what the others used, and hand out the reduced gradients.

        With ``learn`` the outcome holds the order in which gradients arrived on rank 0.
        """
        self.send_rest()
        arrival = tuple(self._seen) if learn else ()
        trace = self._wiring.control.trace
        closings = self._close(Closing(trace, self._used(), arrival, tuple(sorted(self._late))))
        # By now every rank has sent everything, so what follows waits for no one's computation.
        self._phase = Phase.CLOSED
        failed = {rank: closing.failure for rank, closing in enumerate(closings) if closing.failure}
        transfers = self._wiring.buffers.start() if self._wiring.buffers and not failed else []
        with torch.no_grad():
            self._land()
            finish_broadcast(transfers)
            if not failed:
                self._add_late(sorted({index for closing in closings for index in closing.late}))
        self._phase = Phase.DONE
        if failed:
            raise _peer_failed(self.step, failed)
        if len({closing.trace for closing in closings}) > 1:
            self._wiring.control.trace = 0
            raise RanksDisagree(
                f"step {self.step}: the ranks sent the buckets of several models in different orders, so "
                "that sums were mixed up. The models are reached by one backward, in different orders on "
                "different ranks; run one backward for each. The gradients were dropped on every rank."
            )
        outcome = self._outcome(closings)
        self._hand_out(outcome.missing_everywhere)
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
        with torch.no_grad():
            while len(self._flights) < len(self._waiting):
                self._send_next(empty=True)
            self._close(Closing(self._wiring.control.trace, failure=failure), TELL_SECONDS)
            self._land()
        self._phase = Phase.DONE

    def _close(self, closing: Closing, seconds: float | None = None) -> list[Closing]:
        self._wiring.control.post(self._topic(b"closing"), closing.pack())
        return [Closing.unpack(frame) for frame in self._collect(b"closing", seconds)]

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

    def _outcome(self, closings: Sequence[Closing]) -> Outcome:
        arrival = closings[0].arrival
        if not any(closing.used for closing in closings):
            return Outcome(arrival=arrival)
        order = self._layout.plan.order
        missing = {
            index: ranks
            for index in order
            if (
                ranks := tuple(
                    r for r, closing in enumerate(closings) if closing.used and not closing.used[index]
                )
            )
        }
        if self._wiring.unused == "error" and missing:
            raise self._unused(missing)
        everywhere = (index for index, ranks in missing.items() if len(ranks) == len(closings))
        return Outcome(frozenset(missing), frozenset(everywhere), arrival)

    def _unused(self, missing: dict[int, tuple[int, ...]]) -> UnusedParameters:
        named = {self._layout.plan.specs[index].name: ranks for index, ranks in sorted(missing.items())}
        shown = [f"{name} ({name_ranks(ranks)})" for name, ranks in named.items()]
        return UnusedParameters(
            f"step {self.step}: unused='error', and these parameters got no gradient in this backward: "
            f"{name_some(shown)}. Use them in the loss, freeze them, or replicate with unused='allow'. The "
            "gradients were dropped on every rank.",
            named,
        )

    def _land(self) -> None:
        for flight in self._flights:
            flight.land()

    def _add_late(self, late: Sequence[int]) -> None:
        """Reduce gradients that came, on some rank, after their bucket was out, and add them to it."""
        for index in late:
            place, _ = self._layout.route[index]
            shelf = self._layout.shelves[place]
            position = shelf.indices.index(index)
            view, parameter = self._packets[place].views[position], shelf.parameters[position]
            mine = parameter.grad if index in self._late else None
            flat = torch.zeros_like(view) if mine is None else mine.clone(memory_format=torch.preserve_format)
            view.add_(self._wiring.comm.average(flat.contiguous()).wait().view_as(view))
            if mine is not None:
                parameter.grad = None

    def _hand_out(self, untouched: frozenset[int]) -> None:
        """Make every gradient a view of its reduced bucket; leave alone what no rank has added to."""
        quick = not untouched and not self._hidden and not self._in_graph
        for flight in self._flights:
            packet = flight.packet
            packet.shelf.remember(packet.flat)
            if quick and packet.is_out_of_hand:
                continue
            shelf = packet.shelf
            for index, parameter, view in zip(shelf.indices, shelf.parameters, packet.views, strict=True):
                if index not in untouched:
                    _set_gradient(parameter, view)


def _set_gradient(parameter: torch.Tensor, value: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.requires_grad:
        # Part of a graph (create_graph=True): the same tensor, with the agreed value.
        gradient.data.copy_(value)
    else:
        parameter.grad = value


def _peer_failed(step: int, failed: dict[int, str]) -> PeerFailed:
    rank, text = min(failed.items())
    others = f" ({name_ranks(sorted(failed)[1:])} failed too)" if len(failed) > 1 else ""
    return PeerFailed(
        f"step {step}: rank {rank} raised during its backward{others}: {text}\nThe gradients of this step "
        f"were dropped on every rank. Mend the cause on rank {rank}, or catch this on every rank and go on "
        "with the next step.",
        rank,
        text,
    )
