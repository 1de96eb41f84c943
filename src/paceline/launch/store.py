"""The key-value store through which the ranks of a world meet.

Whoever hosts it on a single machine does so on a loopback socket: left to itself, torch's store listens on
every interface.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import LaunchError, name_ranks
from paceline.launch.place import LOOPBACK, Place
from paceline.launch.sockets import listen_on_loopback
from paceline.launch.store_host import host_store


def open_store(place: Place, seconds: float) -> Store:
    """Open the store of a run; rank 0 hosts it, unless the launcher does."""
    if place not in _opened:
        _opened[place] = _open(place, seconds)
    _opened[place].set_timeout(timedelta(seconds=seconds))
    return _opened[place]


# Kept for the life of the process: a second world would find the store of the first one closing, or its port
# still in use.
_opened: dict[Place, Store] = {}


def _open(place: Place, seconds: float) -> Store:
    address, limit = place.address, timedelta(seconds=seconds)
    if place.on_one_machine and not place.launcher_hosts_store:
        address = LOOPBACK
    where = f"rank {place.rank} of {place.size} %s {address}:{place.port} (MASTER_ADDR, MASTER_PORT)"
    if place.rank == 0 and not place.launcher_hosts_store:
        with _launch_errors(where % "cannot listen on", "Another run may use this port"):
            if address == LOOPBACK:
                return host_store(listen_on_loopback(place.port))
            return TCPStore(address, place.port, is_master=True, wait_for_workers=False, timeout=limit)
    with _launch_errors(where % f"found nobody in {seconds:g} s at", "See that rank 0 is running there"):
        _wait_for_listener(address, place.port, seconds)
        return TCPStore(address, place.port, is_master=False, wait_for_workers=False, timeout=limit)


def meet(store: Store, place: Place, seconds: float) -> None:
    """Wait until all ranks have come, or say who has not."""
    store.set(f"here/{place.rank}", "")
    if not wait_for_all(store, "come", place.size, seconds):
        missing = [rank for rank in range(place.size) if not store.check([f"here/{rank}"])]
        raise LaunchError(
            f"rank {place.rank} of {place.size} waited {seconds:g} s at {place.address}:{place.port}, and "
            f"{name_ranks(missing)} did not come. Look for an error of theirs, or see that {place.launcher} "
            f"started all {place.size}"
        )


def wait_for_all(store: Store, point: str, size: int, seconds: float) -> bool:
    """Count this rank in at a named point, and tell whether all ranks came there in time."""
    deadline = time.monotonic() + seconds
    come, pause = store.add(point, 1), 0.005
    # Asked again and again, rather than with Store.wait: that one cannot be interrupted by Ctrl-C.
    while come < size and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.2)
        come = store.add(point, 0)
    return bool(come >= size)


def _wait_for_listener(address: str, port: int, seconds: float) -> None:
    """Knock until somebody listens: torch's own store would fill the terminal with its attempts."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(0.1, left)).close()
            return
        except OSError:
            if left <= 0:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def _launch_errors(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except (DistError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise LaunchError(f"{what}: {reason}. {advice}") from error
