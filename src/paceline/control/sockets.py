"""Every rank of a machine wired to every other by a local stream socket.

The sockets are in Linux's abstract name space: nothing listens on a network, and no file is left behind. A
caller has to know the key that the ranks have shared over the group.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

from paceline.activity import trainer
from paceline.control.base import Control, Topic, pack, unpack
from paceline.control.vigil import Vigil
from paceline.errors import PeerLost, RanksDisagree
from paceline.reports import Wait
from paceline.waiting import LOOK_SECONDS, STALL_SECONDS, Patience, Waiter

SETUP_SECONDS = 60.0
GIVEN_UP: Topic = b"\0given up"  # no replica has such a name
_GIVEN_UP = struct.Struct("!Q?")


class SocketControl(Control):
    """Every rank wired to every other by a local stream socket."""

    posts_alone = True
    is_local = True

    def __init__(self, rank: int, links: dict[int, Connection]) -> None:
        super().__init__()
        self._rank = rank
        self._links = links
        self._inbox: dict[Topic, Sequence[deque[bytes]]] = {}  # what has come, by rank
        self._pollers = {peer: _poller(link) for peer, link in links.items()}
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
        while not box and self._has_sent(rank):
            try:
                self._keep(rank, *unpack(self._receive(rank, 0.0, 0.0)))
            except PeerLost:
                return True
        return bool(box)

    def _has_sent(self, rank: int) -> bool:
        return bool(self._pollers[rank].poll(0))

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
        """Raise PeerLost if a rank has ended. With sockets, reading shows it."""

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

    def _send(self, message: bytes) -> None:
        dead = [peer for peer, link in self._links.items() if not _sent(link, message)]
        if dead:
            raise gone(dead[0])

    def _receive(self, rank: int, began: float, until: float) -> bytes:
        """Return the next message of a rank, or raise TimeoutError or PeerLost. ``began``: for how long it
        has been waited for.
        """
        if not self._pollers[rank].poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError
        try:
            return self._links[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise gone(rank) from error

    def _keep(self, rank: int, topic: Topic, frame: bytes) -> None:
        if topic == GIVEN_UP:
            self._on_given_up(rank, frame)
        elif rank not in self._behind:
            self._heard[rank] += 1
            self._boxes_of(topic)[rank].append(frame)


def this_host() -> str:
    """Name what two processes have to share to reach each other by an abstract socket."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def listen(backlog: int) -> socket.socket:
    """Open this rank's door."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0paceline-" + secrets.token_hex(16))
    listener.listen(backlog)
    return listener


def call(address: str, key: bytes, rank: int) -> Connection:
    """Knock at another rank's door, and say who calls."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(SETUP_SECONDS)
    link.connect("\0" + address)
    link.setblocking(True)
    connection = Connection(link.detach())
    connection.send_bytes(_pass(key, rank) + struct.pack("!I", rank))
    return connection


def answer(listener: socket.socket, key: bytes, deadline: float) -> dict[int, Connection]:
    """Take one caller in. A stranger, who cannot name the key, is sent away."""
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        link, _ = listener.accept()
    except TimeoutError:
        raise PeerLost(
            f"a rank did not connect within {SETUP_SECONDS:g} s; look for the one that failed"
        ) from None
    connection = Connection(link.detach())
    try:
        if not connection.poll(SETUP_SECONDS):
            raise EOFError
        hello = connection.recv_bytes(64)
        (rank,) = struct.unpack("!I", hello[32:])
    except (EOFError, OSError, struct.error):
        connection.close()
        return {}
    if not hmac.compare_digest(hello[:32], _pass(key, rank)):
        connection.close()
        return {}
    return {rank: connection}


def _pass(key: bytes, rank: int) -> bytes:
    return hmac.digest(key, struct.pack("!I", rank), "sha256")


def _poller(link: Connection) -> "select.poll":
    poller = select.poll()
    poller.register(link.fileno(), select.POLLIN)
    return poller


def _sent(link: Connection, message: bytes) -> bool:
    try:
        link.send_bytes(message)
    except OSError:
        return False
    return True


def gone(rank: int) -> PeerLost:
    """Say that a rank has ended."""
    return PeerLost(
        f"rank {rank} is gone: it closed its connection. Its process has ended, or it left the world "
        "early; its own last message says why.",
        rank,
    )
