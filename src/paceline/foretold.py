"""Buffers that every forward writes, as BatchNorm's figures: they go out behind the last bucket, unasked.

    opening   every rank says, by a digest, which ones it has        foretell()
    the end   if all have said the same, they go out                 send()
    closing   what has changed since is asked about, like the rest   rest()
    landed    they are written on every rank, or on none             take(), drop()

Only where all ranks send in one order whatever happens: the hook cannot fail on one rank alone, and no other
replica may be reached by the same backward, whose buckets go out during it on one rank and at its end on
another. A rank whose backward raises still sends its share.
"""

from paceline.buffers import Turn
from paceline.meeting import Meeting
from paceline.recorder import StepRecord
from paceline.wiring import Wiring


class Foretold:
    """The buffers of one backward that are to be sent unasked."""

    turn: Turn | None = None

    def __init__(self, wiring: Wiring, meeting: Meeting, record: StepRecord) -> None:
        self._wiring = wiring
        self._meeting = meeting
        self._record = record

    def foretell(self, step: int) -> bytes:
        """Find out which they are, and return what stands for them; nothing, if there are none."""
        # A hook in torch's form may start collectives from callbacks, in whatever order.
        if self._wiring.is_sure and self._wiring.is_counted:
            self.turn = self._due(step, is_busy=True)
        return self.turn.foretell() if self.turn else b""

    def rest(self, step: int) -> Turn | None:
        """Return the turn in which the ranks ask each other: of all buffers, but for what has been sent."""
        return self._due(step, beside=self.turn)

    def _due(self, step: int, *, is_busy: bool = False, beside: Turn | None = None) -> Turn | None:
        if self._wiring.buffers is None:
            return None
        # Among ranks that may run out of batches no forward can be waited for.
        with_forward = self._wiring.joining is not None
        return self._wiring.buffers.turn_after_backward(
            step, with_forward=with_forward, is_busy=is_busy, beside=beside
        )

    @property
    def are_due(self) -> bool:
        """Whether all ranks have foretold the same, and wait for them."""
        return self.turn is not None and self._meeting.are_buffers_foretold

    @property
    def are_missing(self) -> bool:
        """Whether the others wait for something that has not been sent here."""
        return self.are_due and self.turn is not None and not self.turn.is_on_its_way

    def send(self) -> None:
        """Send them, once, if they are due."""
        if self.are_due and self.turn is not None and not self.turn.has_begun:
            self.turn.send_as_foretold(self._meeting.source)
            self._record.counts(self.turn.tensors, self.turn.messages)

    def take(self) -> None:
        """Write what was sent."""
        self._land(are_dropped=False)

    def drop(self) -> None:
        """Wait for what was sent, and leave everything as it is."""
        self._land(are_dropped=True)

    def _land(self, *, are_dropped: bool) -> None:
        turn = self.turn
        if turn is None or not turn.has_begun:
            return
        self._wiring.comm.waits(self._meeting)
        try:
            turn.drop() if are_dropped else turn.take()
        finally:
            self._wiring.comm.waits(None)
