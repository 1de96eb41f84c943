"""Frames between machines: who is called where, who gets in, and that ranks have there what they have on one.

The ranks of these tests share a machine, and take each other for ranks of others.
"""

import contextlib
import errno
import gc
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from benchmarks import link as wire
from paceline.comm import GroupComm
from paceline.control import (
    GroupControl,
    MailboxControl,
    SocketControl,
    TcpControl,
    control_over,
    files,
    links,
    sockets,
    switchboard,
    tcp,
    wiring,
)
from paceline.control.handshake import Handshake, Stranger, answer, call
from paceline.control.links import MOST_NBYTES, Link, framed
from paceline.control.lost import gone
from paceline.control.switchboard import Switchboard, Unreached, address_of, open_door_at
from paceline.errors import PeerFailed, PeerLost, PeerTimeout, RanksDisagree
from paceline.hosts import address_for_peers, best_address, chosen_address, this_host
from paceline.testing import ranks
from tests.listening import listening

KEY = b"the key of these ranks"


def apart(monkeypatch: pytest.MonkeyPatch, host: object) -> None:
    """Let this rank believe that ranks of other hosts are on other machines."""
    monkeypatch.setattr(wiring, "this_host", lambda: str(host))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def tcp_control(monkeypatch: pytest.MonkeyPatch, host: object) -> TcpControl:
    apart(monkeypatch, host)
    control = control_over(GroupComm(dist.group.WORLD))
    assert isinstance(control, TcpControl)
    return control


def family_of(link: Link) -> int:
    with socket.socket(fileno=os.dup(link.fileno())) as same:
        return same.family


# ---- which address ----------------------------------------------------------------------------------

INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.3"], "ib0": ["fd00::3"]}


def test_the_interface_that_gloo_is_told_is_taken() -> None:
    assert chosen_address({"GLOO_SOCKET_IFNAME": "eth0"}, INTERFACES) == "10.0.0.3"
    assert chosen_address({"GLOO_SOCKET_IFNAME": "ib0"}, INTERFACES) == "fd00::3"
    assert chosen_address({"GLOO_SOCKET_IFNAME": "lo"}, INTERFACES) == "127.0.0.1"
    assert chosen_address({"GLOO_SOCKET_IFNAME": "gone, eth0"}, INTERFACES) == "10.0.0.3"


def test_the_interface_that_nccl_is_told_comes_second_and_only_by_its_name() -> None:
    both = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert chosen_address(both, INTERFACES) == "fd00::3"
    assert chosen_address({"NCCL_SOCKET_IFNAME": "eth0"}, INTERFACES) == "10.0.0.3"
    for pattern in ("eth", "^docker0", "=eth0", ""):
        assert chosen_address({"NCCL_SOCKET_IFNAME": pattern}, INTERFACES) is None


def test_an_address_that_leaves_the_machine_goes_before_one_that_does_not() -> None:
    assert best_address(["127.0.1.1", "10.0.0.3", "10.0.0.4"]) == "10.0.0.3"
    assert best_address(["127.0.1.1", "::1"]) == "127.0.1.1"
    assert best_address(["::1", "fd00::3"]) == "fd00::3"


def test_no_wildcard_and_nothing_that_depends_on_an_interface_is_taken() -> None:
    assert best_address(["0.0.0.0", "::", "fe80::1%eth0", "fe80::1", "224.0.0.1", "nonsense"]) is None
    assert best_address(["0.0.0.0", "10.0.0.3"]) == "10.0.0.3"


