"""What the ranks tell each other around one backward: before its first bucket, and after its last."""

import time
from collections.abc import Callable, Sequence

from paceline.errors import RanksDisagree, name_ranks, name_some
from paceline.frames import Closing, Kind, Opening, Round
from paceline.plan import Plan
from paceline.recorder import StepRecord
from paceline.riders import Rider
from paceline.tally import Tally, ended, exhausted, peer_failed
from paceline.weights import even_share, share_of
from paceline.wiring import Wiring

PAUSE_SECONDS = 1e-4


class Meeting:
    """The frames of one backward, seen from one rank.

    After ``agree()`` the ranks know each other's openings: ``step`` is the highest that any of them is at,
    ``active`` are the ranks that still have batches, and ``share`` says how this rank's gradients count. What
    ``agree()`` raises is raised on every rank, except that a rank is lost.
    """

    def __init__(self, wiring: Wiring, plan: Plan, record: StepRecord) -> None:
        self._wiring = wiring
        self._plan = plan
        self._record = record
        self._unit: float | None = None
        self._opening = Opening(record.step, b"")  # this rank's own
        self._openings: Sequence[bytes] = ()  # everybody's, once they are there
        self._closings: Sequence[bytes] = ()
        self._closing = Closing()
        self._told = b""  # the frame that it has posted last
        self.step = record.step
        self.share = even_share(wiring.comm.size)
        self.active = self.share.counted
        self.weights: Sequence[float | None] = ()  # as given on each rank
        self.are_buffers_foretold = False  # by every rank, the same ones
        self.is_settled = False  # nothing more is said: every rank knows why
        self.has_told = False  # its closing, which cannot be taken back
        self._epoch = wiring.control.epoch
        self._opening_topic, self._closing_topic = wiring.topic(b"opening"), wiring.topic(b"closing")

    # ---- before the first bucket -----------------------------------------------------------------

    def open(self, opening: Opening, unit: float | None = None) -> None:
        """Tell the others that a backward starts here, or that it cannot. Does not wait for them."""
        self._unit, self._opening, self._told = unit, opening, opening.pack()
        self._wiring.control.post(self._opening_topic, self._told)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has opened."""
        return self._wiring.control.ready(self._opening_topic)

    def completes_while(self, may_wait: Callable[[], bool]) -> bool:
        """Wait until every rank has opened, as long as that is allowed; tell whether they have.

        After the time at which a wait is told of, it is left to ``agree()``, which tells.
        """
        since, until = self._record.waits(), time.monotonic() + self.stall_seconds / 2
        while (is_allowed := may_wait()) and not self.is_complete and time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)
        self._record.has_waited(since)
        return is_allowed or self.is_complete

    def agree(self, seconds: float | None = None) -> None:
        """Wait for everybody's opening. Nothing is added up unless all are at the same step with the same
        plan.
        """
        if not self._openings:
            since = self._record.waits()
            self._openings = self._collect(self._opening_topic, seconds)
            self._record.has_waited(since)
        frames = self._openings
        try:
            if self._opening.is_plain and frames.count(self._told) == len(frames):
                self._agree_with([self._opening] * len(frames))
                return
            openings = [Opening.unpack(frame) for frame in frames]
            self.step = max(opening.step for opening in openings)
            self._compare(openings)
        except Exception:  # on every rank alike
            self.is_settled = True
            raise

    def _agree_with(self, openings: Sequence[Opening]) -> None:
        """Go on with ranks that have told the same, and nothing out of the ordinary."""
        self.weights = [None] * len(openings)
        self.are_buffers_foretold = bool(self._opening.buffers)
        if any(self._opening.told):
            self._hand_to_riders(openings, self.active)
            return
        silence = [b""] * len(openings)
        for _, rider in self._wiring.hearing["opened"]:
            if self._wiring.joining is None or rider.is_for_join:
                rider.opened(self.step, silence, self.active)

    def _compare(self, openings: Sequence[Opening]) -> None:
        failed = {rank: opening.failure for rank, opening in enumerate(openings) if opening.failure}
        if failed:
            raise peer_failed(self.step, failed, openings[min(failed)].where)
        self._refuse_end(openings)
        self._refuse_change(openings)
        if len({(opening.step, opening.digest, opening.terms) for opening in openings}) > 1:
            raise self._disagreement(openings)
        self._refuse_other_weights(openings)
        self.weights = [opening.weight for opening in openings]
        foretold = {opening.buffers for opening in openings}
        self.are_buffers_foretold = len(foretold) == 1 and foretold != {b""}
        joining, everyone = self._wiring.joining, range(self._wiring.comm.size)
        self.active = [rank for rank, opening in enumerate(openings) if opening.kind is not Kind.JOINED]
        if joining is not None and joining.early == "stop" and 0 < len(self.active) < len(everyone):
            raise exhausted([rank for rank in everyone if rank not in self.active])
        by_all = joining is not None and joining.divide_by == "initial"
        self.share = share_of(self._wiring.comm.rank, openings, self._unit, divide_by_all=by_all)
        present = [rank for rank, opening in enumerate(openings) if opening.kind is Kind.BACKWARD]
        self._hand_to_riders(openings, present)

    def _hand_to_riders(self, openings: Sequence[Opening], present: Sequence[int]) -> None:
        for rider, told in self._riders("opened", [opening.told for opening in openings]):
            if self._wiring.joining is None or rider.is_for_join:
                rider.opened(self.step, told, present)

    def _riders(self, call: str, told: Sequence[Sequence[bytes]]) -> Sequence[tuple[Rider, Sequence[bytes]]]:
        """Return each rider that hears a call, with what every rank had it say."""
        return [
            (rider, [parts[place] if parts else b"" for parts in told])
            for place, rider in self._wiring.hearing[call]
        ]

    def _refuse_end(self, openings: Sequence[Opening]) -> None:
        """Refuse to go on without ranks that have ended their loop."""
        left = {rank: opening.step for rank, opening in enumerate(openings) if opening.kind is Kind.LEFT}
        if left:
            raise ended(self.step, left)

    def _refuse_change(self, openings: Sequence[Opening]) -> None:
        changed = [rank for rank, opening in enumerate(openings) if opening.kind is Kind.CHANGED]
        if 0 < len(changed) < len(openings):
            raise RanksDisagree(
                f"step {self.step}: the module has got other parameters on {name_ranks(changed)} only: "
                f"{self._odd_lines()}. Change it at the same point on every rank. The gradients were dropped "
                "on every rank."
            )

    def _refuse_other_weights(self, openings: Sequence[Opening]) -> None:
        """Refuse gradients of ranks that have made different numbers of optimizer steps."""
        here = {r: o.stepped for r, o in enumerate(openings) if o.kind is not Kind.JOINED}
        if self._wiring.joining is None and len(set(here.values())) > 1:
            where = ", ".join(f"rank {rank} has made {count}" for rank, count in here.items())
            error = RanksDisagree(
                f"step {self.step}: the ranks have made different numbers of optimizer steps, so their "
                f"weights differ: {where}. Step on every rank after each reduced backward, also after "
                "skip(). To go on, load a checkpoint on every rank, or call take_state() of the replica. The "
                "gradients were dropped on every rank."
            )
            error.is_about_steps = True
            raise error

    def _disagreement(self, openings: Sequence[Opening]) -> RanksDisagree:
        steps = [opening.step for opening in openings]
        if len(set(steps)) > 1:
            where = ", ".join(f"rank {rank} is at step {step}" for rank, step in enumerate(steps))
            return RanksDisagree(
                f"the ranks are not at the same step: {where}. A rank has run a backward more or less than "
                "the others; make every rank run the same number of backwards. The gradients were dropped "
                "on every rank."
            )
        return RanksDisagree(
            f"step {self.step}: the ranks would send different buckets. Only some ranks have: "
            f"{self._odd_lines()}. Give every rank the same parameters, frozen and trainable alike, the same "
            "bucket sizes and the same hook. The gradients were dropped on every rank."
        )

    def _odd_lines(self) -> str:
        """Name what only some ranks have: parameters, else their places in the buckets and the settings."""
        specs = [self._plan.specs[index] for index in self._plan.members]
        parameters = "\n".join(f"{spec.name} {spec.shape}" for spec in specs)
        places = "\n".join([*self._plan.lines(), *self._wiring.terms])
        frames = [frame.decode() for frame in self.exchange(b"plan", f"{parameters}\0{places}".encode())]
        for sides in zip(*(frame.split("\0") for frame in frames), strict=True):
            if odd := _odd([side.split("\n") for side in sides]):
                return name_some(odd)
        return "another order of the same parameters"

    # ---- after the last bucket -------------------------------------------------------------------

    @property
    def source(self) -> int:
        """The rank whose buffers are taken."""
        return (*self.share.counted, *self.active)[0]

    def tell(self, closing: Closing) -> None:
        """Tell the others what was used here, or what went wrong. Does not wait for them."""
        self._closing, self._told = closing, closing.pack()
        # Noted first: a frame that is missing is found out, one too many would be taken for the next step's.
        self.has_told = True
        self._wiring.control.post(self._closing_topic, self._told)

    def hear(self, seconds: float | None = None) -> Tally:
        """Hear the same of them."""
        if not self._closings:
            self._closings = self._collect(self._closing_topic, seconds)
        frames = self._closings
        if frames.count(self._told) == len(frames):
            closings, is_plain = [self._closing] * len(frames), self._closing.is_plain
        else:
            closings, is_plain = [Closing.unpack(frame) for frame in frames], False
        return Tally(closings, self._plan, self.step, self.share.counted, is_plain=is_plain)

    def asks_to_drop(self, tally: Tally) -> bool:
        """Let the riders judge; tell whether one wants the step to be dropped. Raises on every rank alike."""
        if not self._wiring.hearing["closed"]:
            return False
        told = self._riders("closed", [closing.told for closing in tally.closings])
        wishes = [rider.closed(self.step, parts) for rider, parts in told]
        return any(wishes)

    def confirm(self, told: Round) -> list[Round]:
        """Tell the others how a round of a hook's collectives went, and hear the same of them."""
        return [Round.unpack(frame) for frame in self.exchange(b"round", told.pack())]

    def exchange(self, kind: bytes, frame: bytes, seconds: float | None = None) -> list[bytes]:
        """Tell every rank something, and hear what every rank tells."""
        seconds = seconds or self._wiring.comm.seconds
        try:
            return self._wiring.control.exchange(self._wiring.topic(kind), frame, seconds, self)
        except RanksDisagree:
            self.is_settled = True
            raise

    def _collect(self, topic: bytes, seconds: float | None = None) -> list[bytes]:
        try:
            return self._wiring.control.hear(topic, seconds or self._wiring.comm.seconds, self)
        except RanksDisagree:
            self.is_settled = True
            raise

    # ---- what is said of a wait ------------------------------------------------------------------

    @property
    def is_void(self) -> bool:
        """Whether all ranks have dropped every exchange that was under way, this one's included."""
        return self._epoch != self._wiring.control.epoch

    @property
    def stall_seconds(self) -> float:
        """See Waiter."""
        return self._wiring.comm.stall_seconds

    def waits_for(self, topic: bytes) -> str:
        """See Waiter."""
        kind, buckets, sent = topic.rpartition(b".")[2].decode(), self._plan.buckets, self._record.buckets
        where = f"in step {self.step} of {self._wiring.title}"
        if kind == "opening" and sent < len(buckets):
            names = [self._plan.specs[slot.parameter].name for slot in buckets[sent].slots]
            return f"{where} for bucket {sent + 1} of {len(buckets)} ({name_some(names)})"
        if kind == "closing":
            return f"{where} for the end of backward, with {sent} of {len(buckets)} buckets sent"
        return f"{where} for {kind or f'{len(buckets)} buckets that are on their way'}"


def _odd(everyone: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines that only some ranks have, with these ranks."""
    common = set(everyone[0]).intersection(*everyone[1:])
    lines = dict.fromkeys(line for lines in everyone for line in lines if line not in common)
    return [
        f"{line} ({name_ranks([r for r, have in enumerate(everyone) if line in have])})" for line in lines
    ]
