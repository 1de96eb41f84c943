"""Who gets in where ranks are connected, and that strangers keep nobody out."""

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from paceline.control import (
    switchboard,
)
from paceline.control.handshake import Handshake, Stranger, answer, call
from paceline.control.links import Link
from paceline.control.switchboard import Switchboard, Unreached, address_of, open_door_at
from tests.control.machines import KEY, say


def feed(handshake: Handshake, message: bytes) -> tuple[bytes, int | None]:
    """Go on with a handshake; return what it sends, and the peer's rank once it is known."""
    try:
        sent, needs = handshake.send(message)
        if sent and not needs:  # the last word
            return sent, feed(handshake, b"")[1]
        return sent, None
    except StopIteration as end:
        return b"", end.value


def test_two_ranks_that_know_the_key_meet() -> None:
    caller, called = call(KEY, 3, 1), answer(KEY, 1, {2, 3})
    next(caller)
    nonce, _ = next(called)
    hello, _ = feed(caller, nonce)
    proof, peer = feed(called, hello)

    assert peer == 3
    assert feed(caller, proof) == (b"", 1)


def test_a_caller_without_the_key_is_a_stranger_and_gets_no_proof() -> None:
    caller, called = call(b"guess", 3, 1), answer(KEY, 1, {2, 3})
    next(caller)
    hello, _ = feed(caller, next(called)[0])

    with pytest.raises(Stranger, match="does not know the key"):
        feed(called, hello)


def test_a_hello_is_of_no_use_a_second_time() -> None:
    caller, called, again = call(KEY, 3, 1), answer(KEY, 1, {3}), answer(KEY, 1, {3})
    next(caller)
    hello, _ = feed(caller, next(called)[0])
    assert feed(called, hello)[1] == 3
    next(again)

    with pytest.raises(Stranger, match="does not know the key"):
        feed(again, hello)


def test_a_rank_that_is_in_or_not_of_this_side_is_not_let_in() -> None:
    for awaited in ({2}, set()):
        caller, called = call(KEY, 3, 1), answer(KEY, 1, awaited)
        next(caller)
        hello, _ = feed(caller, next(called)[0])
        with pytest.raises(Stranger, match="rank 3 is not waited for"):
            feed(called, hello)


def test_a_caller_is_not_taken_in_by_its_own_proof_or_another_ranks() -> None:
    caller, other = call(KEY, 3, 1), answer(KEY, 2, {3})
    next(caller)
    hello, _ = feed(caller, next(other)[0])
    with pytest.raises(Stranger):  # it was called as rank 1, and is rank 2
        feed(other, hello)
    with pytest.raises(Stranger):
        feed(caller, hello[-32:])


class Party:
    """Ranks as threads, each with a door on loopback and a switchboard."""

    def __init__(self, size: int, keys: Sequence[bytes] = ()) -> None:
        self.doors = [open_door_at("127.0.0.1") for _ in range(size)]
        self.addresses = [address_of(door) for door in self.doors]
        self.keys = keys or [KEY] * size
        self.links: dict[int, dict[int, Link]] = {}
        self.errors: dict[int, Unreached] = {}
        self.threads: list[threading.Thread] = []

    def connect(self, seconds: float = 20.0, only: Sequence[int] | None = None) -> None:
        for rank in range(len(self.doors)) if only is None else only:
            thread = threading.Thread(target=self._connect, args=(rank, seconds))
            thread.start()
            self.threads.append(thread)

    def _connect(self, rank: int, seconds: float) -> None:
        board = Switchboard(rank, [self.doors[rank]], self.addresses, self.keys[rank])
        try:
            self.links[rank] = board.connect(seconds)
        except Unreached as error:
            self.errors[rank] = error

    def join(self) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()

    def stranger(self, rank: int) -> socket.socket:
        host, port = self.addresses[rank]
        return socket.create_connection((str(host), int(port)))


@contextlib.contextmanager
def party(size: int, keys: Sequence[bytes] = ()) -> Iterator[Party]:
    made = Party(size, keys)
    try:
        yield made
    finally:
        made.join()
        for door in made.doors:
            door.close()
        for mine in made.links.values():
            for link in mine.values():
                link.close()


def assert_wired(made: Party) -> None:
    made.join()
    assert made.errors == {}
    size = len(made.doors)
    for rank in range(size):
        for peer, link in made.links[rank].items():
            say(link, b"%d to %d" % (rank, peer))
    for rank in range(size):
        assert made.links[rank].keys() == set(range(size)) - {rank}
        for peer, link in made.links[rank].items():
            deadline = time.monotonic() + 10
            while (message := link.receive()) is None:
                assert time.monotonic() < deadline
            assert message == b"%d to %d" % (peer, rank)


def test_every_rank_is_wired_to_every_other() -> None:
    with party(5) as made:
        made.connect()
        assert_wired(made)


