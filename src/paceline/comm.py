"""The data plane: collectives on tensors, over a c10d group or over one process.

The only file below the wrappers that names ``torch.distributed``. A function that takes no ``Comm`` cannot
communicate. Collectives start in the order of the calls, and that order has to be the same on every rank.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.abandoned import keep
from paceline.errors import PeerLost, PeerTimeout, first_line
from paceline.memory import Pages
from paceline.places import here
from paceline.python_groups import PythonGroup, is_python
from paceline.torch_private import backend_of, counters_of, timeout_of
from paceline.waiting import LOOK_PAUSE, STALL_SECONDS, Patience, Waiter, Waiting

LINGER = timedelta(seconds=0.1)
MOST_PAGES = 256  # sizes of messages whose memory is kept in mind


class Pending:
    """A collective under way. ``wait()`` returns its tensor; on a GPU the stream waits, not the host."""

    _work: Any = None

    def __init__(self, tensor: torch.Tensor, work: Any = None, patience: Patience | None = None) -> None:
        self._tensor = tensor
        self._work = work
        self._patience = patience

    def wait(self) -> torch.Tensor:
        """Finish the collective. A transport that breaks is a lost peer, one that is silent a PeerTimeout."""
        if self._work is not None:
            try:
                # Where the stream waits, the host does so only if it is told how long.
                if self._patience is not None and self._tensor.is_cpu and not self._work.is_completed():
                    wait_with(self._patience.begins, self._work, self._patience.pause)
                else:
                    self._work.wait()
            except PeerTimeout:
                keep(self._work, self._tensor)
                raise
            except RuntimeError as error:
                raise _broken_off(error) from error
            self._work = None
        return self._tensor

    def is_done(self) -> bool:
        """Tell whether ``wait()`` would return at once, or raise."""
        return self._work is None or bool(self._work.is_completed())

    def linger(self) -> bool:
        """Sleep until the collective has ended, but not for long; tell whether it has. ``wait()`` tells how.

        Returns at once where the stream waits, and not the host: there even to ask costs the host some time.
        """
        work = self._work
        if work is None:
            return True
        if self._patience is None or not self._tensor.is_cpu:
            return False
        if work.is_completed():
            return True
        try:
            work.wait(LINGER)
        except RuntimeError:  # not yet, or broken
            return self.is_done()
        return True

    def advance(self) -> bool:
        """Wait for this collective and start the one that follows from it; tell whether there was one."""
        return False


class _Share(Pending):
    """One rank's part of what everybody has gathered."""

    def __init__(self, gathered: Pending, rank: int) -> None:
        self._gathered = gathered
        self._rank = rank

    def wait(self) -> torch.Tensor:
        rows = self._gathered.wait()
        return rows.view(len(rows), len(rows), -1)[:, self._rank]

    def is_done(self) -> bool:
        return self._gathered.is_done()

    def linger(self) -> bool:
        return self._gathered.linger()


class Comm(ABC):
    """Collectives among ``size`` ranks, seen from ``rank``."""

    rank: int
    size: int
    divisor: int  # what a mean divides by: the ranks that take part
    is_solo = False  # no other process, ever
    is_over = False  # nothing can be sent any more, because this process has ended it
    seconds: float  # how long a rank may keep the others waiting
    stall_seconds: float = STALL_SECONDS  # when to say that one does

    def set_patience(self, seconds: float | None, stall_seconds: float) -> None:
        """Wait for other ranks as long as this; None leaves it as it is."""
        self.seconds = self.seconds if seconds is None else seconds
        self.stall_seconds = stall_seconds

    def waits(self, waiter: Waiter | None) -> None:
        """Hear who is going to wait for collectives, and can say what for."""
        del waiter  # here nobody asks

    @property
    def ranks(self) -> Sequence[int]:
        """The numbers by which all processes of the job know these ranks."""
        return range(self.size)

    def mean_factor(self, device: torch.device) -> float:
        """Return what to multiply by before ``total()`` to get the mean; 1 if ``average()`` is as cheap."""
        return 1.0

    def own_control(self) -> Any:
        """Return the control plane that this comm brings along, if it does (see paceline.control)."""
        return None

    def claim(self, module: torch.nn.Module) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse a module that cannot be this rank's own. Waits for nobody."""

    def started_on(self) -> int:
        """Count the collectives that were started over what is below, if that is counted there."""
        return 0

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

    def exchange(self, flat: torch.Tensor) -> Pending:
        """Send the j-th of ``size`` equal parts to rank j: the result has a row from each rank."""
        return _Share(self.gather(flat), self.rank)

    def numbers_of(
        self, source: int, numbers: Sequence[int], count: int, device: torch.device
    ) -> Callable[[], Sequence[int]]:
        """Broadcast one rank's whole numbers, ``count`` of them; what it returns waits for them."""
        mine = numbers if self.rank == source else [0] * count
        pending = self.broadcast(torch.tensor(mine, dtype=torch.int32, device=device), source)
        return lambda: list(pending.wait().tolist())

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


