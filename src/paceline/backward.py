"""One backward, from its first gradient to gradients that all ranks agree on.

    COLLECTING  gradients arrive; a bucket whose slots are all there, and whose turn in the plan has come,
    goes out CLOSING     backward has ended: the remaining buckets go out, and the ranks tell each other
    what they used DONE        gradients are views of the reduced buckets, or every rank got the same
    exception

A rank whose backward raises still sends every bucket, empty, and says why in its closing frame. So the ranks'
collectives always match, and training can go on.
"""

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from paceline.buffers import BufferSync, finish_broadcast
from paceline.comm import Comm, Pending
from paceline.control import Control
from paceline.errors import PeerFailed, RanksDisagree, UnusedParameters, name_ranks, name_some
from paceline.frames import Closing, Opening
from paceline.hooks import GradBucket, Hook
from paceline.plan import Bucket, Plan
from paceline.torch_private import engine_watch, flatten, unflatten

TELL_SECONDS = 10.0  # how long a rank that has failed waits for the others to hear of it

Unused = Literal["allow", "error"]
Gradients = Sequence[torch.Tensor | None]


class Phase(enum.Enum):
    """Where a backward stands."""

    COLLECTING = enum.auto()
    CLOSING = enum.auto()
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


@dataclass(frozen=True)
class Outcome:
    """What the ranks told each other in a backward that succeeded."""

    missing_somewhere: frozenset[int] = frozenset()
    missing_everywhere: frozenset[int] = frozenset()
    arrival: tuple[int, ...] = ()  # rank 0's


class Backward(Protocol):
    """What a gradient hook talks to."""

    def arrived(self, parameter: int) -> None:
        """Note that a gradient was written to ``parameter.grad``."""


