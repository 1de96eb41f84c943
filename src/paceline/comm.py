"""The data plane: collectives on tensors, over a c10d group or over one process.

The only file below the wrappers that names ``torch.distributed``. A function that takes no ``Comm`` cannot
communicate. Collectives start in the order of the calls, and that order has to be the same on every rank.
"""

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PeerLost
from paceline.torch_private import backend_of, timeout_of


class Pending:
    """A collective under way. ``wait()`` returns its tensor; on a GPU the stream waits, not the host."""

    def __init__(self, tensor: torch.Tensor, work: Any = None) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> torch.Tensor:
        """Finish the collective. A transport that breaks is a lost peer."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise PeerLost(
                    f"a collective broke off: {_first_line(error)}. A rank has ended or its link is down; "
                    "look for the first rank that failed, its own message says why."
                ) from error
            self._work = None
        return self._tensor

    def advance(self) -> bool:
        """Wait for this collective and start the one that follows from it; tell whether there was one."""
        return False


class Comm(ABC):
    """Collectives among ``size`` ranks, seen from ``rank``."""

    rank: int
    size: int
    divisor: int  # what a mean divides by: the ranks that take part
    is_solo = False  # no other process, ever
    seconds: float  # how long a rank may keep the others waiting

    def mean_factor(self, device: torch.device) -> float:
        """Return what to multiply by before ``total()`` to get the mean; 1 if ``average()`` is as cheap."""
        return 1.0

    def among(self, active: int) -> "Comm":
        """Return the same comm for a step in which only some ranks have something to add."""
        return self

    @abstractmethod
    def total(self, flat: torch.Tensor) -> Pending:
        """Sum over the ranks, in place."""

    @abstractmethod
    def average(self, flat: torch.Tensor) -> Pending:
        """Mean over the ranks, in place."""

    @abstractmethod
    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        """Copy one rank's tensor to all, in place."""

    @abstractmethod
    def gather(self, flat: torch.Tensor) -> Pending:
        """Lay the ranks' tensors, all of one size, side by side: the result has a row for each rank."""

    @abstractmethod
    def split(self, size: int) -> "Comm":
        """Return the comm of the ``size`` neighbouring ranks that this rank is among. For set-up."""

    @abstractmethod
    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Exchange a message of any length with every rank, and wait for it. For set-up, not for steps."""


class SoloComm(Comm):
    """A world of one: everything is agreed already."""

    rank, size, divisor, seconds = 0, 1, 1, 0.0
    is_solo = True

    def total(self, flat: torch.Tensor) -> Pending:
        return Pending(flat)

    def average(self, flat: torch.Tensor) -> Pending:
        return Pending(flat)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return Pending(flat)

    def gather(self, flat: torch.Tensor) -> Pending:
        return Pending(flat.unsqueeze(0))

    def split(self, size: int) -> Comm:
        return self

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


class GroupComm(Comm):
    """A c10d process group: Gloo, NCCL, or one of each by device."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = self.divisor = group.size()
        self.seconds = timeout_of(group, _working_device(group))
        self._mean_is_native = {"cuda": backend_of(group, "cuda") == "nccl"}
        self._sum_options = _options(dist.ReduceOp.SUM)
        self._mean_options = _options(dist.ReduceOp.AVG)

    def mean_factor(self, device: torch.device) -> float:
        return 1.0 if self._mean_is_native.get(device.type) else 1 / self.divisor

    def among(self, active: int) -> Comm:
        if active == self.divisor:
            return self
        twin = copy.copy(self)
        twin.divisor = active
        twin._mean_is_native = {}  # what is built in divides by everybody
        return twin

    def total(self, flat: torch.Tensor) -> Pending:
        return Pending(flat, self.group.allreduce([_real(flat)], self._sum_options))

    def average(self, flat: torch.Tensor) -> Pending:
        if self.divisor == 1:
            return self.total(flat)
        if self._mean_is_native.get(flat.device.type):
            return Pending(flat, self.group.allreduce([_real(flat)], self._mean_options))
        # Divided before the sum, so that 16-bit sums do not overflow.
        return self.total(flat.mul_(1 / self.divisor))

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = True
        return Pending(flat, self.group.broadcast([flat], options))

    def gather(self, flat: torch.Tensor) -> Pending:
        rows = flat.new_empty(self.size, flat.numel())
        work = self.group._allgather_base(_real(rows).view(-1), _real(flat).contiguous().view(-1))
        return Pending(rows, work)

    def split(self, size: int) -> Comm:
        if size < 1 or self.size % size:
            raise ValueError(f"{self.size} ranks cannot be split into groups of {size}")
        everyone = dist.get_process_group_ranks(self.group)
        first = self.rank - self.rank % size
        group = dist.new_group(everyone[first : first + size], use_local_synchronization=True)
        return GroupComm(group)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        device = _working_device(self.group)
        lengths = self._gather(torch.tensor([len(payload)], device=device))
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
        rows = self._gather(padded)
        return [bytes(row.tolist())[: int(length)] for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        Pending(tensor, self.group.allgather([rows], [tensor])).wait()
        return rows


def comm_over(group: dist.ProcessGroup | None) -> Comm:
    """Choose the comm for a group: the given one, else the default one, else this process alone."""
    if group is not None:
        if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
            raise ValueError(
                "this rank is not in the process group that was given; replicate only on the ranks of the "
                "group"
            )
        return GroupComm(group)
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        return GroupComm(dist.group.WORLD)
    return SoloComm()


def group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """Return the process group of a one-dimensional device mesh."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or f"{mesh.ndim} dimensions"
        raise ValueError(f'replicate over one mesh dimension, such as mesh["dp"]; this mesh has {names}')
    group: dist.ProcessGroup = mesh.get_group()
    return group


def cpu_group_like(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a Gloo group of the same ranks, whose collectives are in nobody's way."""
    twin: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
    )
    return twin


def _working_device(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cpu" if backend_of(group, "cpu") is not None else "cuda")


def _options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = True
    return options


def _real(flat: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of reals, which every backend can add."""
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
