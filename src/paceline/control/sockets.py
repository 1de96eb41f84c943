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
from multiprocessing.connection import Connection

from paceline.control.base import Control, Topic, pack, unpack
from paceline.errors import PeerLost

SETUP_SECONDS = 60.0


class SocketControl(Control):
    """Every rank wired to every other by a local stream socket."""

    def __init__(self, rank: int, links: dict[int, Connection]) -> None:
        super().__init__()
        self._rank = rank
        self._links = links
        self._inbox: dict[tuple[int, Topic], deque[bytes]] = {}
        self._pollers = {peer: _poller(link) for peer, link in links.items()}

    def post(self, topic: Topic, frame: bytes) -> None:
        self._keep(self._rank, topic, frame)
        self._send(pack(topic, frame))

    def ready(self, topic: Topic) -> bool:
        return all(box or self._drain(rank, box) for rank, box in enumerate(self._boxes_of(topic)))

    def _drain(self, rank: int, box: deque[bytes]) -> bool:
        """Take in what a rank has sent, without waiting; tell whether that ends the waiting for a frame."""
        while not box and self._has_sent(rank):
            try:
                self._keep(rank, *unpack(self._receive(rank, 0.0)))
            except PeerLost:
                return True
        return bool(box)

    def _has_sent(self, rank: int) -> bool:
        return bool(self._pollers[rank].poll(0))

    def _boxes_of(self, topic: Topic) -> list[deque[bytes]]:
        return [self._inbox.setdefault((rank, topic), deque()) for rank in range(len(self._links) + 1)]

    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        boxes = self._boxes_of(topic)
        for rank, box in enumerate(boxes):
            self._fill(rank, box, deadline, seconds)
        # Taken out only when all are there: who is interrupted while waiting can collect again.
        return [box.popleft() for box in boxes]

    def _fill(self, rank: int, box: deque[bytes], deadline: float, seconds: float) -> None:
        while not box:
            # First in, first out: what comes before the frame we want belongs to another topic.
            try:
                self._keep(rank, *unpack(self._receive(rank, deadline)))
            except TimeoutError:
                raise PeerLost(
                    f"rank {rank} did not answer for {seconds:g} s. It is stuck or much slower than the "
                    "others; look at what that rank is doing, or give the process group a longer timeout.",
                    rank,
                ) from None

    def _send(self, message: bytes) -> None:
        dead = [peer for peer, link in self._links.items() if not _sent(link, message)]
        if dead:
            raise gone(dead[0])

    def _receive(self, rank: int, deadline: float) -> bytes:
        """Return the next message of a rank, or raise TimeoutError or PeerLost."""
        if not self._pollers[rank].poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        try:
            return self._links[rank].recv_bytes()
        except (EOFError, OSError) as error:
            raise gone(rank) from error

    def _keep(self, rank: int, topic: Topic, frame: bytes) -> None:
        self._inbox.setdefault((rank, topic), deque()).append(frame)


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
