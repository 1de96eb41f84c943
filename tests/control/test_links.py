"""A stream of messages between two ranks."""

import errno
import os
import struct

import pytest

from paceline.control import (
    links,
)
from paceline.control.links import MOST_NBYTES, framed
from tests.control.machines import a_link, say


def test_messages_come_whole_however_they_are_cut() -> None:
    with a_link() as (link, peer):
        whole = framed(b"one") + framed(b"") + framed(b"three")
        got = []
        for number in range(len(whole)):
            peer.sendall(whole[number : number + 1])
            while (message := link.receive()) is not None:
                got.append(message)
        assert got == [b"one", b"", b"three"]

        peer.sendall(framed(b"last"))
        peer.close()
        assert link.receive() == b"last"
        with pytest.raises(EOFError):
            link.receive()


def test_the_last_words_of_a_peer_are_read_although_nothing_can_be_sent_to_it() -> None:
    with a_link() as (link, peer):
        peer.sendall(framed(b"goodbye"))
        peer.close()

        say(link, b"this goes nowhere")

        assert link.receive() == b"goodbye"
        with pytest.raises((OSError, EOFError)):
            link.receive()


def test_the_reason_why_a_link_has_ended_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_link() as (link, peer):

        def read(number: int, count: int) -> bytes:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

        monkeypatch.setattr(os, "read", read)
        with pytest.raises(TimeoutError):
            link.receive()
        monkeypatch.undo()
        peer.close()
        with pytest.raises(TimeoutError):  # the kernel says so only once
            link.receive()


def test_a_length_that_no_message_has_ends_the_link_before_anything_is_allocated() -> None:
    with a_link() as (link, peer):
        peer.sendall(struct.pack("!I", MOST_NBYTES + 1))
        with pytest.raises(OSError, match="what has come is no message"):
            link.receive()
        with pytest.raises(OSError):
            link.receive()


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_NBYTES", 10)
    with pytest.raises(ValueError, match="a message has 10 bytes at most, this one 11"):
        framed(b"x" * 11)


def test_who_is_interrupted_between_a_write_and_the_note_of_it_closes_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with a_link() as (link, peer):

        def write(number: int, part: bytes, write=os.write) -> int:
            write(number, bytes(part[:2]))
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "write", write)
        with pytest.raises(KeyboardInterrupt):
            say(link, b"hello")
        monkeypatch.undo()

        say(link, b"never after a torn one")
        with pytest.raises(OSError):
            link.receive()
        assert peer.recv(100) == framed(b"hello")[:2]
        assert peer.recv(100) == b""
