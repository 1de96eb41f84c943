"""Frames in memory that the ranks of one machine share.

    mailbox of rank r      written by r, read by all the others

    [ frames written, sleeps | frames of rank 0 read | of rank 1 | ... ][ slot 0 ][ slot 1 ] ... [ slot 63 ]
      one cache line each                                                length, if there is more, message

No system call in the usual case, in which a frame is there before it is looked for. A peer that is late is
waited for by looking again for a moment, then by sleeping on the socket beside the mailbox: whoever writes to
a rank that sleeps sends a byte after it, and the socket also tells whether a peer still lives. Plain stores
are seen in order only on x86, so elsewhere the sockets do it all.
"""

import contextlib
import mmap
import os
import platform
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from paceline.control.files import exchange_files
from paceline.control.links import Link, check_length
from paceline.control.lost import gone
from paceline.control.sockets import SocketControl

SLOTS = 64
SLOT_NBYTES = 2048
LINE_WORDS = 8  # a cache line, in words of eight bytes
WRITTEN = 0  # the word that counts the frames that the owner has written
SLEEPS = 1  # the one that says whether the owner wants to be woken
_ENTRY = struct.Struct("!I?")
PART_NBYTES = SLOT_NBYTES - _ENTRY.size
SPIN_SECONDS = 30e-6
NAP_MILLISECONDS = 2  # a rank may write in the very moment in which this one lies down, and not wake it


class Mailbox:
    """One rank's outgoing frames, as a view of shared memory."""

    def __init__(self, file: int, size: int) -> None:
        self._head = LINE_WORDS * 8 * (size + 1)
        nbytes = self._head + SLOTS * SLOT_NBYTES
        os.ftruncate(file, nbytes)
        self._memory = mmap.mmap(file, nbytes)
        # Read and written as they are: every backward looks at them a dozen times.
        self.words = memoryview(self._memory).cast("q")

    def write(self, number: int, part: bytes, *, more: bool) -> None:
        """Write a message, or a part of one. The count goes last: it makes the rest valid."""
        start = self._head + number % SLOTS * SLOT_NBYTES
        entry = _ENTRY.pack(len(part), more) + part
        self._memory[start : start + len(entry)] = entry
        self.words[WRITTEN] = number + 1

    def read(self, number: int) -> tuple[bytes, bool]:
        """Read what has been written, and whether there is more to it."""
        start = self._head + number % SLOTS * SLOT_NBYTES
        length, more = _ENTRY.unpack_from(self._memory, start)
        start += _ENTRY.size
        return self._memory[start : start + length], more


