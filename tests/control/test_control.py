"""The control plane: frames reach every rank, and a dead or silent rank is named."""

import time

import pytest
import torch.distributed as dist

from paceline.comm import GroupComm, SoloComm
from paceline.control import Control, GroupControl, MailboxControl, SocketControl, SoloControl, control_over
from paceline.control.mailbox import SLOTS
from paceline.errors import PeerLost, PeerTimeout, RanksDisagree
from paceline.frames import Closing, Kind, Opening, Round
from paceline.testing import ranks


def both_kinds() -> list[Control]:
    comm = GroupComm(dist.group.WORLD)
    return [control_over(comm), GroupControl(comm)]


def test_a_world_of_one_hears_itself() -> None:
    control = control_over(SoloComm())
    control.post(b"t", b"hello")

    assert isinstance(control, SoloControl)
    assert control.collect(b"t", 1) == [b"hello"]


@ranks(3)
def test_every_rank_gets_every_frame_in_rank_order(rank: int) -> None:
    for control in both_kinds():
        for length in (0, 5, 1000):
            control.post(b"topic", bytes([rank]) * length)
            assert control.collect(b"topic", 20) == [bytes([r]) * length for r in range(3)]


def by_sockets_alone(control: MailboxControl) -> SocketControl:
    return SocketControl(control._rank, control._links)


@ranks(3)
def test_sockets_alone_do_it_too(rank: int) -> None:
    control = by_sockets_alone(control_over(GroupComm(dist.group.WORLD)))
    for length in (0, 5, 100_000):
        control.post(b"topic", bytes([rank]) * length)
        assert control.collect(b"topic", 20) == [bytes([r]) * length for r in range(3)]


@ranks(2)
def test_more_frames_than_a_mailbox_has_slots(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    for number in range(3 * SLOTS):
        frame = bytes([number % 256]) * (5000 if number % 7 == 0 else 10)
        control.post(b"t", frame)
        assert control.collect(b"t", 20) == [frame, frame]


@ranks(2)
def test_a_rank_that_is_ahead_waits_for_room_in_its_mailbox(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    if rank == 0:
        for number in range(2 * SLOTS):
            control.post(b"t", bytes([number]))
        for _ in range(2 * SLOTS):
            control.collect(b"t", 20)
    else:
        time.sleep(0.05)  # let rank 0 run into the wall
        for number in range(2 * SLOTS):
            control.post(b"t", b"")
            assert control.collect(b"t", 20)[0] == bytes([number])
    dist.barrier()


@ranks(2)
def test_ranks_of_one_machine_share_mailboxes(rank: int) -> None:
    comm = GroupComm(dist.group.WORLD)

    assert isinstance(control_over(comm), MailboxControl)
    assert control_over(comm) is control_over(GroupComm(dist.group.WORLD))


@ranks(2)
def test_topics_do_not_mix_when_ranks_post_them_in_different_orders(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    topics = [b"a", b"b"] if rank == 0 else [b"b", b"a"]
    for topic in topics:
        control.post(topic, topic + bytes([rank]))

    assert control.collect(b"a", 20) == [b"a\0", b"a\1"]
    assert control.collect(b"b", 20) == [b"b\0", b"b\1"]


@ranks(2)
@pytest.mark.parametrize("way", ["mailboxes", "sockets"])
def test_ranks_that_collect_different_topics_raise_and_begin_anew(rank: int, way: str) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    if way == "sockets":
        desk, control = control.desk, by_sockets_alone(control)
        control.desk = desk
    topic = b"a" if rank == 0 else b"b"
    control.post(b"left behind", b"old")
    control.post(topic, b"old")
    with pytest.raises(RanksDisagree, match="rank 0 waits for a; rank 1 waits for b") as caught:
        control.collect(topic, 30)
    assert caught.value.is_known
    assert control.ended is None

    for name in (b"left behind", b"a", b"b"):
        control.post(name, bytes([rank]))
    for name in (b"b", b"left behind", b"a"):
        assert control.collect(name, 30) == [b"\0", b"\1"]


@ranks(2)
def test_ranks_that_have_sent_different_buckets_are_ended_by_a_deadlock(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    control.note(b"bucket %d" % rank)
    topic = b"a" if rank == 0 else b"b"
    control.post(topic, b"")
    with pytest.raises(RanksDisagree, match="nothing can be reduced over this group any more"):
        control.collect(topic, 30)

    assert isinstance(control.ended, RanksDisagree)


@ranks(2)
def test_over_a_group_ranks_at_different_points_are_told_apart(rank: int) -> None:
    control = GroupControl(GroupComm(dist.group.WORLD))
    topic = b"opening" if rank == 0 else b"closing"
    control.post(topic, b"")

    with pytest.raises(RanksDisagree, match="points: rank 0 is at opening, rank 1 is at closing"):
        control.collect(topic, 20)


@ranks(2)
def test_a_silent_rank_is_named(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    if rank == 0:
        control.post(b"t", b"")
        with pytest.raises(
            PeerTimeout, match=r"rank 0 has waited 0\.\d s for t: .* rank 1 is missing"
        ) as caught:
            control.collect(b"t", 0.2)
        assert caught.value.rank == 1
    dist.barrier()


@ranks(3)
def test_a_rank_whose_process_ended_is_named(rank: int) -> None:
    control = control_over(GroupComm(dist.group.WORLD))
    if rank == 2:
        for link in control._links.values():
            link.close()
    else:
        with pytest.raises(PeerLost, match="rank 2 is gone: it closed its connection") as caught:
            control.post(b"first", b"")
            control.collect(b"first", 30)
        assert caught.value.rank == 2
    dist.barrier()


def test_frames_survive_packing() -> None:
    odd = Opening(2**40, b"\0" * 8, 9, Kind.JOINED, told=(b"x", b""), failure="ValueError: ü")
    for opening in (Opening(3, b"12345678"), odd):
        assert Opening.unpack(opening.pack()) == opening
    full = Closing(7, b"\1\0\1", 70000, (1, 0, 70000), (4, 10, 1), told=(b"", b"y"))
    for closing in (Closing(), full, Closing(failure="boom\nline", stuck=True)):
        assert Closing.unpack(closing.pack()) == closing
    for told in (Round(), Round(more=True), Round(failure="ValueError: ü")):
        assert Round.unpack(told.pack()) == told
