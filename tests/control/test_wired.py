"""Ranks that are wired to each other, all in one process: room, interrupts, threads, forks."""

import contextlib
import gc
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.control import (
    MailboxControl,
    SocketControl,
    TcpControl,
    links,
    sockets,
)
from paceline.control.links import Link
from paceline.errors import PeerLost, PeerTimeout

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
