"""Frames over stream sockets: every rank is wired to every other.

    post      puts a frame behind those that have had no room yet, and sends what there is room for
    ready     sends what there is room for by now, and takes in what has come
    collect   does so until all frames have come, and this rank's own ones have gone

Who waits, be it for a frame or for room to send one, takes in what comes from anybody meanwhile. So two ranks
that send each other more than the kernel holds do not wait for each other. And who has collected leaves
nothing behind that others wait for while it is somewhere else.
"""

import os
import select
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.activity import trainer
from paceline.control.base import Control, Topic, pack, unpack
from paceline.control.links import Link, framed
from paceline.control.lost import FORKED, TORN, ClosedHere, gone, stuck
from paceline.control.vigil import Vigil
from paceline.errors import PeerLost, RanksDisagree
from paceline.reports import Wait
from paceline.waiting import LOOK_SECONDS, STALL_SECONDS, Patience, Waiter

MOST_LEFT_NBYTES = 1 << 29  # of frames that a rank leaves unread
GIVEN_UP: Topic = b"\0given up"  # no replica has such a name
_GIVEN_UP = struct.Struct("!Q?")

_TAKE = deque[bytes].popleft

_controls: "weakref.WeakSet[SocketControl]" = weakref.WeakSet()


class SocketControl(Control):
    """Every rank wired to every other. As it is, for ranks of one machine.

    Whatever is interrupted between the first of its effects and the last closes all links: the others then
    hear of a lost rank, where they would go on with a frame more or less than this one.
    """

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
        self._crowded: set[int] = set()  # ranks to which something has had no room yet
        self._closed: ClosedHere | None = None  # why this process itself has closed its links
        # Autograd's threads look in at once. Held while something is read or written, never while one waits.
        self._lock = threading.RLock()
        _controls.add(self)

    def post(self, topic: Topic, frame: bytes) -> None:
        message = self._wrap(pack(topic, frame))
        with self._lock:
            if self._closed is not None or self._crowded:
                self._check_may_post()
            try:
                self._keep(self._rank, topic, frame)
                self._send(message)
            except BaseException:
                self.close(TORN)
                raise

    def ready(self, topic: Topic) -> bool:
        if self._crowded:
            self._send_rest()
        if self._refusal is not None:
            return True
        for rank, box in enumerate(self._inbox.get(topic) or self._boxes_of(topic)):
            if not box and not self._drain(rank, box):
                return False
        return True

    def peek(self, topic: Topic) -> list[bytes]:
        boxes = enumerate(self._boxes_of(topic))
        return [box[0] for rank, box in boxes if rank != self._rank and self._drain(rank, box) and box]

    def _drain(self, rank: int, box: deque[bytes]) -> bool:
        """Take in what a rank has sent, without waiting; tell whether that ends the waiting for a frame."""
        try:
            return self._take_in(rank, box)
        except PeerLost:
            return True

    def _take_in(self, rank: int, box: deque[bytes]) -> bool:
        """Keep what has come from a rank, up to the frame for a box; tell whether it is there."""
        with self._lock:
            try:
                while not box and (message := self._next_message(rank)) is not None:
                    self._keep(rank, *unpack(message))
            except PeerLost:
                raise
            except BaseException:
                self.close(TORN)
                raise
        return bool(box)

    def _boxes_of(self, topic: Topic) -> Sequence[deque[bytes]]:
        boxes = self._inbox.get(topic)
        if boxes is None:
            boxes = self._inbox.setdefault(topic, [deque() for _ in self._heard])
        return boxes

    def collect(self, topic: Topic, seconds: float, waiter: Waiter | None = None) -> list[bytes]:
        if self._refusal is not None:
            self._refuse()
        boxes = self._inbox.get(topic) or self._boxes_of(topic)
        has_all = not self._crowded
        for rank, box in enumerate(boxes):
            has_all = has_all and bool(box or (self._drain(rank, box) and box))
        if not has_all:
            self._wait_for(topic, boxes, seconds, waiter)
        # Taken out only when all are there: who is interrupted while waiting can collect again.
        try:
            return list(map(_TAKE, boxes))
        except BaseException:
            self.close(TORN)
            raise

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
            while not self._complete(boxes, began, until):
                if vigil is None:
                    patience = Patience(self._rank, len(boxes), seconds, stall_seconds)
                    vigil = Vigil(self, topic, boxes, patience, waiter, began)
                vigil.look()
                until = time.monotonic() + pause
        finally:
            if vigil is not None:
                vigil.end()

    def _complete(self, boxes: Sequence[deque[bytes]], began: float, until: float) -> bool:
        """Wait until all frames have come and gone, or it is time to look around; tell whether they have."""
        try:
            for rank, box in enumerate(boxes):
                while not box:
                    self._receive(rank, box, began, until)
                    self._refuse()
            while self._crowded:
                self._wait_for_room(began, until)
                self._refuse()
        except TimeoutError:
            self._refuse()
            return False
        return True

    def missing(self, boxes: Sequence[deque[bytes]]) -> list[int]:
        """Return the ranks that have not sent their frame, or not read what they were sent; raise PeerLost if
        one of them has ended.
        """
        self._send_rest()
        found = []
        for rank, box in enumerate(boxes):
            if rank in self._crowded or not (box or self._take_in(rank, box)):
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
            trainer.is_one and not self._crowded,
        )

    def next_wait(self) -> int:
        """Give a wait that is reported its number."""
        self._waits += 1
        return self._waits

    def give_up(self, text: str, *, ends: bool) -> None:
        """Drop every exchange that is under way, here and, by a frame that says so, on every other rank."""
        with self._lock, self._whole():
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
            with self._lock, self._whole():
                self._refusal = None
                for boxes in self._inbox.values():
                    boxes[self._rank].clear()
                self._heard[self._rank] = 0
                self._send(self._wrap(self._parting))
            raise refusal

    # ---- what goes over the wires ----------------------------------------------------------------

    def _wrap(self, message: bytes) -> bytes:
        """Make a message what is sent. Raises ValueError if it is too long for that."""
        return framed(message)

    def _send(self, frame: bytes) -> None:
        """Have a wrapped message sent to every rank, now or later."""
        for link in self._links.values():
            link.put(frame)
        self._flush()

    def _flush(self) -> None:
        """Send what there is room for."""
        self._crowded = {peer for peer, link in self._links.items() if not link.flush()}

    def _send_rest(self) -> None:
        with self._lock, self._whole():
            self._flush()

    def _left(self, peer: int) -> int:
        """Return how many bytes have had no room yet on the way to a rank."""
        return self._links[peer].left

    def _next_message(self, rank: int) -> bytes | None:
        """Return the next message of a rank if it has come; raise PeerLost if none can come any more."""
        try:
            return self._links[rank].receive()
        except (EOFError, OSError) as error:
            raise gone(rank, error) from error

    def _receive(self, rank: int, box: deque[bytes], began: float, until: float) -> None:
        """Return when what has come from a rank is kept; raise TimeoutError, or PeerLost. ``began``: for how
        long it has been waited for.
        """
        while not self._take_in(rank, box) and self._refusal is None:
            self._wait_for_room(began, until)

    def _wait_for_room(self, began: float, until: float) -> None:
        """Wait until something comes, from whomever, or there is room for what is left; see to it.

        Raises TimeoutError if neither happens, or if a rank ends: that is worth a look around at once.
        """
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        poller = select.poll()
        for number, rank in list(self._open.items()):
            poller.register(number, select.POLLIN | (select.POLLOUT if rank in self._crowded else 0))
        ready = [number for number, _ in poller.poll(left * 1000)]
        ended = False
        with self._lock:
            for number in ready:
                try:
                    if number in self._open:
                        self._links[self._open[number]].fill()
                except (EOFError, OSError):  # reading on shows it again
                    del self._open[number]
                    ended = True
            if self._crowded:
                self._send_rest()
        if ended or not ready:
            raise TimeoutError

    def _keep(self, rank: int, topic: Topic, frame: bytes) -> None:
        if topic == GIVEN_UP:
            self._on_given_up(rank, frame)
        elif rank not in self._behind:
            self._heard[rank] += 1
            (self._inbox.get(topic) or self._boxes_of(topic))[rank].append(frame)

    # ---- what this process does to itself --------------------------------------------------------

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Close all links if what is done is interrupted."""
        try:
            yield
        except BaseException:
            self.close(TORN)
            raise

    def _check_may_post(self) -> None:
        """Raise, before anything of a frame is kept or sent, if it cannot go to everybody."""
        if self._closed is not None:
            raise gone(self._rank, self._closed)
        for peer in self._crowded:
            if (left := self._left(peer)) > MOST_LEFT_NBYTES:
                raise stuck(peer, left)

    def close(self, why: str) -> None:
        """Close the link to every rank. ``why`` is what this process says of it later."""
        self._closed = self._closed or ClosedHere(why)
        self._crowded = set()
        for link in self._links.values():
            link.close(why)


def _leave_to_parent() -> None:
    # The frames of a fork would pass for its parent's. The thread that holds the lock may not be in here.
    for control in list(_controls):
        control._lock = threading.RLock()
        control.close(FORKED)


os.register_at_fork(after_in_child=_leave_to_parent)