class Shelf:
    """A bucket's parameters, and how their gradients become one flat tensor and views of it."""

    def __init__(self, plan: Plan, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> None:
        self.bucket = bucket
        self.indices = [slot.parameter for slot in bucket.slots]
        self.parameters = [parameters[index] for index in self.indices]
        specs = [plan.specs[index] for index in self.indices]
        self.names = [spec.name for spec in specs]
        self._plain = all(parameter.is_contiguous() for parameter in self.parameters)
        self._strided = [
            (spec.shape, spec.strides, slot.offset) for spec, slot in zip(specs, bucket.slots, strict=True)
        ]
        self._last_flat: weakref.ref[torch.Tensor] | None = None

    def views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """View the flat tensor as gradients, in the parameters' own strides."""
        if self._plain:
            return unflatten(flat, self.parameters)
        return [flat.as_strided(*place) for place in self._strided]

    def fill(self, gradients: Gradients) -> torch.Tensor:
        """Copy gradients into a new flat tensor, with zeros where there is none."""
        self._check(gradients)
        if self._plain:
            pairs = zip(gradients, self.parameters, strict=True)
            return flatten([torch.zeros_like(p) if g is None else g for g, p in pairs])
        flat = torch.zeros(self.bucket.numel, dtype=self.bucket.dtype, device=self.parameters[0].device)
        filled = [(v, g) for v, g in zip(self.views(flat), gradients, strict=True) if g is not None]
        if filled:
            torch._foreach_copy_([view for view, _ in filled], [gradient for _, gradient in filled])
        return flat

    def _check(self, gradients: Gradients) -> None:
        for gradient, name in zip(gradients, self.names, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise NotImplementedError(
                    f"{name} has a sparse gradient, which paceline does not reduce yet; build the module "
                    "with sparse=False"
                )
            if gradient.dtype != self.bucket.dtype:
                raise TypeError(
                    f"{name} has a {gradient.dtype} gradient, but was {self.bucket.dtype} when it was "
                    "replicated. Cast or move a model before replicate(), or detach() and replicate it "
                    "again"
                )

    def resident(self, gradients: Gradients) -> torch.Tensor | None:
        """Return the flat tensor of the last time if all gradients still are its views: accumulation in
        place.
        """
        flat = None if self._last_flat is None else self._last_flat()
        if flat is None:
            return None
        start, size = flat.data_ptr(), flat.element_size()
        for gradient, (_, strides, offset) in zip(gradients, self._strided, strict=True):
            if gradient is None or gradient.requires_grad:
                return None
            if gradient.data_ptr() != start + offset * size or gradient.stride() != strides:
                return None
        return flat

    def remember(self, flat: torch.Tensor) -> None:
        """Keep a weak eye on the flat tensor; zero_grad() frees it."""
        self._last_flat = weakref.ref(flat)


class Layout:
    """A plan laid over the real parameters."""

    def __init__(self, plan: Plan, parameters: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.shelves = [Shelf(plan, bucket, parameters) for bucket in plan.buckets]
        self.counts = [len(shelf.indices) for shelf in self.shelves]
        self.home = {index: place for place, shelf in enumerate(self.shelves) for index in shelf.indices}


class LocalBackward:
    """A backward inside ``no_sync()``: it only notes what now differs between the ranks."""

    def __init__(self, local: set[int]) -> None:
        self._local = local

    def arrived(self, parameter: int) -> None:
        self._local.add(parameter)


@dataclass
class Flight:
    """A bucket that is out. ``views`` is None where all gradients are views of ``flat`` already."""

    shelf: Shelf
    flat: torch.Tensor
    views: Sequence[torch.Tensor] | None
    pending: Pending

    def land(self) -> None:
        """Wait for the collective, and see to it that the result is in the flat tensor."""
        result = self.pending.wait()
        if result is not self.flat:
            self.flat.copy_(result.view_as(self.flat))


class SyncedBackward:
    """A backward whose gradients are reduced."""

    def __init__(
        self, wiring: Wiring, layout: Layout, step: int, local: set[int], *, learn: bool = False
    ) -> None:
        self._wiring = wiring
        self._layout = layout
        self._local = local  # parameters whose .grad holds something that was never reduced
        self._learn = learn
        self._phase = Phase.COLLECTING
        self._seen: dict[int, None] = {}
        self._waiting = list(layout.counts)
        self._flights: list[Flight] = []
        self._sending = False
        self._agreed = False
        self.step = step  # after the opening: the highest step that any rank is at

    def open(self, failure: str = "") -> None:
        """Tell the others that a backward starts here, or that it cannot. Does not wait for them."""
        frame = Opening(self.step, self._layout.plan.digest, failure).pack()
        self._wiring.control.post(self._topic(b"opening"), frame)

    # ---- gradients arrive ------------------------------------------------------------------------

    def arrived(self, parameter: int) -> None:
        """Note a gradient, and send what is complete. Called by the autograd thread that wrote the
        gradient.
        """
        if parameter in self._seen:
            return
        self._seen[parameter] = None
        # A nested backward (re-entrant checkpointing) may come back to this parameter: its gradient is
        # complete only when the outermost backward ends, so its bucket waits for that.
        if engine_watch.nesting and engine_watch.nested():
            return
        place = self._layout.home[parameter]
        self._waiting[place] -= 1
        # Several device threads may be here at once; one of them sends.
        if place == len(self._flights) and not self._waiting[place] and not self._sending:
            self._send_complete()

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
        """Send the next bucket of the plan. An empty one keeps the others' collectives matched after a
        failure.
        """
        if not self._agreed:
            self._agree()
        shelf = self._layout.shelves[len(self._flights)]
        in_graph = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            gradients = [None if empty else parameter.grad for parameter in shelf.parameters]
            flat = None if empty or in_graph or not self._complete(shelf) else shelf.resident(gradients)
            views = None
            if flat is None:
                flat = shelf.fill(gradients)
                views = shelf.views(flat)
            flight = self._launch(shelf, flat, views)
            if views is not None and not in_graph and self._free_copied(shelf, gradients, views):
                flight.views = None

    def _launch(self, shelf: Shelf, flat: torch.Tensor, views: Sequence[torch.Tensor] | None) -> Flight:
        is_last = len(self._flights) + 1 == len(self._waiting)
        bucket = GradBucket(shelf.bucket.index, flat, shelf.parameters, is_last)
        flight = Flight(shelf, flat, views, self._wiring.hook(bucket, self._wiring.comm))
        self._flights.append(flight)
        return flight

    def _free_copied(self, shelf: Shelf, gradients: Gradients, views: Sequence[torch.Tensor]) -> bool:
        """Put the views in the gradients' place, so that what was copied is freed while backward still runs.

        A parameter without a gradient in this backward keeps what it has until the others have spoken. Says
        whether there was none of that kind.
        """
        seen, everyone = self._seen, True
        for index, parameter, gradient, view in zip(
            shelf.indices, shelf.parameters, gradients, views, strict=True
        ):
            if gradient is not None and index in seen:
                parameter.grad = view
            else:
                everyone = False
                seen.pop(index, None)  # autograd may have come by with nothing in its hands
        return everyone

    def _complete(self, shelf: Shelf) -> bool:
        return all(index in self._seen for index in shelf.indices)

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
        return self._wiring.control.collect(self._topic(kind), seconds or self._wiring.comm.seconds)

    # ---- backward ends ---------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """Send the rest, hear what the others used, and hand out the reduced gradients."""
        self._phase = Phase.CLOSING
        while len(self._flights) < len(self._waiting):
            self._send_next()
        if not self._agreed:
            self._agree()
        closings = self._close(Closing(self._used(), tuple(self._seen) if self._learn else ()))
        # By now every rank has sent everything, so what follows waits for no one's computation.
        failed = {rank: closing.failure for rank, closing in enumerate(closings) if closing.failure}
        transfers = self._wiring.buffers.start() if self._wiring.buffers and not failed else []
        with torch.no_grad():
            self._land()
            finish_broadcast(transfers)
        self._phase = Phase.DONE
        if failed:
            raise _peer_failed(self.step, failed)
        outcome = self._outcome(closings)
        self._hand_out(outcome.missing_everywhere)
        return outcome

    def abandon(self, failure: str) -> None:
        """End a backward that has raised here: tell the others, and leave no collective of theirs
        unanswered.
        """
        if self._phase is Phase.DONE:
            return
        if not self._agreed:
            self._agree(TELL_SECONDS)
        with torch.no_grad():
            while len(self._flights) < len(self._waiting):
                self._send_next(empty=True)
            self._close(Closing(failure=failure), TELL_SECONDS)
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

    def _hand_out(self, untouched: frozenset[int]) -> None:
        """Make every gradient a view of its reduced bucket; leave alone what no rank has added to."""
        for flight in self._flights:
            shelf = flight.shelf
            shelf.remember(flight.flat)
            if flight.views is None:
                continue
            for index, parameter, view in zip(shelf.indices, shelf.parameters, flight.views, strict=True):
                gradient = parameter.grad
                if gradient is view or index in untouched:
                    continue
                if gradient is not None and gradient.requires_grad:
                    # Part of a graph (create_graph=True): the same tensor, with the agreed value.
                    gradient.data.copy_(view)
                else:
                    parameter.grad = view


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
