"""A process group whose link returns wrong data: a Gloo group, with something added on one rank."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = ("allgather", "broadcast", "allreduce")  # by c10d's names


class WrongLink(dist.ProcessGroup):
    """Pass everything on to a Gloo group, and change the last element that one collective returns."""

    def __init__(self, inner: Any, collective: str, odd_rank: int = 1) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._collective = collective
        self._odd_rank = odd_rank
        cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self._register_backend(cpu, gloo, inner._get_backend(cpu))
        self._set_default_backend(gloo)

    def _pass_on(self, collective: str, work: Any, results: Sequence[torch.Tensor]) -> Any:
        work.wait()
        if collective == self._collective and self._inner.rank() == self._odd_rank:
            for tensor in results:
                tensor.view(-1)[-1] += 1
        return work

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return self._pass_on("allreduce", self._inner.allreduce(tensors, options), tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:
        return self._pass_on("broadcast", self._inner.broadcast(tensors, options), tensors)

    def allgather(self, rows: Any, tensors: Any, options: Any = None) -> Any:
        work = self._inner.allgather(rows, tensors)
        return self._pass_on("allgather", work, [tensor for row in rows for tensor in row])

    def _allgather_base(self, rows: Any, tensor: Any, options: Any = None) -> Any:
        return self._pass_on("allgather", self._inner._allgather_base(rows, tensor), [rows])

    def get_group_store(self) -> Any:
        return self._inner.get_group_store()

    def getBackendName(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> str:
        return self._inner.group_name
