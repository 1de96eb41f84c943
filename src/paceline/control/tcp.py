"""Frames between machines: TCP from rank to rank, and a look at machines that vanish without a word."""

import errno
import os
import socket
import struct

from paceline.control.links import Link
from paceline.control.lost import gone
from paceline.control.sockets import SocketControl

VANISHED_SECONDS = 15.0
_INFO = struct.Struct("=8B13I")  # the beginning of Linux's tcp_info
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK = 2, 3, 8 + 4, 8 + 12
_MOST_PROBES = 2  # without an answer, and one of them may be lost


class TcpControl(SocketControl):
    """Every rank wired to every other, over the network where they are on different machines."""

    is_local = False

    def _check_lives(self, rank: int) -> None:
        if seconds_unanswered(self._links[rank]) > VANISHED_SECONDS:
            raise gone(rank, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))


def seconds_unanswered(link: Link) -> float:
    """Tell for how long the peer's kernel has not answered what was sent again and again.

    The kernel asks only while nothing is on its way. TCP_USER_TIMEOUT would not do for the rest: it also ends
    the connection to a rank that lives, but reads nothing for that long, because it compiles, say.
    """
    try:
        with socket.socket(fileno=os.dup(link.fileno())) as wire:
            info = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # closed, which reading shows, or a local socket
        return 0.0
    return unanswered_by(info)


def unanswered_by(info: bytes) -> float:
    """Read it out of a ``tcp_info``: frames sent again, or questions to a peer that had no room for more."""
    try:
        numbers = _INFO.unpack(info)
    except struct.error:  # a kernel that tells less
        return 0.0
    waits = (numbers[_RETRANSMITS] and numbers[_UNACKED]) or numbers[_PROBES] > _MOST_PROBES
    return numbers[_LAST_ACK] / 1000 if waits else 0.0
