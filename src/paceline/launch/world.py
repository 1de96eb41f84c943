"""world(): this process's rank, size, device and process group, wherever it was started.

with paceline.world() as world:
    print(world.rank, world.size, world.device)
"""

import atexit
import contextlib
import os
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from paceline.compile.guarding import constant_while
from paceline.farewell import say_goodbye
from paceline.hosts import interface_for_peers
from paceline.launch.device import choose_backend, choose_device
from paceline.launch.job import loopback_variables
from paceline.launch.place import Place, find_local_rank, find_place
from paceline.launch.store import meet, open_store, wait_for_all
from paceline.places import here
from paceline.quiet import wait_for_workers
from paceline.torch_private import backend_of

MEETING_SECONDS = 300.0  # how long ranks wait for each other at the start, unless told otherwise
CLOSING_SECONDS = 10.0  # how long close() waits for anything


@dataclass(frozen=True)
class World:
    """This process's place among the ranks. Make one with :func:`world`.

    ``backend`` is None in a world of one under plain python: then there is no process group.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str | None
    _membership: "_Membership | None" = field(default=None, repr=False, compare=False)

    def close(self) -> None:
        """Leave the world: close the process group that world() made. Again is fine, and does nothing."""
        if self._membership is not None:
            say_goodbye()
            self._membership.end(politely=True)

    def __enter__(self) -> Self:
        """Return this world, to be left at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception, without waiting for anybody."""
        if self._membership is not None:
            say_goodbye(error)
            self._membership.end(politely=kind is None)


def _ranks_now() -> tuple[int, int, str | None]:
    """Return what a world would be made of now, without making one."""
    if (rehearsed := here().comm) is not None:
        return rehearsed.rank, rehearsed.size, "threads"
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
    return 0, 1, None


@constant_while(_ranks_now)
def world(
    backend: str | None = None, device: str | torch.device | None = None, timeout: float | None = None
) -> World:
    """Find this process's place and join the other ranks; call it once, before anything that communicates.

    Reads what `paceline run`, torchrun or Slurm have set; under plain python it is a world of one, without a
    process group. An existing default process group is adopted, and left open by close(). ``timeout`` is in
    seconds, for the meeting at the start and for every collective after it. Inside rehearse() it is the
    world of the rehearsal, on the CPU.
    """
    if timeout is not None and timeout <= 0:
        raise ValueError(f"world() needs a timeout above 0 seconds, got {timeout!r}")
    if (rehearsed := here().comm) is not None:
        return World(rehearsed.rank, rehearsed.size, rehearsed.rank, torch.device(device or "cpu"), "threads")
    if dist.is_initialized():
        return _adopt(device)
    place = find_place(os.environ)
    if place is None:
        return World(0, 1, 0, choose_device(device, 0, backend), None)
    return _join(place, backend, device, timeout)


def _adopt(device: str | torch.device | None) -> World:
    """Describe the process group that somebody else has made."""
    rank, backend = dist.get_rank(), _backend_of_default_group()
    local_rank = find_local_rank(os.environ)
    if device is None and "nccl" not in backend:
        device = "cpu"
    local_rank = rank if local_rank is None else local_rank
    atexit.register(wait_for_workers, CLOSING_SECONDS)
    return World(rank, dist.get_world_size(), local_rank, choose_device(device, local_rank, backend), backend)


def _backend_of_default_group() -> str:
    backend = str(dist.get_backend())
    if backend != "undefined":
        return backend
    # init_process_group() without a backend leaves the choice to torch, device by device.
    names = {device: backend_of(dist.group.WORLD, device) for device in ("cpu", "cuda")}
    return ",".join(f"{device}:{name}" for device, name in names.items() if name)


def _join(
    place: Place, backend: str | None, device: str | torch.device | None, timeout: float | None
) -> World:
    chosen = choose_device(device, place.local_rank, backend)
    if place.on_one_machine:
        _stay_on_loopback()
    else:
        _leave_loopback(place.address)
    seconds = MEETING_SECONDS if timeout is None else timeout
    store = _own_keys(open_store(place, seconds), place.rank)
    meet(store, place, seconds)
    backend = backend or choose_backend(chosen, place, store)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
        device_id=chosen if chosen.type == "cuda" and "nccl" in backend else None,
    )
    membership = _Membership(place, store, backend)
    return World(place.rank, place.size, place.local_rank, chosen, backend, membership)


def _stay_on_loopback() -> None:
    """Keep all sockets on loopback, unless the user has chosen an interface."""
    for name, value in loopback_variables().items():
        os.environ.setdefault(name, value)


def _leave_loopback(meeting_point: str) -> None:
    """Have Gloo listen where the other machines can reach it, unless the user has chosen an interface."""
    if interface := interface_for_peers(meeting_point):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _own_keys(store: Store, rank: int) -> Store:
    """Give every world of a run its own keys: a second one must not find those of the first."""
    return PrefixStore(f"world/{store.add(f'worlds/{rank}', 1)}", store)


class _Membership:
    """The process group that world() made, until it is closed."""

    def __init__(self, place: Place, store: Store, backend: str) -> None:
        self._place = place
        self._store: Store | None = store
        self._may_block = "nccl" in backend
        atexit.register(self._on_exit)

    def end(self, *, politely: bool) -> None:
        """Close the group; politely means that the store outlives its users."""
        store, self._store = self._store, None
        if store is None:
            return
        atexit.unregister(self._on_exit)
        if dist.is_initialized():
            self._destroy_group()
        wait_for_workers(CLOSING_SECONDS)
        if not self._place.launcher_hosts_store:
            self._say_bye(store, CLOSING_SECONDS if politely and self._place.rank == 0 else 0)

    def _say_bye(self, store: Store, seconds: float) -> None:
        """Count this rank out; rank 0, whose store it is, waits for the others."""
        with contextlib.suppress(DistError):  # the others may be gone, and the store with them
            wait_for_all(store, "bye", self._place.size, seconds)

    def _on_exit(self) -> None:
        """Close what the script left open; the interpreter calls this at its end."""
        self.end(politely=not hasattr(sys, "last_value"))

    def _destroy_group(self) -> None:
        if not self._may_block:
            dist.destroy_process_group()
            return
        # NCCL waits for kernels that wait for ranks that may be gone. When the interpreter ends, no thread
        # can be started any more; then it has to be done here.
        destroyer = threading.Thread(target=dist.destroy_process_group, daemon=True)
        try:
            destroyer.start()
        except RuntimeError:
            dist.destroy_process_group()
        else:
            destroyer.join(CLOSING_SECONDS)