@pytest.mark.parametrize(
    "says",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 3, os.urandom(4096), struct.pack("!i", 2**31 - 1) * 20],
    ids=["nothing", "http", "a little", "noise", "huge lengths"],
)
def test_strangers_hold_nobody_up(says: bytes) -> None:
    with party(3) as made, contextlib.ExitStack() as strangers:
        for rank in (0, 0, 1, 1, 2):
            stranger = strangers.enter_context(made.stranger(rank))
            stranger.sendall(says)
        made.connect(seconds=switchboard.CALLER_SECONDS)  # no time to wait for one of them

        assert_wired(made)


def test_more_strangers_than_may_be_half_open_do_not_keep_a_rank_out() -> None:
    with party(2) as made, contextlib.ExitStack() as strangers:
        for _ in range(switchboard.MOST_CALLERS + 20):
            strangers.enter_context(made.stranger(0))
        made.connect()

        assert_wired(made)


@pytest.mark.parametrize("kind", ["local", "TCP"])
def test_strangers_who_fill_the_door_of_a_rank_that_comes_late_do_not_keep_the_others_out(kind: str) -> None:
    with party(2) as made, contextlib.ExitStack() as strangers:
        if kind == "local":
            made.doors[0].close()
            made.doors[0] = switchboard.open_local_door(2)
            made.addresses[0] = address_of(made.doors[0])
        made.doors[0].listen(1)
        for _ in range(10):
            wire, where = switchboard._socket_to(made.addresses[0])
            strangers.enter_context(wire)
            with contextlib.suppress(BlockingIOError):
                wire.connect(where)
        made.connect(only=[1])
        time.sleep((switchboard.MOST_TRIES + 1) * switchboard.PAUSE_SECONDS)
        made.connect(only=[0])

        assert_wired(made)


def test_a_rank_that_is_hung_up_on_to_make_room_calls_again() -> None:
    with party(2) as made:
        made.connect(only=[1])
        for number in range(2 * switchboard.MOST_TRIES):
            wire, _ = made.doors[0].accept()
            if number % 2:
                wire.sendall(bytes(32))  # a nonce; what comes then is not looked at
                assert select.select([wire], [], [], 10)[0]
            wire.close()
        made.connect(only=[0])

        assert_wired(made)


def test_a_door_that_fails_is_left_alone_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    until = time.monotonic() + 0.5

    class Door:
        """One that no more files can be opened for, at first."""

        def __init__(self, door: socket.socket) -> None:
            self.door = door

        def __getattr__(self, name: str) -> object:
            return getattr(self.door, name)

        def accept(self) -> object:
            calls.append(1)
            if time.monotonic() < until:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return self.door.accept()

    monkeypatch.setattr(switchboard, "PAUSE_SECONDS", 0.05)
    with party(2) as made:
        made.doors[0] = Door(made.doors[0])  # type: ignore[call-overload]
        made.connect()

        assert_wired(made)
    assert len(calls) < 100  # thousands, if it is asked all the time


def test_more_ranks_may_call_at_once_than_strangers_usually_do() -> None:
    assert switchboard.most_callers(2) == switchboard.MOST_CALLERS
    assert switchboard.most_callers(1000) == 2000


def test_a_silent_stranger_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "CALLER_SECONDS", 0.1)
    with party(2) as made, made.stranger(0) as stranger:
        stranger.settimeout(10)
        made.connect(only=[0])

        assert len(stranger.recv(100)) == 32
        assert stranger.recv(100) == b""
        monkeypatch.undo()  # the rank may take its time
        made.connect(only=[1])
        assert_wired(made)


def test_a_rank_with_another_key_is_refused_and_says_so() -> None:
    with party(2, [KEY, b"another"]) as made:
        made.connect(seconds=3.0)
        made.join()

    host, port = made.addresses[0]
    assert made.errors[1].failed == [f"rank 1 does not reach rank 0 at {host} port {port} (it hung up)"]
    assert made.errors[0].awaited == ["rank 1 has not called rank 0"]


def test_a_stranger_at_the_address_of_a_rank_is_not_believed() -> None:
    with party(2) as made:
        made.connect(only=[1])
        impostor, _ = made.doors[0].accept()
        with impostor:
            impostor.sendall(secrets.token_bytes(64))  # a nonce, and a proof out of thin air
            made.doors[0].close()
            made.join()

    assert "rank 1 does not reach rank 0" in str(made.errors[1])


def test_a_rank_that_nobody_answers_gives_up_in_time_and_leaves_nothing_open() -> None:
    with party(2) as made:
        before = open_files()
        made.connect(seconds=0.3, only=[1])  # the kernel takes the call, and nobody answers
        made.join()

        assert made.errors[1].failed[0].endswith("(no answer within 0.3 s)")
        assert open_files() == before


def test_an_address_of_a_kind_that_this_machine_has_not_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(switchboard, "_socket_to", refuse)
    with pytest.raises(Unreached, match="at fd00::3 port 5 .Address family not supported by protocol"):
        Switchboard(1, [], [["fd00::3", 5], []], KEY).connect(5.0)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
