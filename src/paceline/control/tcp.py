"""Frames between machines: TCP from rank to rank, and a look at machines that vanish without a word."""

import errno
import os
import socket
import struct

from paceline.control.links import Link
from paceline.control.sockets import SocketControl, gone

VANISHED_SECONDS = 15.0
OPTIONS = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}
_INFO = struct.Struct("=8B13I")  # the beginning of Linux's tcp_info
_RETRANSMITS, _UNACKED, _LAST_ACK = 2, 8 + 4, 8 + 12


class TcpControl(SocketControl):
    """Every rank wired to every other, over the network where they are on different machines."""

    is_local = False

    def _check_lives(self, rank: int) -> None:
        if seconds_unanswered(self._links[rank]) > VANISHED_SECONDS:
            raise gone(rank, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))


def keep_watch(wire: socket.socket) -> None:
    """Send small frames at once, and have the kernel ask a silent machine if it is still there."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in OPTIONS.items():
        wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def seconds_unanswered(link: Link) -> float:
    """Tell for how long the peer's kernel has not answered what was sent again and again.

    The kernel asks only while nothing is on its way. TCP_USER_TIMEOUT would not do for the rest: it also ends
    the connection to a rank that lives, but reads nothing for that long, because it compiles, say.
    """
    try:
        with socket.socket(fileno=os.dup(link.fileno())) as wire:
            info = _INFO.unpack(wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except OSError:  # closed, which reading shows, or a local socket
        return 0.0
    waits = info[_RETRANSMITS] and info[_UNACKED]
    return info[_LAST_ACK] / 1000 if waits else 0.0
