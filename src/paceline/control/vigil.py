"""What a rank does while it waits for frames: tell who is missing, and find out if none can ever come."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.control.base import Topic
from paceline.control.deadlock import Canary, describe, is_sound, waits_of
from paceline.reporter import Desk
from paceline.reports import Report, Wait
from paceline.waiting import Patience, Waiter, Waiting

Boxes = Sequence[deque[bytes]]


class Waits(Protocol):
    """A control plane, as far as it can be waited with."""

    desk: Desk | None

    def missing(self, boxes: Boxes) -> list[int]:
        """Return the ranks whose frame is not there; raise PeerLost if one of them has ended."""

    def next_wait(self) -> int:
        """Give a wait that is reported its number."""

    def wait_to_report(self, number: int, topic: Topic, place: str, missing: Sequence[int]) -> Wait:
        """Write down all that tells whether a wait can ever end."""

    def give_up(self, text: str, *, ends: bool) -> None:
        """Drop every exchange that is under way, on every rank."""


class Vigil:
    """One exchange that takes long."""

    def __init__(
        self,
        control: Waits,
        topic: Topic,
        boxes: Boxes,
        patience: Patience,
        waiter: Waiter | None,
        began: float,
    ) -> None:
        self._control = control
        self._topic = topic
        self._boxes = boxes
        self._rank, self._size = patience.rank, patience.size
        self._number = control.next_wait()
        self._canary = Canary()
        self._missing: Sequence[int] = ()
        patience.desk = control.desk
        name = topic.decode(errors="replace")
        place = f"for {name}" if waiter is None else waiter.waits_for(topic)
        self._waiting = Waiting(patience, place, lambda _reports: self._missing, began)

    def look(self) -> None:
        """Look around, a few times a second. Raises what ends the wait."""
        self._missing = self._control.missing(self._boxes)
        if not self._missing:
            return
        mine = self._control.wait_to_report(self._number, self._topic, self._waiting.place, self._missing)
        self._give_up_if_stuck(mine, self._waiting.look(mine))

    def _give_up_if_stuck(self, mine: Wait, reports: Mapping[int, Report]) -> None:
        others = {rank: report.wait for rank, report in reports.items()}
        waits = waits_of(self._size, self._rank, mine, others)
        if self._canary.look(waits, {rank: report.at for rank, report in reports.items()}):
            known = [wait for wait in waits if wait is not None]
            self._control.give_up(describe(known), ends=not is_sound(known))

    def end(self) -> None:
        """Let the others know that this rank waits no more."""
        self._waiting.end()
