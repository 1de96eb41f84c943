"""A listening socket that only this machine reaches."""

import socket

from paceline.launch.place import LOOPBACK

BACKLOG = 2048  # ranks that may knock before the store is up


def listen_on_loopback(port: int = 0) -> socket.socket:
    """Open a listening socket on loopback; port 0 lets the kernel choose."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
