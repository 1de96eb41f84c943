"""Ranks of several machines have what those of one have."""

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.comm import GroupComm
from paceline.control import (
    GroupControl,
    SocketControl,
    TcpControl,
    control_over,
    files,
    links,
    tcp,
    wiring,
)
from paceline.control.lost import gone
from paceline.control.switchboard import open_door_at
from paceline.errors import PeerFailed, PeerLost, RanksDisagree
from paceline.testing import ranks
from tests.control.machines import a_link, apart, family_of, inputs, tcp_control
from tests.listening import listening

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
        assert any("rank 1 is busy: making tea, test_tcp.py:" in line for line in lines), lines


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
