"""The least that a reducer with flat buckets does in Python: what host time it cannot go below.

One hook for each bucket, on the parameter whose gradient comes last; one copy, one collective, views, and
setting them. Nothing is checked, compared or remembered, and a gradient that comes in another order breaks
it: this is a measure, not a reducer.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

MIB = 1 << 20
CAPS = (1 * MIB, 25 * MIB)  # torch's, and ours


class Floor:
    """Reduces the gradients of a model in a world of one."""

    def __init__(self, model: nn.Module) -> None:
        self._buckets = _cut(list(model.parameters())[::-1])
        self._options = dist.AllreduceOptions()
        on_gpu = self._buckets[0][0].is_cuda
        self._options.reduceOp = dist.ReduceOp.AVG if on_gpu else dist.ReduceOp.SUM
        self._options.asyncOp = True
        self._works: list[Any] = []
        self._nodes = [
            bucket[-1].expand_as(bucket[-1]).grad_fn.next_functions[0][0] for bucket in self._buckets
        ]
        for node, bucket in zip(self._nodes, self._buckets, strict=True):
            node.register_hook(lambda *_, bucket=bucket: self._send(bucket))

    def _send(self, bucket: list[torch.Tensor]) -> None:
        if not self._works:
            Variable._execution_engine.queue_callback(self._finish)
        gradients: Any = [parameter.grad for parameter in bucket]
        flat = torch._C._nn.flatten_dense_tensors(gradients)
        self._works.append(dist.group.WORLD.allreduce([flat], self._options))
        views = torch._C._nn.unflatten_dense_tensors(flat, gradients)
        for parameter, view in zip(bucket, views, strict=True):
            parameter.grad = view

    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


def floored(model: nn.Module) -> nn.Module:
    """Have a model's gradients reduced at the least cost."""
    model._floor = Floor(model)  # lives as long as the model
    return model


def _cut(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = [[]]
    filled = 0
    for parameter in parameters:
        cap = CAPS[min(len(buckets), len(CAPS)) - 1]
        if buckets[-1] and filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.nbytes
    return buckets
