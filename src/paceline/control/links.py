"""A stream of messages between two ranks, over a local socket or the network.

    [ length | message ][ length | message ] ...

Nothing in here waits. What has no room yet, and what has come but in part, is kept until the next call.
"""

import os
import socket
import struct
import weakref
from collections import deque

from paceline.control.lost import FORKED, TORN, ClosedHere

MOST_NBYTES = 1 << 28  # of a message; the plan of 100,000 parameters takes a tenth of that
READ_NBYTES = 1 << 16
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}
_HEAD = struct.Struct("!I")

_links: "weakref.WeakSet[Link]" = weakref.WeakSet()  # that this process holds open


def framed(message: bytes) -> bytes:
    """Put its length before a message."""
    check_length(message)
    return _HEAD.pack(len(message)) + message


def check_length(message: bytes) -> None:
    """Raise if a message is too long to be sent, by whatever way."""
    if len(message) > MOST_NBYTES:
        raise ValueError(f"a message has {MOST_NBYTES:,} bytes at most, this one {len(message):,}")


def keep_watch(wire: socket.socket) -> None:
    """Send small frames at once, and have the kernel ask a silent machine if it is still there."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_NODELAY": 1, **KEEPALIVE}.items():
        wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """One rank's end of the wire to another one. Who is interrupted in the middle of a message closes it:
    the peer then hears of a lost rank, and never reads what is no message.
    """

    _handle = -1  # for one that was never made

    def __init__(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self.left = 0  # bytes that have had no room yet
        self._end: OSError | None = None  # the first trouble, of which the kernel speaks only once
        self._handle = wire.detach()
        _links.add(self)

    def fileno(self) -> int:
        """Return the number of the socket."""
        if self._handle < 0:
            raise OSError("the link is closed")
        return self._handle

    def close(self, why: str = "") -> None:
        """Close this end; the peer sees it when it has read everything. ``why`` is for this process."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            self._ends(ClosedHere(why) if why else None)
            os.close(handle)

    def __del__(self) -> None:
        self.close()

    def put(self, frame: bytes) -> None:
        """Have a framed message sent by ``flush()``, now or later."""
        self._out.append(memoryview(frame))
        self.left += len(frame)

    def flush(self) -> bool:
        """Send what is left, as far as there is room for it; tell whether none is left.

        What goes to a peer that has ended is dropped: its own last words are still there to be read, and
        reading shows the end.
        """
        out = self._out
        try:
            while out:
                count = os.write(self._handle, out[0])
                self.left -= count
                rest = out[0][count:]
                if rest:
                    out[0] = rest
                else:
                    out.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            self._ends(error)
        except BaseException:
            self.close(TORN)
            raise
        return True

    def _ends(self, error: OSError | None) -> None:
        self._end = self._end or error
        self._out.clear()
        self.left = 0

    def receive(self) -> bytes | None:
        """Return the next message if all of it has come. Raises OSError or EOFError if none can come."""
        message = self._cut()
        while message is None and self.fill():
            message = self._cut()
        return message

    def fill(self) -> bool:
        """Take in what has come; tell whether it was anything."""
        try:
            chunk = os.read(self._handle, READ_NBYTES)
            self._in += chunk
        except BlockingIOError:
            return False
        except OSError as error:
            self._ends(error)
            raise self._end or error from None
        except BaseException:
            self.close(TORN)
            raise
        if not chunk:
            self._ends(None)
            raise self._end or EOFError
        return True

    def _cut(self) -> bytes | None:
        """Take the next message from what has come, if it is complete."""
        if len(self._in) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._in)
        if length > MOST_NBYTES:
            self.close()
            raise OSError("what has come is no message")
        end = _HEAD.size + length
        if len(self._in) < end:
            return None
        message = bytes(self._in[_HEAD.size : end])
        del self._in[:end]
        return message


def _close_inherited() -> None:
    # A worker that outlives its rank would otherwise keep the others from seeing that the rank has ended.
    for link in list(_links):
        link.close(FORKED)


os.register_at_fork(after_in_child=_close_inherited)
