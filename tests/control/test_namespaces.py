"""Frames between two hosts: two network namespaces with a wire between them."""

import os
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from benchmarks import link as wire
from paceline.comm import GroupComm
from paceline.control import (
    TcpControl,
    control_over,
    tcp,
)
from paceline.errors import PeerLost
from tests.control.machines import inputs

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
