"""Where this process runs: the machine's name, and the addresses of the interfaces that ranks may use."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # where users say which interface is taken
ANY_PORT = 9  # for a socket that sends nothing


def this_host() -> str:
    """Name what two processes have to share to reach each other by an abstract socket. Linux only.

    Whose they are does not matter: such a socket has no permissions, and who connects proves who it is.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


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


# ---- the address at which ranks on other machines find this one ------------------------------------------


def address_for_peers(meeting_point: str | None) -> str | None:
    """Return the one address of this machine that the other ranks can probably reach, if there is any.

    ``meeting_point`` is the host at which the ranks have met.
    """
    if chosen := chosen_address(os.environ, _all_interfaces()):
        return chosen
    return best_address(_routes_and_names(meeting_point))


def interface_for_peers(meeting_point: str) -> str | None:
    """Name the interface by which other machines reach this one, if its own name does not lead there.

    Gloo takes the address that the host name stands for. On many machines that is loopback, or not theirs.
    """
    leading = {
        address: name
        for name, found in _all_interfaces().items()
        for address in found
        if not ipaddress.ip_address(address).is_loopback
    }
    own = [str(where[0]) for *_, where in _look_up(socket.gethostname())]
    if own and own[0] in leading:
        return None
    return leading.get(best_address(_routes_and_names(meeting_point)) or "")


def chosen_address(environment: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]) -> str | None:
    """Return the address of the interface that the user has named. NCCL's patterns are not followed."""
    for choice in CHOICES:
        for name in environment.get(choice, "").split(","):
            if found := interfaces.get(name.strip()):
                return found[0]
    return None


def best_address(found: Iterable[str]) -> str | None:
    """Return the first address that leaves the machine, else the first one."""
    usable = (address for address in found if _is_usable(address))
    first = None
    for address in usable:
        if not ipaddress.ip_address(address).is_loopback:
            return address
        first = first or address
    return first


def _is_usable(address: str) -> bool:
    """Tell whether an address is one of one machine, and means the same one everywhere."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local)


def _routes_and_names(meeting_point: str | None) -> Iterator[str]:
    """Yield what this machine is called on its way to the meeting point, then by its own name."""
    if meeting_point:
        for family, kind, protocol, _, where in _look_up(meeting_point):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # of a datagram socket: finds the route, sends nothing
                yield probe.getsockname()[0]
    for *_, where in _look_up(socket.gethostname()):
        yield str(where[0])


def _look_up(host: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except (OSError, UnicodeError):
        return []


def _all_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first."""
    found = {name: [address] for name, address in _interfaces().items()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            if _is_usable(address):
                found.setdefault(name, []).append(address)
    return found