def test_the_way_to_the_meeting_point_names_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(choice, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")

    assert address_for_peers("127.0.0.1") == "127.0.0.1"
    assert address_for_peers("no such host.invalid") == "127.0.1.1"
    assert address_for_peers(None) == "127.0.1.1"


def test_a_door_is_open_at_one_address_only() -> None:
    with open_door_at("127.0.0.1") as door:
        host, port = address_of(door)

        assert host == "127.0.0.1"
        assert int(port) > 0


def test_who_somebody_is_does_not_make_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = this_host()
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    assert this_host() == before


# ---- who gets in ------------------------------------------------------------------------------------


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


def say(link: Link, message: bytes) -> None:
    link.put(framed(message))
    assert link.flush()


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


# ---- a link -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_link() -> Iterator[tuple[Link, socket.socket]]:
    mine, theirs = socket.socketpair()
    link = Link(mine)
    with theirs:
        yield link, theirs
    link.close()


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


# ---- ranks that are wired to each other, all in here ------------------------------------------------

Ways = Callable[..., SocketControl]
each_way = pytest.mark.parametrize("way", [TcpControl, SocketControl, MailboxControl])


@contextlib.contextmanager
def wired(way: Ways, size: int = 2) -> Iterator[list[SocketControl]]:
    """Make the controls of some ranks that share this process."""
    links: list[dict[int, Link]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            ends = socket.socketpair()
            links[one][other], links[other][one] = Link(ends[0]), Link(ends[1])
    with ThreadPoolExecutor(size) as pool:  # they exchange files
        controls = list(pool.map(way, range(size), links))
    try:
        yield controls
    finally:
        for control in controls:
            control.close("the test is over")


BIG = 3_000_000  # bytes: more than the kernel, or a mailbox, holds


@each_way
def test_post_waits_for_nobody_and_collect_names_who_has_not_read(way: Ways) -> None:
    with wired(way) as (mine, theirs):
        mine.post(b"t", b"x" * BIG)
        theirs.post(b"t", b"")

        with pytest.raises(PeerTimeout, match="rank 0 has waited .* rank 1 is missing"):
            mine.collect(b"t", 0.2)

        while not theirs.ready(b"t"):
            assert mine.ready(b"t")  # and sends the rest
        assert mine.collect(b"t", 20) == [b"x" * BIG, b""]


@each_way
def test_who_has_collected_has_nothing_left_to_send(way: Ways) -> None:
    with wired(way) as (mine, theirs), ThreadPoolExecutor(1) as pool:
        for control in (theirs, mine):
            control.post(b"t", b"x" * BIG)
        got = pool.submit(theirs.collect, b"t", 20)

        assert mine.collect(b"t", 20) == [b"x" * BIG] * 2
        assert not mine._crowded
        assert got.result() == [b"x" * BIG] * 2


@each_way
def test_a_rank_that_reads_nothing_is_not_sent_more_and_more(
    way: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MOST_LEFT_NBYTES", 1000)
    with wired(way) as (mine, _):
        mine.post(b"t", b"x" * BIG)
        with pytest.raises(PeerTimeout, match="rank 1 has left .* bytes of control frames unread. It is stu"):
            mine.post(b"t", b"one more")

        assert len(mine._inbox[b"t"][0]) == 1


@each_way
def test_a_frame_that_is_too_long_is_nowhere(way: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_NBYTES", 1000)
    with wired(way) as controls:
        for control in controls:
            with pytest.raises(ValueError, match="a message has 1,000 bytes at most, this one 2,003"):
                control.post(b"t", b"x" * 2000)
            control.post(b"t", b"short")
        for control in controls:
            assert control.collect(b"t", 20) == [b"short", b"short"]


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", [TcpControl, SocketControl])
def test_who_is_interrupted_between_two_links_is_lost_to_both(
    way: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wired(way, 3) as controls:
        monkeypatch.setattr(controls[0]._links[2], "put", interrupt)
        with pytest.raises(KeyboardInterrupt):
            controls[0].post(b"t", b"first")
        monkeypatch.undo()

        assert_torn(controls)


def test_who_is_interrupted_between_two_parts_of_a_frame_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with wired(MailboxControl, 3) as controls:
        write = controls[0]._mine.write

        def write_and_interrupt(number: int, part: bytes, *, more: bool) -> None:
            write(number, part, more=more)
            raise KeyboardInterrupt

        monkeypatch.setattr(controls[0]._mine, "write", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            controls[0].post(b"t", b"x" * 5000)
        monkeypatch.undo()

        assert_torn(controls)


def assert_torn(controls: Sequence[SocketControl]) -> None:
    """Check that all ranks know that rank 0 is of no use any more."""
    with pytest.raises(PeerLost, match="this process has closed its connections .* interrupted in the mid"):
        controls[0].post(b"t", b"second")
    for control in controls[1:]:
        control.post(b"t", b"")
    for control in controls[1:]:
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            while True:  # of what it has sent before, something may have come
                control.collect(b"t", 20)
                control.post(b"t", b"")


@each_way
def test_who_is_interrupted_while_it_takes_a_frame_in_is_lost(
    way: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wired(way) as (mine, theirs):
        mine.post(b"t", b"")
        theirs.post(b"t", b"never kept")
        monkeypatch.setattr(mine, "_keep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mine.ready(b"t")
        monkeypatch.undo()

        with pytest.raises(PeerLost, match="this process has closed its connections"):
            mine.collect(b"t", 20)
        theirs.collect(b"t", 20)
        theirs.post(b"t", b"")
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            theirs.collect(b"t", 20)


@each_way
def test_threads_that_look_in_at_once_keep_frames_in_order(
    way: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wired(way) as (mine, theirs), ThreadPoolExecutor(3) as pool:
        take = mine._next_message

        def take_and_dawdle(rank: int) -> bytes | None:
            message = take(rank)
            time.sleep(0.001)  # another thread can overtake this one, before the message is kept
            return message

        monkeypatch.setattr(mine, "_next_message", take_and_dawdle)
        mine.post(b"another", b"")
        for number in range(30):
            theirs.post(b"t", b"%d" % number)
        for look in [pool.submit(mine.ready, b"another") for _ in range(3)]:
            look.result()

        assert list(mine._inbox[b"t"][1]) == [b"%d" % number for number in range(30)]


def test_a_link_that_could_not_be_made_goes_without_a_word() -> None:
    with pytest.raises(AttributeError):
        Link(None)  # type: ignore[arg-type]
    gc.collect()  # an exception in __del__ would be a warning, and that an error


# ---- ranks of several machines ----------------------------------------------------------------------


@ranks(3)
def test_every_rank_gets_every_frame_in_rank_order(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tcp_control(monkeypatch, rank)

    assert all(family_of(link) == socket.AF_INET for link in control._links.values())
    assert not control.is_local
    assert control.posts_alone
    for length in (0, 5, 1000, 3_000_000):
        control.post(b"topic", bytes([rank]) * length)
        assert control.collect(b"topic", 20) == [bytes([r]) * length for r in range(3)]


@ranks(4)
def test_ranks_of_one_machine_among_several_use_its_local_sockets(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tcp_control(monkeypatch, rank // 2)

    for peer, link in control._links.items():
        assert (family_of(link) == socket.AF_UNIX) == (peer // 2 == rank // 2)
    control.post(b"t", bytes([rank]))
    assert control.collect(b"t", 20) == [bytes([r]) for r in range(4)]
    assert tcp.seconds_unanswered(control._links[(rank + 2) % 4]) == 0.0


@ranks(2)
def test_nothing_listens_once_all_are_in(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = []

    def open_and_note(address: str, size: int) -> socket.socket:
        doors.append(open_door_at(address, size))
        return doors[-1]

    monkeypatch.setattr(wiring, "open_door_at", open_and_note)
    tcp_control(monkeypatch, rank)

    assert [door.fileno() for door in doors] == [-1]


@pytest.mark.parametrize("where", ["one machine", "several machines"])
@ranks(3)
def test_frames_larger_than_the_kernel_holds_pass_each_other(
    rank: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "one machine":
        control = SocketControl(rank, control_over(GroupComm(dist.group.WORLD))._links)
    else:
        control = tcp_control(monkeypatch, rank)
    for number in range(3):
        control.post(b"t%d" % number, bytes([rank]) * 10_000_000)
    for number in range(3):
        assert [(frame[0], len(frame)) for frame in control.collect(b"t%d" % number, 30)] == [
            (r, 10_000_000) for r in range(3)
        ]


@ranks(3)
def test_a_rank_that_has_ended_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tcp_control(monkeypatch, rank)
    if rank == 2:
        for link in control._links.values():
            link.close()
    else:
        with pytest.raises(PeerLost, match="rank 2 is gone: it closed its connection") as caught:
            control.post(b"first", b"")
            control.collect(b"first", 30)
        assert caught.value.rank == 2
    dist.barrier()


@ranks(3)
def test_what_a_rank_has_sent_before_it_ended_is_still_heard(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tcp_control(monkeypatch, rank)
    if rank == 2:
        control.post(b"t", b"goodbye")
        for link in control._links.values():
            link.close()
    dist.barrier()
    if rank < 2:
        with contextlib.suppress(PeerLost):
            control.post(b"t", b"x")
        assert control.collect(b"t", 30) == [b"x", b"x", b"goodbye"]
        with pytest.raises(PeerLost, match="rank 2 is gone"):
            control.post(b"another", b"")
            control.collect(b"another", 30)


@ranks(2)
def test_a_worker_that_outlives_its_rank_does_not_hide_that_the_rank_has_ended(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tcp_control(monkeypatch, rank)
    if rank == 1:
        worker = os.fork()
        if worker == 0:
            signal.pause()
        try:
            for link in control._links.values():
                link.close()
            dist.barrier()
        finally:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    else:
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            control.post(b"t", b"")
            control.collect(b"t", 30)
        dist.barrier()


@ranks(2)
def test_a_rank_that_ends_before_it_has_shared_its_memory_is_named(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank == 1:

        def fail(*args: object) -> None:
            raise MemoryError("no memory is left")

        monkeypatch.setattr(wiring, "MailboxControl", fail)
        monkeypatch.setattr(wiring, "SocketControl", fail)
    with pytest.raises(
        MemoryError if rank else PeerLost, match="no mem" if rank else "rank 1 is gone: it clo"
    ):
        control = control_over(GroupComm(dist.group.WORLD))
        control.post(b"t", b"")
        control.collect(b"t", 20)
    dist.barrier()


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_that_does_not_share_its_memory_is_named(ended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SECONDS", 0.1)
    with a_link() as (link, peer):
        if ended:
            peer.close()
        words = "rank 7 is gone: it closed its" if ended else "rank 7 is gone: it did not share its memory in"
        with pytest.raises(PeerLost, match=words) as caught:
            files.exchange_files({7: link}, "name", os.fstat)
    assert caught.value.rank == 7


@pytest.mark.parametrize("where", ["one machine", "several machines"])
@ranks(2)
def test_a_fork_of_a_rank_cannot_speak_for_it(
    rank: int, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apart(monkeypatch, rank if where == "several machines" else "one")
    control = control_over(GroupComm(dist.group.WORLD))
    if rank == 1:
        heard, told = os.pipe()
        if os.fork() == 0:
            try:
                control.post(b"t", b"from the child")
            except BaseException as error:
                os.write(told, repr(error).encode())
            os._exit(0)
        os.close(told)
        os.wait()
        words = os.read(heard, 1000).decode()
        assert "this process has closed its connections to the other ranks: it is a fork of a rank" in words
    dist.barrier()
    control.post(b"t", b"%d" % rank)
    assert control.collect(b"t", 20) == [b"0", b"1"]


@ranks(2)
def test_ranks_that_wait_for_each_other_raise_and_begin_anew(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tcp_control(monkeypatch, rank)
    for _ in range(2):
        topic = b"a" if rank == 0 else b"b"
        control.post(b"left behind", b"old")
        control.post(topic, b"old")
        with pytest.raises(RanksDisagree, match="rank 0 waits for a; rank 1 waits for b") as caught:
            control.collect(topic, 50)
        assert caught.value.is_known
        assert control.ended is None

        for name in (b"left behind", b"a", b"b"):
            control.post(name, bytes([rank]))
        for name in (b"b", b"left behind", b"a"):
            assert control.collect(name, 30) == [b"\0", b"\1"]


@ranks(2)
def test_who_is_interrupted_while_it_waits_can_collect_again(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tcp_control(monkeypatch, rank)
    control.post(b"a", b"%d" % rank)
    assert control.collect(b"a", 20) == [b"0", b"1"]
    if rank == 0:
        control.post(b"b", b"0")
        with interrupted(), pytest.raises(KeyboardInterrupt):
            control.collect(b"b", 20)
    dist.barrier()
    if rank == 1:
        control.post(b"b", b"1")
    else:
        assert control.collect(b"b", 20) == [b"0", b"1"]
    dist.barrier()


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Press Ctrl-C a moment later."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@ranks(2)
def test_a_frame_that_was_interrupted_on_its_way_goes_out_whole(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tcp_control(monkeypatch, rank)
    if rank == 0:
        control.post(b"t", b"x" * 30_000_000)
        with interrupted(), pytest.raises(KeyboardInterrupt):
            control.collect(b"t", 30)  # rank 1 does not look
        dist.barrier()
        control.post(b"t", b"y")
        assert control.collect(b"t", 30)[1] == b""
        assert control.collect(b"t", 30)[1] == b""
    else:
        dist.barrier()
        control.post(b"t", b"")
        control.post(b"t", b"")
        assert control.collect(b"t", 30)[0] == b"x" * 30_000_000
        assert control.collect(b"t", 30)[0] == b"y"
    dist.barrier()


@ranks(2)
def test_a_machine_that_does_not_answer_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    control = tcp_control(monkeypatch, rank)
    if rank == 0:
        monkeypatch.setattr(tcp, "seconds_unanswered", lambda link: 16.0)
        control.post(b"t", b"")
        words = (
            "rank 1 is gone: its machine does not answer any more .Connection timed out.. The machine is down"
        )
        with pytest.raises(PeerLost, match=words) as caught:
            control.collect(b"t", 30)
        assert caught.value.rank == 1
    dist.barrier()


def test_a_connection_that_timed_out_or_has_no_way_is_not_said_to_be_closed_by_the_rank() -> None:
    for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        error = OSError(number, os.strerror(number))
        assert "rank 3 is gone: its machine does not answer any more" in str(gone(3, error))


# ---- ranks that cannot reach each other -------------------------------------------------------------


@pytest.mark.parametrize("why", ["refused", "no answer", "no address"])
@ranks(3)
def test_if_one_rank_cannot_be_reached_all_use_the_group(
    rank: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    monkeypatch.setattr(wiring, "REACH_SECONDS", 1.0)
    if rank == 1 and why == "no address":
        monkeypatch.setattr(wiring, "address_for_peers", lambda meeting_point: None)
    elif rank == 1:
        place = ["127.0.0.1", 1] if why == "refused" else ["192.0.2.1", 1]  # for documents: nobody is there
        monkeypatch.setattr(wiring, "address_of", lambda door: "" if door.family == socket.AF_UNIX else place)
    with listening() as lines:
        control = control_over(GroupComm(dist.group.WORLD))

    assert isinstance(control, GroupControl)
    assert [link for link in links._links if link._handle >= 0] == []
    control.post(b"t", bytes([rank]))
    assert control.collect(b"t", 20) == [b"\0", b"\1", b"\2"]
    told = {
        "refused": "rank 2 does not reach rank 1 at 127.0.0.1 port 1 (Connection refused)",
        "no answer": "rank 2 does not reach rank 1 at 192.0.2.1 port 1 (",
        "no address": "rank 1 cannot be called (no address of its machine was found)",
    }
    if rank == 0:
        [line] = lines
        assert line.startswith(f"paceline: the ranks cannot reach each other directly: {told[why]}")
        assert "Set GLOO_SOCKET_IFNAME on every machine" in line
    else:
        assert lines == []


@ranks(3)
def test_whatever_keeps_a_rank_from_naming_its_address_all_use_the_group(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    if rank == 1:

        def fail(meeting_point: object) -> None:
            raise ValueError("no such thing")

        monkeypatch.setattr(wiring, "address_for_peers", fail)
    with listening() as lines:
        assert isinstance(control_over(GroupComm(dist.group.WORLD)), GroupControl)
    assert rank or "rank 1 cannot be called (no such thing)" in lines[0]


@ranks(3)
def test_all_use_the_group_although_its_own_time_is_shorter_than_a_rank_is_called_for(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=4))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and says nothing
        if rank == 1:
            place = list(silent.getsockname())
            monkeypatch.setattr(
                wiring, "address_of", lambda door: "" if door.family == socket.AF_UNIX else place
            )
        assert isinstance(control_over(GroupComm(group)), GroupControl)
    dist.barrier()


@ranks(3)
def test_more_ranks_than_are_wired_to_each_other_use_the_group_without_a_word(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    monkeypatch.setattr(wiring, "MOST_RANKS", 2)
    with listening() as lines:
        assert isinstance(control_over(GroupComm(dist.group.WORLD)), GroupControl)
    assert lines == []


# ---- training ---------------------------------------------------------------------------------------


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(8.0).view(2, 4) + rank


@ranks(3)
def test_a_step_gives_the_mean_of_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    apart(monkeypatch, rank % 2)
    model = paceline.replicate(nn.Linear(4, 2))
    reference = nn.Linear(4, 2)
    reference.load_state_dict(model.state_dict())
    for _ in range(3):
        for each in (model, reference):
            each.zero_grad()
        model(inputs(rank)).square().sum().backward()
        (sum(reference(inputs(r)).square().sum() for r in range(3)) / 3).backward()
        for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
    assert isinstance(paceline.replica(model).reducer.wiring.control, TcpControl)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom in backward")


@ranks(3)
def test_an_exception_in_backward_reaches_the_others_and_training_goes_on(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    model = paceline.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    hidden = model[0](inputs(rank))
    with pytest.raises(ValueError if rank == 1 else PeerFailed, match="boom in backward"):
        model[1](Fails.apply(hidden) if rank == 1 else hidden).sum().backward()

    model.zero_grad()
    model(inputs(rank)).sum().backward()
    grads = [torch.empty(4, 4) for _ in range(3)]
    dist.all_gather(grads, model[0].weight.grad)
    assert all(torch.equal(each, grads[0]) for each in grads)


@ranks(2)
def test_a_stall_line_says_what_a_rank_on_another_machine_does(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    model = paceline.replicate(nn.Linear(4, 2), stall_seconds=0.3)
    with listening() as lines:
        if rank == 1:
            with paceline.busy(model, "making tea"):
                time.sleep(6)
        model(inputs(rank)).sum().backward()

    if rank == 0:
        assert any("rank 1 is busy: making tea, test_control_tcp.py:" in line for line in lines), lines


@ranks(2)
def test_a_rank_that_ends_its_loop_early_is_named_between_machines(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart(monkeypatch, rank)
    model = paceline.replicate(nn.Linear(4, 2))
    model(inputs(rank)).sum().backward()
    if rank:
        from paceline.farewell import say_goodbye

        say_goodbye()
    else:
        with pytest.raises(RanksDisagree, match="rank 1 ended after 1"):
            model(inputs(rank)).sum().backward()
    dist.barrier()


# ---- two network namespaces -------------------------------------------------------------------------


needs_hosts = pytest.mark.skipif(bool(wire.why_not()), reason=wire.why_not())


def train_a_step() -> list[float]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = paceline.replicate(nn.Linear(4, 2))
    control = paceline.replica(model).reducer.wiring.control
    assert isinstance(control, TcpControl)
    model(inputs(rank)).sum().backward()
    return [float(x) for x in model.weight.grad.flatten()]


def tcp_info(**numbers: int) -> bytes:
    fields = [0] * 21
    for name, number in numbers.items():
        fields[{"retransmits": 2, "probes": 3, "unacked": 12, "last_ack": 20}[name]] = number
    return struct.pack("=8B13I", *fields)


def test_who_does_not_acknowledge_or_say_that_it_has_no_room_has_vanished() -> None:
    assert tcp.unanswered_by(tcp_info(retransmits=2, unacked=1, last_ack=16_000)) == 16.0
    assert tcp.unanswered_by(tcp_info(probes=3, last_ack=16_000)) == 16.0


def test_who_lives_and_reads_nothing_has_not_vanished() -> None:
    assert tcp.unanswered_by(tcp_info(last_ack=16_000)) == 0.0
    assert tcp.unanswered_by(tcp_info(probes=1, last_ack=60_000)) == 0.0  # it was asked a moment ago


def test_a_kernel_that_tells_less_is_believed_to_be_answered() -> None:
    assert tcp.unanswered_by(tcp_info()[:20]) == 0.0


@needs_hosts
def test_two_hosts_train_over_the_wire_between_them() -> None:
    expected = (inputs(0).sum(0) + inputs(1).sum(0)) / 2

    for got in wire.on_two_hosts(None, train_a_step):
        assert got == expected.tolist() * 2


def lose_the_wire(folder: str) -> str:
    """Rank 1's end goes down without a word, until rank 0 has said what it sees."""
    tcp.VANISHED_SECONDS = 2.0
    control = control_over(GroupComm(dist.group.WORLD))
    interface, seen = os.environ["GLOO_SOCKET_IFNAME"], Path(folder, "seen")
    dist.barrier()
    if dist.get_rank() == 1:
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
        Path(folder, "down").touch()
        until(seen.exists)
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)
        return ""
    until(Path(folder, "down").exists)
    try:
        control.post(b"t", b"")
        control.collect(b"t", 40)
    except PeerLost as error:
        return str(error)
    finally:
        seen.touch()
    return "nothing"


def until(done: Callable[[], object], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_hosts
def test_a_host_that_vanishes_is_named_although_it_closes_nothing(tmp_path: Path) -> None:
    words, _ = wire.on_two_hosts(None, lose_the_wire, str(tmp_path))

    assert words.startswith("rank 1 is gone: its machine does not answer any more (")
