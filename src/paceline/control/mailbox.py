"""Frames in memory that the ranks of one machine share.

    mailbox of rank r      written by r, read by all the others

    [ frames written | frames of rank 0 read | of rank 1 | ... ][ slot 0 ][ slot 1 ] ... [ slot 63 ]
      one cache line each                                        length, message

No system call in the usual case, in which a frame is there before it is looked for. A peer that is late is
waited for by looking again, then by yielding, then by sleeping; the socket beside the mailbox tells whether
it still lives. A message that is too long for a slot goes through the socket. Plain stores are seen in
order only on x86, so elsewhere the sockets do it all.
"""

import mmap
import os
import platform
import select
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from paceline.control.sockets import SocketControl, gone

SLOTS = 64
SLOT_NBYTES = 2048
LINE_WORDS = 8  # a cache line, in words of eight bytes
BY_SOCKET = 0xFFFFFFFF  # in the place of a length
SPIN_SECONDS = 150e-6
ROOM_SECONDS = 1800.0  # how long a rank may leave 64 frames unread


class Mailbox:
    """One rank's outgoing frames, as a view of shared memory."""

    def __init__(self, file: int, size: int) -> None:
        self._head = LINE_WORDS * 8 * (size + 1)
        nbytes = self._head + SLOTS * SLOT_NBYTES
        os.ftruncate(file, nbytes)
        self._memory = mmap.mmap(file, nbytes)
        self._words = memoryview(self._memory).cast("q")

    @property
    def written(self) -> int:
        """How many frames the owner has written."""
        return self._words[0]

    def has_read(self, rank: int) -> int:
        """Return how many frames of another rank the owner has read."""
        return self._words[LINE_WORDS * (rank + 1)]

    def note_read(self, rank: int, count: int) -> None:
        """Note how many frames of another rank the owner has read."""
        self._words[LINE_WORDS * (rank + 1)] = count

    def write(self, number: int, message: bytes | None) -> None:
        """Write a frame; None says that it comes by socket. The count goes last: it makes the rest valid."""
        start = self._head + number % SLOTS * SLOT_NBYTES
        length = BY_SOCKET if message is None else len(message)
        entry = struct.pack("!I", length) + (message or b"")
        self._memory[start : start + len(entry)] = entry
        self._words[0] = number + 1

    def read(self, number: int) -> bytes | None:
        """Read a frame that has been written."""
        start = self._head + number % SLOTS * SLOT_NBYTES
        (length,) = struct.unpack_from("!I", self._memory, start)
        return None if length == BY_SOCKET else self._memory[start + 4 : start + 4 + length]


class MailboxControl(SocketControl):
    """Frames in shared memory, with the sockets for what does not fit and to see who lives."""

    def __init__(self, rank: int, links: dict[int, Connection]) -> None:
        super().__init__(rank, links)
        size = len(links) + 1
        self._mine, self._boxes = _exchange_mailboxes(links, size)
        self._read = dict.fromkeys(links, 0)
        self._hangups = {peer: _hangup_poller(link) for peer, link in links.items()}
        # With more ranks than cores, whoever spins keeps the one that is waited for from running.
        self._spin_seconds = SPIN_SECONDS if len(os.sched_getaffinity(0)) >= size else 0.0

    def _send(self, message: bytes) -> None:
        number = self._mine.written
        for peer, box in self._boxes.items():
            self._wait(peer, partial(self._has_room, box, number), time.monotonic() + ROOM_SECONDS)
        if len(message) <= SLOT_NBYTES - 4:
            self._mine.write(number, message)
        else:
            super()._send(message)
            self._mine.write(number, None)

    def _has_room(self, box: Mailbox, number: int) -> bool:
        return number - box.has_read(self._rank) < SLOTS

    def _receive(self, rank: int, deadline: float) -> bytes:
        box, number = self._boxes[rank], self._read[rank]
        self._wait(rank, lambda: box.written > number, deadline)
        message = box.read(number)
        if message is None:
            message = super()._receive(rank, deadline)
        self._read[rank] = number + 1
        self._mine.note_read(rank, number + 1)
        return message

    def _wait(self, rank: int, done: Callable[[], bool], deadline: float) -> None:
        """Return when a peer has done something; raise TimeoutError, or PeerLost if it has ended."""
        if done():
            return
        start = time.monotonic()
        while not done():
            now = time.monotonic()
            if now - start < self._spin_seconds:
                os.sched_yield()
            elif self._hangups[rank].poll(0) and not done():
                raise gone(rank)
            elif now > deadline:
                raise TimeoutError
            else:
                time.sleep(_nap(now - start))


def _nap(waited: float) -> float:
    """Return how long to sleep before looking again: little against what was waited, and little at all."""
    return min(max(waited / 8, 50e-6), 200e-6 if waited < 1 else 2e-3)


def mailboxes_work_here() -> bool:
    """Tell whether stores to shared memory are seen in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def _exchange_mailboxes(links: dict[int, Connection], size: int) -> tuple[Mailbox, dict[int, Mailbox]]:
    """Make this rank's mailbox, and pass its file to every peer; nothing is left in the file system."""
    file = os.memfd_create("paceline-control")
    try:
        mine = Mailbox(file, size)
        for link in links.values():
            with _socket_of(link) as wire:
                socket.send_fds(wire, [b"m"], [file])
    finally:
        os.close(file)
    return mine, {peer: _receive_mailbox(link, size) for peer, link in links.items()}


def _receive_mailbox(link: Connection, size: int) -> Mailbox:
    with _socket_of(link) as wire:
        _, files, _, _ = socket.recv_fds(wire, 1, 1)
    try:
        return Mailbox(files[0], size)
    finally:
        os.close(files[0])


def _socket_of(link: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(link.fileno()))


def _hangup_poller(link: Connection) -> "select.poll":
    poller = select.poll()
    poller.register(link.fileno(), select.POLLRDHUP)
    return poller
