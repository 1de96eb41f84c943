"""The control plane: small frames that ride beside the data, so that ranks agree before they add.

    post(topic, frame)      hand this rank's frame to every rank; does not wait
    collect(topic)          wait for everybody's frame of that topic, in rank order

Every rank posts the same topics. Ranks of one machine are wired to each other by local sockets in the
abstract name space, which cost some 10 us a frame and show a dead peer at once; ranks of several machines
use a group that moves CPU tensors. Frames are bytes that the reader unpacks field by field: nothing that
came from a peer is ever unpickled.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.comm import Comm, GroupComm, cpu_group_like
from paceline.errors import PeerLost, RanksDisagree, name_ranks

Topic = bytes

SMALL = 240  # bytes that travel in the first round over a group
SETUP_SECONDS = 60.0


class Control(ABC):
    """Frames among all ranks of a comm."""

    def __init__(self) -> None:
        self._replicas = 0

    def new_name(self) -> bytes:
        """Name a replica: the same on every rank, because replicas are made by all ranks together."""
        self._replicas += 1
        return str(self._replicas).encode()

    @abstractmethod
    def post(self, topic: Topic, frame: bytes) -> None:
        """Send this rank's frame to every rank. Does not wait for anybody."""

    @abstractmethod
    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        """Return every rank's frame of a topic that this rank has posted, by rank.

        Raises PeerLost naming a rank that is gone, or silent for longer than ``seconds``.
        """


class SoloControl(Control):
    """A world of one talks to itself."""

    def __init__(self) -> None:
        super().__init__()
        self._frames: dict[Topic, deque[bytes]] = {}

    def post(self, topic: Topic, frame: bytes) -> None:
        self._frames.setdefault(topic, deque()).append(frame)

    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        return [self._frames[topic].popleft()]


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
        message = _pack(topic, frame)
        gone = [peer for peer, link in self._links.items() if not _sent(link, message)]
        if gone:
            raise _gone(gone[0])

    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        return [self._frame_of(rank, topic, deadline, seconds) for rank in range(len(self._links) + 1)]

    def _frame_of(self, rank: int, topic: Topic, deadline: float, seconds: float) -> bytes:
        box = self._inbox.setdefault((rank, topic), deque())
        while not box:
            # A link is first in, first out: what comes before the frame we want belongs to another topic.
            if not self._pollers[rank].poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise PeerLost(
                    f"rank {rank} did not answer for {seconds:g} s. It is stuck or much slower than the "
                    "others; look at what that rank is doing, or give the process group a longer timeout.",
                    rank,
                )
            try:
                message = self._links[rank].recv_bytes()
            except (EOFError, OSError) as error:
                raise _gone(rank) from error
            self._keep(rank, *_unpack(message))
        return box.popleft()

    def _keep(self, rank: int, topic: Topic, frame: bytes) -> None:
        self._inbox.setdefault((rank, topic), deque()).append(frame)


class GroupControl(Control):
    """Frames as byte tensors over a group that moves CPU tensors, for ranks on several machines."""

    def __init__(self, comm: GroupComm) -> None:
        super().__init__()
        self._group = cpu_group_like(comm.group)
        self._comm = GroupComm(self._group)
        self._posted: dict[Topic, deque[tuple[bytes, list[torch.Tensor], Any]]] = {}

    def post(self, topic: Topic, frame: bytes) -> None:
        frame = _pack(topic, frame)
        head = struct.pack("!I", len(frame)) + frame[:SMALL].ljust(SMALL, b"\0")
        mine = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self._comm.size)]
        work = self._group.allgather([rows], [mine])
        self._posted.setdefault(topic, deque()).append((frame, rows, work))

    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        frame, rows, work = self._posted[topic].popleft()
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise PeerLost(
                f"the control group broke off: {error}. Look for the first rank that failed."
            ) from error
        heads = [bytes(row.tolist()) for row in rows]
        lengths = [struct.unpack_from("!I", head)[0] for head in heads]
        frames = [head[4 : 4 + length] for head, length in zip(heads, lengths, strict=True)]
        if max(lengths) > SMALL:
            frames = self._comm.gather_bytes(frame)
        told = [_unpack(frame) for frame in frames]
        astray = [rank for rank, (about, _) in enumerate(told) if about != topic]
        if astray:
            raise RanksDisagree(
                f"the ranks are at different points: {name_ranks(astray)} sent a control frame about "
                f"{told[astray[0]][0]!r} while others are at {topic!r}. Make every rank run the same "
                "backwards of the same models in the same order."
            )
        return [payload for _, payload in told]


def _pack(topic: Topic, frame: bytes) -> bytes:
    return struct.pack("!H", len(topic)) + topic + frame


def _unpack(message: bytes) -> tuple[Topic, bytes]:
    (length,) = struct.unpack_from("!H", message)
    return message[2 : 2 + length], message[2 + length :]


# One control per group and process, shared by all replicas on it: two replicas whose backwards run in
# different orders on two ranks then meet in the same inbox instead of waiting for each other on separate
# wires.
_controls: weakref.WeakKeyDictionary[Any, Control] = weakref.WeakKeyDictionary()
_wiring = threading.Lock()


def control_over(comm: Comm) -> Control:
    """Return the control plane that goes with a comm. The first call for a group is a collective."""
    if not isinstance(comm, GroupComm):
        return SoloControl()
    with _wiring:
        control = _controls.get(comm.group)
        if control is None:
            control = _controls[comm.group] = _wire(comm)
    return control


def _wire(comm: GroupComm) -> Control:
    """Connect the ranks: by local sockets if they all share this machine, else over the group."""
    if comm.size == 1:
        return SoloControl()
    if sys.platform != "linux":  # abstract sockets are Linux's
        return GroupControl(comm)
    listener = _listen(comm.size)
    card = {
        "host": _this_host(),
        "address": listener.getsockname()[1:].decode(),
        "key": secrets.token_hex(16),
    }
    cards = [json.loads(card) for card in comm.gather_bytes(json.dumps(card).encode())]
    if len({card["host"] for card in cards}) > 1:
        listener.close()
        return GroupControl(comm)
    key = "".join(card["key"] for card in cards).encode()
    with listener:
        links = {peer: _call(cards[peer]["address"], key, comm.rank) for peer in range(comm.rank)}
        deadline = time.monotonic() + SETUP_SECONDS
        while len(links) < comm.size - 1:
            links.update(_answer(listener, key, deadline))
    return SocketControl(comm.rank, links)


def _this_host() -> str:
    """Name what two processes have to share to reach each other by an abstract socket."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def _listen(backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0paceline-" + secrets.token_hex(16))
    listener.listen(backlog)
    return listener


def _call(address: str, key: bytes, rank: int) -> Connection:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(SETUP_SECONDS)
    link.connect("\0" + address)
    link.setblocking(True)
    connection = Connection(link.detach())
    connection.send_bytes(_pass(key, rank) + struct.pack("!I", rank))
    return connection


def _answer(listener: socket.socket, key: bytes, deadline: float) -> dict[int, Connection]:
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


def _gone(rank: int) -> PeerLost:
    return PeerLost(
        f"rank {rank} is gone: it closed its connection. Its process has ended, or it left the world "
        "early; its own last message says why.",
        rank,
    )
