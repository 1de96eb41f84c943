"""Memory that the ranks of one machine share: each makes a nameless file, and passes it to the others."""

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from paceline.control.links import Link

SECONDS = 60.0  # for a file to come

T = TypeVar("T")


def exchange_files(links: dict[int, Link], name: str, view: Callable[[int], T]) -> tuple[T, dict[int, T]]:
    """Return a view of this rank's file and of each peer's. Nothing is left in the file system."""
    file = os.memfd_create(name)
    try:
        mine = view(file)
        for link in links.values():
            with _socket_of(link) as wire:
                socket.send_fds(wire, [b"m"], [file])
    finally:
        os.close(file)
    return mine, {peer: _receive(link, view) for peer, link in links.items()}


def _receive(link: Link, view: Callable[[int], T]) -> T:
    with _socket_of(link) as wire:
        _, files, _, _ = socket.recv_fds(wire, 1, 1)
    try:
        return view(files[0])
    finally:
        os.close(files[0])


def _socket_of(link: Link) -> socket.socket:
    wire = socket.socket(fileno=os.dup(link.fileno()))
    wire.settimeout(SECONDS)
    return wire
