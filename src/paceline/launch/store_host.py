"""Hold the store of a `paceline run`, in a process of its own.

So the launcher needs no torch, and starts and answers at once. The launcher passes a listening loopback socket, whose
port the ranks know; they may knock before this process is up. It ends when its stdin does, so with the launcher.
"""

import os
import socket
import sys

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]


def host_store(listener: socket.socket) -> Store:
    """Serve a store on a listening socket; it is up as long as the returned object lives."""
    address, port = listener.getsockname()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def main() -> None:
    """Serve until stdin ends."""
    store = host_store(socket.socket(fileno=int(sys.argv[1])))
    sys.stdin.read()
    del store
    os._exit(0)


if __name__ == "__main__":
    main()
