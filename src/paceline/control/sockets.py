"""Frames over stream sockets: every rank is wired to every other.

Who waits, be it for a frame or for room to send one, takes in what comes from anybody meanwhile. So two ranks
that send each other more than the kernel holds do not wait for each other.
"""

import errno
import select
import struct
import time
from collections import deque
from collections.abc import Collection, Sequence

from paceline.activity import trainer
from paceline.control.base import Control, Topic, pack, unpack
from paceline.control.links import Link, framed
from paceline.control.vigil import Vigil
from paceline.errors import PeerLost, PeerTimeout, RanksDisagree
from paceline.reports import Wait
from paceline.waiting import LOOK_SECONDS, STALL_SECONDS, Patience, Waiter

UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
ROOM_SECONDS = 1800.0  # how long a rank may leave unread what it is sent
GIVEN_UP: Topic = b"\0given up"  # no replica has such a name
_GIVEN_UP = struct.Struct("!Q?")


class SocketControl(Control):
    """Every rank of one machine wired to every other."""

    posts_alone = True
    is_local = True

    def __init__(self, rank: int, links: dict[int, Link]) -> None:
        super().__init__()
        self._rank = rank
        self._links = links
        self._inbox: dict[Topic, Sequence[deque[bytes]]] = {}  # what has come, by rank
        self._open = {link.fileno(): peer for peer, link in links.items()}  # ranks that have not ended
        self._heard = [0] * (len(links) + 1)  # frames of each rank, this one included, in this epoch
        self._waits = 0
        self._behind: set[int] = set()  # ranks whose frames are still of the last epoch
        self._refusal: RanksDisagree | None = None  # why the epoch has ended, until it is raised
        self._parting = b""  # what the others are told then

    def post(self, topic: Topic, frame: bytes) -> None:
        self._keep(self._rank, topic, frame)
        self._send(pack(topic, frame))

    def ready(self, topic: Topic) -> bool:
        if self._refusal is not None:
            return True
        return all(box or self._drain(rank, box) for rank, box in enumerate(self._boxes_of(topic)))

    def peek(self, topic: Topic) -> list[bytes]:
        boxes = enumerate(self._boxes_of(topic))
        return [box[0] for rank, box in boxes if rank != self._rank and self._drain(rank, box) and box]

    def _drain(self, rank: int, box: deque[bytes]) -> bool:
        """Take in what a rank has sent, without waiting; tell whether that ends the waiting for a frame."""
        try:
            while not box and (message := self._next_message(rank)) is not None:
                self._keep(rank, *unpack(message))
        except PeerLost:
            return True
        return bool(box)

    def _boxes_of(self, topic: Topic) -> Sequence[deque[bytes]]:
        boxes = self._inbox.get(topic)
        if boxes is None:
            boxes = self._inbox.setdefault(topic, [deque() for _ in self._heard])
        return boxes

    def collect(self, topic: Topic, seconds: float, waiter: Waiter | None = None) -> list[bytes]:
        if self._refusal is not None:
            self._refuse()
        boxes = self._boxes_of(topic)
        for rank, box in enumerate(boxes):
            if not box and not (self._drain(rank, box) and box):
                self._wait_for(topic, boxes, seconds, waiter)
                break
        # Taken out only when all are there: who is interrupted while waiting can collect again.
        return [box.popleft() for box in boxes]

    def _wait_for(
        self, topic: Topic, boxes: Sequence[deque[bytes]], seconds: float, waiter: Waiter | None
    ) -> None:
        """Return when every rank has sent its frame; raise when one cannot or does not."""
        self._refuse()
        began = time.monotonic()
        stall_seconds = STALL_SECONDS if waiter is None else waiter.stall_seconds
        pause = min(LOOK_SECONDS, seconds, stall_seconds)
        vigil: Vigil | None = None
        until = began + pause
        try:
            for rank, box in enumerate(boxes):
                while not box:
                    # First in, first out: what comes before the frame we want belongs to another topic.
                    try:
                        self._keep(rank, *unpack(self._receive(rank, began, until)))
                    except TimeoutError:
                        if vigil is None:
                            patience = Patience(self._rank, len(boxes), seconds, stall_seconds)
                            vigil = Vigil(self, topic, boxes, patience, waiter, began)
                        vigil.look()
                        until = time.monotonic() + pause
                    self._refuse()
        finally:
            if vigil is not None:
                vigil.end()

    def missing(self, boxes: Sequence[deque[bytes]]) -> list[int]:
        """Return the ranks whose frame is not there; raise PeerLost if one of them has ended."""
        found = []
        for rank, box in enumerate(boxes):
            if not box and self._drain(rank, box) and not box:
                raise gone(rank)
            if not box:
                self._check_lives(rank)
                found.append(rank)
        return found

    def _check_lives(self, rank: int) -> None:
        """Raise PeerLost if a rank has ended. With local sockets, reading shows it."""

    # ---- exchanges that cannot end ---------------------------------------------------------------

    def wait_to_report(self, number: int, topic: Topic, place: str, missing: Sequence[int]) -> Wait:
        """Write down all that tells whether a wait can ever end."""
        heard = list(self._heard)
        return Wait(
            number,
            self.epoch,
            topic.decode(errors="replace"),
            place,
            list(missing),
            heard[self._rank],
            heard,
            self.trace,
            trainer.is_one,
        )

    def next_wait(self) -> int:
        """Give a wait that is reported its number."""
        self._waits += 1
        return self._waits

    def give_up(self, text: str, *, ends: bool) -> None:
        """Drop every exchange that is under way, here and, by a frame that says so, on every other rank."""
        self._begin_epoch(text, ends=ends)
        self._refuse()

    def _on_given_up(self, rank: int, frame: bytes) -> None:
        epoch, ends = _GIVEN_UP.unpack_from(frame)
        if epoch == self.epoch:
            self._begin_epoch(frame[_GIVEN_UP.size :].decode(), ends=ends)
        # What follows on this link is new.
        self._behind.discard(rank)

    def _begin_epoch(self, text: str, *, ends: bool) -> None:
        self._refusal = RanksDisagree(text)
        self._refusal.is_known = True
        if ends:
            self.ended = self._refusal
        self._parting = pack(GIVEN_UP, _GIVEN_UP.pack(self.epoch, ends) + text.encode())
        self.epoch += 1
        self._inbox.clear()
        self._heard = [0] * len(self._heard)
        self._behind = set(self._links)

    def _refuse(self) -> None:
        """Raise if the exchanges were given up, and let the others know where the new ones begin."""
        if (refusal := self._refusal) is not None:
            self._refusal = None
            for boxes in self._inbox.values():
                boxes[self._rank].clear()
            self._heard[self._rank] = 0
            self._send(self._parting)
            raise refusal

    # ---- what goes over the wires ----------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        frame = framed(message)
        for link in self._links.values():
            link.put(frame)  # before any is out: who is interrupted now sends it to all the next time
        crowded = {peer for peer, link in self._links.items() if not link.flush()}
        until = time.monotonic() + ROOM_SECONDS
        while crowded:
            self._take_in(LOOK_SECONDS, crowded)
            for peer in crowded:
                self._check_lives(peer)
            crowded = {peer for peer in crowded if not self._links[peer].flush()}
            if crowded and time.monotonic() > until:
                raise stuck(min(crowded), "what it is sent")

    def _next_message(self, rank: int) -> bytes | None:
        """Return the next message of a rank if it has come; raise PeerLost if none can come any more."""
        try:
            return self._links[rank].receive()
        except (EOFError, OSError) as error:
            raise gone(rank, error) from error

    def _receive(self, rank: int, began: float, until: float) -> bytes:
        """Return the next message of a rank, or raise TimeoutError or PeerLost. ``began``: for how long it
        has been waited for.
        """
        while (message := self._next_message(rank)) is None:
            left = until - time.monotonic()
            # Who has ended may be another one that is waited for: that is worth a look at once.
            if left <= 0 or not self._take_in(left):
                raise TimeoutError
        return message

    def _take_in(self, seconds: float, crowded: Collection[int] = ()) -> bool:
        """Wait until something comes, from whomever, or there is room on the way to a crowded rank.

        Tells whether anything has happened, and nobody has ended.
        """
        poller = select.poll()
        for number, rank in self._open.items():
            poller.register(number, select.POLLIN | (select.POLLOUT if rank in crowded else 0))
        ready = [number for number, _ in poller.poll(seconds * 1000)]
        ended = []
        for number in ready:
            try:
                self._links[self._open[number]].fill()
            except (EOFError, OSError):  # reading on shows it again
                ended.append(self._open.pop(number))
        return bool(ready) and not ended

    def _keep(self, rank: int, topic: Topic, frame: bytes) -> None:
        if topic == GIVEN_UP:
            self._on_given_up(rank, frame)
        elif rank not in self._behind:
            self._heard[rank] += 1
            self._boxes_of(topic)[rank].append(frame)


def gone(rank: int, error: Exception | None = None) -> PeerLost:
    """Say that a rank has ended."""
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return PeerLost(
            f"rank {rank} is gone: its machine does not answer any more ({error.strerror}). The machine is "
            "down, or the network to it is.",
            rank,
        )
    return PeerLost(
        f"rank {rank} is gone: it closed its connection. Its process has ended, or it left the world "
        "early; its own last message says why.",
        rank,
    )


def stuck(rank: int, what: str) -> PeerTimeout:
    """Say that a rank reads nothing."""
    return PeerTimeout(
        f"rank {rank} has left {what} unread for {ROOM_SECONDS:g} s. It is stuck; look at what that rank is "
        "doing.",
        rank,
    )
