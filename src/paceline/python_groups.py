"""Process groups that are written in Python: what a comm needs of a group, from what such a group offers.

a comm needs        made of what torch's DistributedDataParallel uses
allreduce           allreduce
broadcast           broadcast
allgather           allgather
_allgather_base     allgather, into rows
alltoall_base       allgather, of which each rank keeps its own column
works that tell     the work's future, where it has one; its wait() anyway
whether they ended
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_OWN_LIMIT = timedelta(0)  # how torch says that the group's own limit holds
NEEDED = ("allreduce", "broadcast", "allgather")


def is_python(group: dist.ProcessGroup) -> bool:
    """Tell whether a group reduces by a method that is written in Python."""
    return _is_overridden(group, "allreduce", dist.ProcessGroup)


def name_of(group: dist.ProcessGroup) -> str | None:
    """Return the name that torch has given to a group; one that it does not know may have none."""
    try:
        return group.group_name or None
    except (AttributeError, RuntimeError):
        return None


class PythonGroup:
    """A group that is written in Python, with every collective that a comm starts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def name(self) -> str:
        """What kind of group it is, for messages."""
        name = getattr(self._group, "getBackendName", None)
        return str(name()) if name is not None else type(self._group).__name__

    def refuse_if_poor(self) -> None:
        """Raise if something is missing that every training with several ranks needs."""
        missing = [name for name in NEEDED if not _is_overridden(self._group, name, dist.ProcessGroup)]
        if missing:
            raise TypeError(
                f"the process group {type(self._group).__name__} is written in Python and has no "
                f"{', '.join(f'{name}()' for name in missing)}. Gradients and messages travel by "
                f"{', '.join(NEEDED[:-1])} and {NEEDED[-1]}: write the missing methods, as "
                "torch.distributed.ProcessGroup declares them."
            )

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> "PythonWork":
        return PythonWork(self._group.allreduce(tensors, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "PythonWork":
        return PythonWork(self._group.broadcast(tensors, options))

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        then: Callable[[], Any] | None = None,
    ) -> "PythonWork":
        c10d: Any = dist.distributed_c10d
        return PythonWork(self._group.allgather(outputs, inputs, c10d.AllgatherOptions()), then)

    def _allgather_base(self, output: torch.Tensor, flat: torch.Tensor) -> "PythonWork":
        return self.allgather([list(output.view(-1, flat.numel()).unbind())], [flat])

    def alltoall_base(
        self, output: torch.Tensor, flat: torch.Tensor, _theirs: Sequence[int], _ours: Sequence[int]
    ) -> "PythonWork":
        size, rank = self._group.size(), self._group.rank()
        rows = flat.new_empty(size, size, flat.numel() // size)  # by whom it comes from and whom it goes to
        return self.allgather(
            [list(rows.view(size, -1).unbind())], [flat], lambda: output.copy_(rows[:, rank].reshape(-1))
        )


class PythonWork:
    """A collective of such a group. If it has a future, then that tells when it has ended.

    Its own ``is_completed()`` says nothing, and a limit given to its ``wait()`` may break the group.
    """

    def __init__(self, work: Any, then: Callable[[], Any] | None = None) -> None:
        self._work = work
        self._then = then
        self._waits = type(work) is dist.Work or _is_overridden(work, "wait", dist.Work)
        try:
            self._future = work.get_future()
        except (AttributeError, RuntimeError):
            self._future = None
        if self._future is None and not self._waits:
            raise TypeError(
                f"a process group that is written in Python has returned a {type(work).__name__}, which has "
                "neither wait() nor get_future(); return a torch.distributed.Work that has one of them"
            )
        self._ended: threading.Event | None = None

    def is_completed(self) -> bool:
        """Tell whether it has ended; of one without a future only ``wait()`` can tell."""
        return self._future is None or bool(self._future.done())

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until it has ended. Raises RuntimeError if it does not within the limit."""
        if limit is not None:
            if self._future is not None and not self._ends_within(limit.total_seconds()):
                raise RuntimeError("not yet")
            return
        if self._waits:
            self._work.wait(_OWN_LIMIT)
        if self._future is not None:
            self._future.wait()
        if self._then is not None:
            self._then()
            self._then = None

    def _ends_within(self, seconds: float) -> bool:
        if self._ended is None:
            ended = self._ended = threading.Event()
            self._future.add_done_callback(lambda _: ended.set())
        return self._ended.wait(seconds)


def _is_overridden(thing: object, name: str, base: type) -> bool:
    """Tell whether a method is the thing's own, and not that of torch's class."""
    kinds = type(thing).__mro__
    own = kinds[: kinds.index(base)] if base in kinds else kinds
    return any(name in vars(kind) for kind in own)
