"""A stream of messages between two ranks, over a local socket or the network.

    [ length | message ][ length | message ] ...

Nothing in here waits. What has no room yet, and what has come but in part, is kept until the next call.
"""

import os
import socket
import struct
import weakref
from collections import deque

MOST_NBYTES = 1 << 28  # of a message; the plan of 100,000 parameters takes a tenth of that
READ_NBYTES = 1 << 16
_HEAD = struct.Struct("!I")

_links: "weakref.WeakSet[Link]" = weakref.WeakSet()  # that this process holds open


def framed(message: bytes) -> bytes:
    """Put its length before a message."""
    if len(message) > MOST_NBYTES:
        raise ValueError(f"a message has {MOST_NBYTES:,} bytes at most, this one {len(message):,}")
    return _HEAD.pack(len(message)) + message


class Link:
    """One rank's end of the wire to another one. Who is interrupted in the middle of a message closes it:
    the peer then hears of a lost rank, and never reads what is no message.
    """

    def __init__(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        self._handle = wire.detach()
        self._in = bytearray()
        self._out: deque[memoryview] = deque()
        self._end: OSError | None = None  # the first trouble, of which the kernel speaks only once
        _links.add(self)

    def fileno(self) -> int:
        """Return the number of the socket."""
        if self._handle < 0:
            raise OSError("the link is closed")
        return self._handle

    def close(self) -> None:
        """Close this end; the peer sees it when it has read everything."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        self.close()

    def put(self, frame: bytes) -> None:
        """Have a framed message sent by ``flush()``, now or later."""
        self._out.append(memoryview(frame))

    def flush(self) -> bool:
        """Send what is left, as far as there is room for it; tell whether none is left.

        What goes to a peer that has ended is dropped: its own last words are still there to be read, and
        reading shows the end.
        """
        out = self._out
        try:
            while out:
                rest = out[0][os.write(self._handle, out[0]) :]
                if rest:
                    out[0] = rest
                else:
                    out.popleft()
        except BlockingIOError:
            return False
        except OSError as error:
            self._end = self._end or error
            out.clear()
        except BaseException:
            self.close()
            raise
        return True

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
            self._end = self._end or error
            raise self._end from None
        except BaseException:
            self.close()
            raise
        if not chunk:
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
        link.close()


os.register_at_fork(after_in_child=_close_inherited)