class LonelyComm(SoloComm):
    """A process group of one rank, written in Python. Its reductions go through it, as with torch's class."""

    is_solo = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._calls = PythonGroup(group)
        self._options = _options(dist.ReduceOp.SUM)

    def total(self, flat: torch.Tensor) -> Pending:
        return Pending(flat, self._calls.allreduce([_real(flat)], self._options))

    def average(self, flat: torch.Tensor) -> Pending:
        return self.total(flat)


class GroupComm(Comm):
    """A c10d process group: Gloo, NCCL, or one of each by device; or one that is written in Python.

    Such a group does not say which devices it is for: it is asked to move what is on ``device``.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = self.divisor = group.size()
        self._python = PythonGroup(group) if is_python(group) else None
        self._calls: Any = self._python or group
        own = _working_device(group) if self._python is None else device or torch.device("cpu")
        self.working_device = own  # where messages of set-up are while they travel
        self.seconds = timeout_of(group, self.working_device)
        self.patience = Patience(self.rank, self.size, self.seconds)
        self._mean_is_native = {"cuda": backend_of(group, "cuda") == "nccl"}
        self._is_torchs = dist.is_initialized()  # and not put together by hand
        self._counters = counters_of(group)
        self._pages: dict[tuple[int, torch.dtype], Pages] = {}
        self._sum_options = _options(dist.ReduceOp.SUM)
        self._mean_options = _options(dist.ReduceOp.AVG)

    def set_patience(self, seconds: float | None, stall_seconds: float) -> None:
        super().set_patience(seconds, stall_seconds)
        self.patience = Patience(self.rank, self.size, self.seconds, stall_seconds)

    def waits(self, waiter: Waiter | None) -> None:
        self.patience.waiter = waiter

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        return self._is_torchs and not dist.is_initialized()

    @property
    def ranks(self) -> Sequence[int]:
        return _known_ranks(self.group) or super().ranks

    def backend_on(self, kind: str) -> str | None:
        """Name what moves tensors of a kind of device, if anything does."""
        if self._python is not None:
            return self._python.name if kind == self.working_device.type else None
        return backend_of(self.group, kind)

    def refuse_if_unfit(self) -> None:
        """Raise if nobody can train over such a group. Sends nothing."""
        if self._python is not None:
            self._python.refuse_if_poor()
        elif "fake" in (self.backend_on("cpu"), self.backend_on("cuda")):
            raise ValueError(
                'the process group is of torch\'s "fake" backend, which moves nothing: what comes back is '
                "not what the other ranks have sent. Leave init_process_group() out and call "
                f"paceline.check(step, ranks={self.size}), which makes such a group itself and compares what "
                "each rank would send"
            )

    def mean_factor(self, device: torch.device) -> float:
        return 1.0 if self._mean_is_native.get(device.type) else 1 / self.divisor

    def started_on(self) -> int:
        total = 0
        for count in self._counters:
            total += count()
        return total

    def total(self, flat: torch.Tensor) -> Pending:
        return Pending(flat, self._calls.allreduce([_real(flat)], self._sum_options), self.patience)

    def average(self, flat: torch.Tensor) -> Pending:
        if self.divisor == 1:
            return self.total(flat)
        if self._mean_is_native.get(flat.device.type):
            return Pending(flat, self._calls.allreduce([_real(flat)], self._mean_options), self.patience)
        # Divided before the sum, so that 16-bit sums do not overflow.
        return self.total(flat.mul_(1 / self.divisor))

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.asyncOp = True
        return Pending(flat, self._calls.broadcast([flat], options), self.patience)

    def gather(self, flat: torch.Tensor) -> Pending:
        rows = self._rows(flat, flat.numel())
        work = self._calls._allgather_base(_real(rows).view(-1), _real(flat).contiguous().view(-1))
        return Pending(rows, work, self.patience)

    def exchange(self, flat: torch.Tensor) -> Pending:
        rows = self._rows(flat, flat.numel() // self.size)
        work = self._calls.alltoall_base(_real(rows).view(-1), _real(flat).view(-1), [], [])
        return Pending(rows, work, self.patience)

    def _rows(self, flat: torch.Tensor, numel: int) -> torch.Tensor:
        """Return room for a row from each rank; on a CPU in pages that need not be faulted in anew."""
        if flat.device.type != "cpu":
            return flat.new_empty(self.size, numel)
        if len(self._pages) > MOST_PAGES:
            self._pages.clear()
        pages = self._pages.setdefault((numel, flat.dtype), Pages())
        return pages.empty(self.size * numel, flat.dtype).view(self.size, numel)

    def split(self, size: int) -> Comm:
        if size < 1 or self.size % size:
            raise ValueError(f"{self.size} ranks cannot be split into groups of {size}")
        everyone = ranks_of_job(self)
        first = self.rank - self.rank % size
        group = dist.new_group(everyone[first : first + size], use_local_synchronization=True)
        return GroupComm(group)

    def gather_bytes(
        self, payload: bytes, finish: Callable[[Pending], torch.Tensor] = Pending.wait
    ) -> list[bytes]:
        device = self.working_device
        lengths = finish(self.gather_small(torch.tensor([len(payload)], device=device))).flatten().tolist()
        padded = payload.ljust(max(1, *lengths), b"\0")
        rows = finish(
            self.gather_small(torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device))
        ).tolist()
        return [bytes(row)[:length] for row, length in zip(rows, lengths, strict=True)]

    def gather_small(self, flat: torch.Tensor) -> Pending:
        """Gather by the collective that messages of set-up take."""
        rows = flat.new_empty(self.size, flat.numel())
        return Pending(rows, self._calls.allgather([list(rows.unbind())], [flat]), self.patience)


def comm_over(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Comm:
    """Choose the comm for a group: the given one, else the default one, else this process alone.

    A rank of a rehearsal has the comm of its place, and no other. ``device`` is where the model is.
    """
    if here().comm is not None:
        return _rehearsed(here().comm, group)
    if group is not None:
        if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
            raise ValueError(
                "this rank is not in the process group that was given; replicate only on the ranks of the "
                "group"
            )
        return here().over(group) or _own_comm(group, device)
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None
        return here().over(dist.group.WORLD) or _own_comm(dist.group.WORLD, device)
    return SoloComm()


def _own_comm(group: dist.ProcessGroup, device: torch.device | None) -> Comm:
    return LonelyComm(group) if is_python(group) and group.size() == 1 else GroupComm(group, device)


def _rehearsed(comm: Comm, group: dist.ProcessGroup | None) -> Comm:
    if group is not None:
        raise ValueError(
            "the ranks of a rehearsal are threads, and no process group knows them; leave group and mesh out "
            "inside rehearse()"
        )
    return comm


def group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """Return the process group of a one-dimensional device mesh."""
    if not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh has to be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or f"{mesh.ndim} dimensions"
        raise ValueError(f'replicate over one mesh dimension, such as mesh["dp"]; this mesh has {names}')
    group: dist.ProcessGroup = mesh.get_group()
    return group


def name_of_mesh(mesh: Any) -> str:
    """Return what the dimension of a one-dimensional mesh is called."""
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "a mesh"


def cpu_group_like(comm: GroupComm) -> dist.ProcessGroup:
    """Make a Gloo group of the same ranks, whose collectives are in nobody's way."""
    ranks = ranks_of_job(comm)
    twin: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return twin


