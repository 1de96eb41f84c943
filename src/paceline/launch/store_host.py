"""Hold the store of a `paceline run`, in a process of its own.

So the launcher needs no torch, and starts and answers at once. The launcher passes a listening loopback
socket, whose port the ranks know; they may knock before this process is up.
"""

import os
import socket
import sys
import time

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]


def host_store(listener: socket.socket) -> Store:
    """Serve a store on a listening socket; it is up as long as the returned object lives."""
    address, port = listener.getsockname()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def main(launcher: int, listener: int) -> None:
    """Serve on an inherited socket for as long as the launcher lives."""
    store = host_store(socket.socket(fileno=listener))
    while os.getppid() == launcher:
        time.sleep(1)
    del store


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
