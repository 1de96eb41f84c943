"""Ranks that share a machine, and take each other for ranks of others; and what they say to each other."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from paceline.comm import GroupComm
from paceline.control import (
    TcpControl,
    control_over,
    wiring,
)
from paceline.control.links import Link, framed

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


def say(link: Link, message: bytes) -> None:
    link.put(framed(message))
    assert link.flush()


@contextlib.contextmanager
def a_link() -> Iterator[tuple[Link, socket.socket]]:
    mine, theirs = socket.socketpair()
    link = Link(mine)
    with theirs:
        yield link, theirs
    link.close()


def inputs(rank: int) -> torch.Tensor:
    return torch.arange(8.0).view(2, 4) + rank
