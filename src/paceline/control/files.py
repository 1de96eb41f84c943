"""Memory that the ranks of one machine share: each makes a nameless file, and passes it to the others."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

from paceline.control.links import Link
from paceline.control.lost import gone

SECONDS = 60.0  # for a file to come

T = TypeVar("T")


def exchange_files(links: dict[int, Link], name: str, view: Callable[[int], T]) -> tuple[T, dict[int, T]]:
    """Return a view of this rank's file and of each peer's. Nothing is left in the file system.

    Raises PeerLost naming a rank that has ended, or does not come.
    """
    file = os.memfd_create(name)
    try:
        mine = view(file)
        for peer, link in links.items():
            with _socket_to(peer, link) as wire:
                socket.send_fds(wire, [b"m"], [file])
    finally:
        os.close(file)
    return mine, {peer: _receive(peer, link, view) for peer, link in links.items()}


def _receive(peer: int, link: Link, view: Callable[[int], T]) -> T:
    with _socket_to(peer, link) as wire:
        _, files, _, _ = socket.recv_fds(wire, 1, 1)
        if not files:
            raise EOFError
    try:
        return view(files[0])
    finally:
        os.close(files[0])


@contextlib.contextmanager
def _socket_to(peer: int, link: Link) -> Iterator[socket.socket]:
    try:
        with socket.socket(fileno=os.dup(link.fileno())) as wire:
            wire.settimeout(SECONDS)
            yield wire
    except (OSError, EOFError) as error:
        raise gone(peer, error) from error
