"""What `paceline run` starts: the command line and the environment of every rank. Pure."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.launch.place import LOOPBACK


@dataclass(frozen=True)
class Job:
    """A script or module with its arguments, and on how many ranks to run it."""

    target: tuple[str, ...]  # script.py args... or -m module args...
    size: int
    drop_in: bool = False
    prefix: bool = True

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of every rank."""
        if self.drop_in:
            # -P: the folder we happen to be in must not hide what the bootstrap imports.
            return (sys.executable, "-P", "-m", "paceline.launch.bootstrap", *self.target)
        return (sys.executable, *self.target)

    def prefix_of(self, rank: int) -> bytes:
        """Return what stands before every line of a rank."""
        width = len(str(self.size - 1))
        return f"[rank {rank:>{width}}] ".encode() if self.prefix else b""


def rank_environment(base: Mapping[str, str], rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of one rank: what torchrun would set, and loopback for all sockets."""
    return {**_defaults(size), **base, **_place(rank, size, port)}


def loopback_interface() -> str:
    """Name the network interface that never leaves this machine."""
    return "lo" if sys.platform == "linux" else "lo0"


def loopback_variables() -> dict[str, str]:
    """Return what keeps the sockets of Gloo, NCCL and RPC on loopback."""
    return dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), loopback_interface()
    )


def _defaults(size: int) -> dict[str, str]:
    """Return what holds unless the user has set it."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // size)), "PYTHONFAULTHANDLER": "1", **loopback_variables()}


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"paceline-{os.getpid()}",
        "PYTHONUNBUFFERED": "1",
    }
