"""Which rank of how many this process is, read from the environment that its launcher set.

`paceline run` sets the variables that torchrun sets, so both are read alike; Slurm has its own. Pure: a
mapping goes in, a Place or a LaunchError comes out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import LaunchError

LOOPBACK = "127.0.0.1"
SLURM_PORTS = range(10_240, 32_000)  # below the ports that the kernel hands out by itself

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """One rank of a run, and where the ranks meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None  # None: the launcher did not say
    address: str
    port: int
    launcher_hosts_store: bool
    launcher: str  # for messages

    @property
    def on_one_machine(self) -> bool:
        """Tell whether all ranks surely run on this machine."""
        return is_loopback(self.address) or self.local_size == self.size


def is_loopback(address: str) -> bool:
    """Tell whether an address never leaves this machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def find_place(environment: Environment) -> Place | None:
    """Return this process's place, or None if no launcher has set one."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _place_from_torchrun(environment)
    if "SLURM_PROCID" in environment:
        return _place_from_slurm(environment)
    return None


def find_local_rank(environment: Environment) -> int | None:
    """Return which of this machine's ranks this is, if a launcher has said so."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in environment:
            return _Variables(environment, (name,)).number(name)
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list such as ``gpu[03-05,11],login``."""
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def _place_from_torchrun(environment: Environment) -> Place:
    variables = _Variables(environment, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
    rank, size = variables.rank_and_size("RANK", "WORLD_SIZE")
    address = variables.text("MASTER_ADDR")
    # On one machine the two counts are the same, and one is enough.
    local_name = "RANK" if is_loopback(address) and "LOCAL_RANK" not in environment else "LOCAL_RANK"
    return Place(
        rank=rank,
        size=size,
        local_rank=variables.number(local_name),
        local_size=variables.number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None,
        address=address,
        port=variables.port("MASTER_PORT"),
        launcher_hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launcher="`paceline run` or torchrun",
    )


def _place_from_slurm(environment: Environment) -> Place:
    nodes_name = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    size_name = _first_set(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    variables = _Variables(environment, ("SLURM_PROCID", size_name, "SLURM_LOCALID", nodes_name))
    rank, size = variables.rank_and_size("SLURM_PROCID", size_name)
    local_size = _slurm_local_size(environment, size)
    host = LOOPBACK if local_size == size else first_host(variables.text(nodes_name))
    return Place(
        rank=rank,
        size=size,
        local_rank=variables.number("SLURM_LOCALID"),
        local_size=local_size,
        address=environment.get("MASTER_ADDR") or host,
        port=variables.port("MASTER_PORT") if "MASTER_PORT" in environment else _slurm_port(variables),
        launcher_hosts_store=False,
        launcher="srun",
    )


def _slurm_local_size(environment: Environment, size: int) -> int | None:
    """Read how many tasks a node has out of counts such as ``4(x2)``; None if nodes differ (``4(x2),3``)."""
    if environment.get(_first_set(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")) == "1":
        return size
    counts = environment.get(_first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "")
    equal = re.fullmatch(r"(\d+)(\(x\d+\))?", counts)
    return int(equal[1]) if equal else None


def _slurm_port(variables: "_Variables") -> int:
    """Choose a port that all tasks of a job step agree on and other jobs hardly share."""
    job = variables.number(_first_set(variables.environment, "SLURM_JOB_ID", "SLURM_JOBID"))
    step = variables.environment.get("SLURM_STEP_ID", "")
    return SLURM_PORTS[(job * 101 + (int(step) if step.isdigit() else 0)) % len(SLURM_PORTS)]


def _first_set(environment: Environment, *names: str) -> str:
    return next((name for name in names if name in environment), names[-1])


@dataclass(frozen=True)
class _Variables:
    """Environment variables that belong together, and complaints about them."""

    environment: Environment
    names: tuple[str, ...]

    def text(self, name: str) -> str:
        value = self.environment.get(name, "")
        if not value:
            raise LaunchError(f"{name} is not set, but {self._those_set()}. {_ADVICE}")
        return value

    def number(self, name: str) -> int:
        value = self.text(name)
        if not (value.isascii() and value.isdigit()):
            raise LaunchError(f"{name}={value!r} is not a whole number of 0 or more. {_ADVICE}")
        return int(value)

    def port(self, name: str) -> int:
        port = self.number(name)
        if not 0 < port < 65_536:
            raise LaunchError(f"{name}={port} is not a port, which is a number from 1 to 65535. {_ADVICE}")
        return port

    def rank_and_size(self, rank_name: str, size_name: str) -> tuple[int, int]:
        rank, size = self.number(rank_name), self.number(size_name)
        if rank >= size:
            misfit = f"{rank_name}={rank} does not fit {size_name}={size}: ranks count from 0"
            raise LaunchError(f"{misfit}. {_ADVICE}")
        return rank, size

    def _those_set(self) -> str:
        some = [f"{name}={self.environment[name]}" for name in self.names if self.environment.get(name)]
        return " and ".join(some) + (" is" if len(some) == 1 else " are")


_ADVICE = (
    "Start the script with `paceline run -n N`, torchrun or srun, which set all that belongs together, "
    "or unset it all for a world of one"
)
