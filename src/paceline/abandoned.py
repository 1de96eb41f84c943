"""Collectives that were given up while they were under way.

Their memory is kept for good: when a stopped rank goes on, the transport would write into whatever has taken
its place. At exit Gloo would wait for them until the group's own timeout, so its links are cut then.
"""

import atexit
import contextlib
import functools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_kept: list[tuple[Any, Any]] = []


def keep(work: Any, tensor: Any) -> None:
    """Hold on to a collective that nobody waits for any more."""
    _kept.append((work, tensor))


@functools.cache
def cut_links_at_exit() -> None:
    """See to it that this process can end although buckets may be out that a stopped rank does not take."""
    atexit.register(cut_links)


def cut_links() -> None:
    """Shut down the connections of Gloo."""
    for number in _numbers():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6):
                link.getpeername()  # never a socket that listens: that would abort the process
                link.shutdown(socket.SHUT_RDWR)


def _numbers() -> Iterator[int]:
    """Yield the descriptors that Gloo polls: it registers them with a pointer, all others with themselves."""
    for info in Path("/proc/self/fdinfo").glob("*"):
        with contextlib.suppress(OSError):
            for number, data in re.findall(r"^tfd:\s+(\d+) .*?data:\s+([0-9a-f]+)", info.read_text(), re.M):
                if int(data, 16) != int(number):
                    yield int(number)
