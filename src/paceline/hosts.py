"""Where this process runs: the machine's name, and the addresses of the interfaces that ranks may use."""

import contextlib
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where users say which interface is taken


def this_place() -> str:
    """Name the machine and its addresses: ``node3 (eth0 10.0.0.3)``."""
    return f"{socket.gethostname()} ({', '.join(_addresses()) or 'no address found'})"


def _addresses() -> list[str]:
    """Return the interfaces that were chosen, or all that leave the machine, or what there is."""
    found = _interfaces()
    chosen = {part for name in CHOICES for part in os.environ.get(name, "").split(",")}
    off_loopback = {name for name, address in found.items() if not address.startswith("127.")}
    for names in (chosen, off_loopback, found.keys()):
        shown = [f"{name} {address}" for name, address in found.items() if name in names]
        if shown:
            return shown
    return []


def _interfaces() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no IPv4 address, or another system than Linux
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