class MailboxControl(SocketControl):
    """Frames in shared memory, with the sockets to see who lives."""

    def __init__(self, rank: int, links: dict[int, Link]) -> None:
        super().__init__(rank, links)
        size = len(links) + 1
        self._mine, self._boxes = exchange_files(links, "paceline-control", partial(Mailbox, size=size))
        self._read = dict.fromkeys(links, 0)
        # The words that count the frames of a rank that the owner of a mailbox has read.
        self._read_by = LINE_WORDS * (rank + 1)
        self._read_of = {peer: LINE_WORDS * (peer + 1) for peer in links}
        self._parts = dict.fromkeys(links, b"")
        self._out: deque[tuple[bytes, bool]] = deque()  # parts, and whether there is more to the message
        self._hangups = {peer: _hangup_poller(link) for peer, link in links.items()}
        self._beds = {peer: _hangup_poller(link, select.POLLIN) for peer, link in links.items()}
        # With more ranks than cores, whoever spins keeps the one that is waited for from running.
        self._spin_seconds = SPIN_SECONDS if len(os.sched_getaffinity(0)) >= size else 0.0

    def _wrap(self, message: bytes) -> bytes:
        check_length(message)
        return message

    def _send(self, frame: bytes) -> None:
        if len(frame) <= PART_NBYTES:
            self._out.append((frame, False))
        else:
            for start in range(0, len(frame), PART_NBYTES):
                end = start + PART_NBYTES
                self._out.append((frame[start:end], end < len(frame)))
        self._flush()

    def _flush(self) -> None:
        """Write what there is room for, in the mailboxes of all."""
        while self._out:
            number, full = self._mine.words[WRITTEN], []
            for peer, box in self._boxes.items():
                if number - box.words[self._read_by] >= SLOTS:
                    full.append(peer)
            if full or self._crowded:
                self._crowded = {peer for peer in full if not self._has_ended(peer)}  # that one reads no more
                if self._crowded:
                    return
            part, more = self._out[0]
            self._mine.write(number, part, more=more)
            self._out.popleft()
            for peer, box in self._boxes.items():
                if box.words[SLEEPS]:
                    _wake(self._links[peer])

    def _left(self, peer: int) -> int:
        return len(self._out) * PART_NBYTES

    def _has_ended(self, peer: int) -> bool:
        return bool(self._hangups[peer].poll(0))

    def close(self, why: str) -> None:
        super().close(why)
        self._out.clear()

    def _drain(self, rank: int, box: deque[bytes]) -> bool:
        if self._closed is None and self._boxes[rank].words[WRITTEN] > self._read[rank]:
            return self._take_in(rank, box)
        return bool(box) or self._closed is not None

    def _receive(self, rank: int, box: deque[bytes], began: float, until: float) -> None:
        while not self._take_in(rank, box) and self._refusal is None:
            self._wait(rank, partial(self._has_mail, rank), began, until)

    def _wait_for_room(self, began: float, until: float) -> None:
        for peer in sorted(self._crowded)[:1]:
            self._wait(peer, self._has_room, began, until)

    def _has_room(self) -> bool:
        """Tell whether something of what is left could be written. The peer may wait for room as well."""
        left = len(self._out)
        self._send_rest()
        for peer in self._boxes:
            if self._has_mail(peer):
                self._take_in(peer, deque())
        return len(self._out) < left

    def _check_lives(self, rank: int) -> None:
        if self._closed is not None:
            raise gone(rank, self._closed)
        if self._hangups[rank].poll(0) and not self._has_mail(rank):
            raise gone(rank)

    def _has_mail(self, rank: int) -> bool:
        return self._boxes[rank].words[WRITTEN] > self._read[rank] and self._closed is None

    def _next_message(self, rank: int) -> bytes | None:
        """Take the parts that are there; return a message if it is complete."""
        mailbox = self._boxes[rank]
        while self._closed is None and mailbox.words[WRITTEN] > self._read[rank]:
            part, more = mailbox.read(self._read[rank])
            self._read[rank] += 1
            self._mine.words[self._read_of[rank]] = self._read[rank]
            if more or self._parts[rank]:
                self._parts[rank] += part
                if more:
                    continue
                part, self._parts[rank] = self._parts[rank], b""
            return part
        return None

    def _wait(self, rank: int, done: Callable[[], bool], began: float, until: float) -> None:
        """Return when a peer has done something; raise TimeoutError, or PeerLost if it has ended."""
        while not done():
            if self._crowded:
                self._send_rest()
            now = time.monotonic()
            if now - began < self._spin_seconds:
                continue  # who yields on a busy machine comes back after somebody's whole time slice
            if now > until:
                raise TimeoutError
            self._sleep(rank, done)

    def _sleep(self, rank: int, done: Callable[[], bool]) -> None:
        """Sleep until a peer wakes this rank, but not for long."""
        if self._closed is not None:
            raise gone(rank, self._closed)
        self._mine.words[SLEEPS] = True
        try:
            if done():
                return
            for _, event in self._beds[rank].poll(NAP_MILLISECONDS):
                if event & ~select.POLLIN and not done():
                    raise gone(rank)
                _read(self._links[rank])
        finally:
            self._mine.words[SLEEPS] = False


def _wake(link: Link) -> None:
    """Send a byte, if there is room: who has not read the last one is awake."""
    with contextlib.suppress(OSError):
        os.write(link.fileno(), b"!")


def _read(link: Link) -> None:
    with contextlib.suppress(OSError):
        os.read(link.fileno(), 4096)


def mailboxes_work_here() -> bool:
    """Tell whether stores to shared memory are seen in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def _hangup_poller(link: Link, also: int = 0) -> "select.poll":
    poller = select.poll()
    poller.register(link.fileno(), select.POLLRDHUP | also)
    return poller