def ranks_of_job(comm: GroupComm) -> Sequence[int]:
    """Return the numbers by which torch knows the ranks of a comm, to make other groups of them.

    Every rank calls this: of a group that torch does not know, they tell each other.
    """
    if (known := _known_ranks(comm.group)) is not None:
        return known
    mine = dist.get_rank() if dist.is_initialized() else -1
    ranks = [int(told) for told in comm.gather_bytes(b"%d" % mine)]
    if ranks[0] < 0 or ranks != sorted(set(ranks)):
        raise ValueError(
            "another process group is needed beside the one that is written in Python, and torch cannot make "
            f"one: in the default group its ranks have the numbers {ranks} (-1: there is none). Call "
            "init_process_group() for all of these ranks first, or number them in the same order."
        )
    return ranks


def _known_ranks(group: dist.ProcessGroup) -> Sequence[int] | None:
    try:
        ranks: list[int] = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # made by the user, behind torch's back
        return None
    return ranks


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


def wait_with(begins: Callable[[], Waiting], work: Any, pause: timedelta = LOOK_PAUSE) -> None:
    """Wait for a collective on the host, and look every now and then at who holds it up."""
    waiting: Waiting | None = None
    try:
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # not yet, or broken: the last line tells
                work.wait(pause)
            if not work.is_completed():
                waiting = waiting or begins()
                waiting.look()
    finally:
        if waiting is not None:
            waiting.end()
    work.wait()


def _broken_off(error: RuntimeError) -> PeerLost:
    text = first_line(error)
    if "timed out" in text.lower():
        return PeerTimeout(
            f"a collective took longer than the process group's timeout: {text}. A rank is stuck or its link "
            "is down; look at what the other ranks are doing, or give the process group a longer timeout."
        )
    return PeerLost(
        f"a collective broke off: {text}. A rank has ended or its link is down; look for the first rank that "
        "failed, its own message says why."
    )
