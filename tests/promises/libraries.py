"""The three libraries that every scenario runs on, behind one face."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import paceline

TORCH_SECONDS = 3  # some rows leave a rank of torch's waiting for ever; this bounds it


class Library:
    """How a library wraps a model. ``arguments`` are torch's; a library drops those it has no need of."""

    name: str

    def wrap(self, model: nn.Module, **arguments: Any) -> nn.Module:
        raise NotImplementedError

    def bare(self, wrapped: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return wrapped.module

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        return wrapped.no_sync()

    def check_finite(self, wrapped: nn.Module) -> None:
        """Have every backward look for NaN and Inf, where that can be had."""
        paceline.replica(wrapped).check_finite()

    def audit(self, wrapped: nn.Module, every: int) -> None:
        """Have the ranks compare what they hold, where that can be had."""
        paceline.audit(wrapped, every)

    def weight(self, wrapped: nn.Module, samples: int) -> AbstractContextManager[None]:
        """Say what a backward stands for, where that can be said."""
        return paceline.weight(wrapped, samples)

    def __str__(self) -> str:
        return self.name


class Torch(Library):
    name = "torch"

    def wrap(self, model: nn.Module, **arguments: Any) -> nn.Module:
        if "process_group" not in arguments:
            arguments["process_group"] = dist.new_group(timeout=timedelta(seconds=TORCH_SECONDS))
        return nn.parallel.DistributedDataParallel(model, **arguments)

    def weight(self, wrapped: nn.Module, samples: int) -> AbstractContextManager[None]:
        return nullcontext()

    def check_finite(self, wrapped: nn.Module) -> None:
        pass

    def audit(self, wrapped: nn.Module, every: int) -> None:
        pass


class Replicate(Library):
    name = "replicate()"

    def wrap(self, model: nn.Module, *, process_group: Any = None, **arguments: Any) -> nn.Module:
        for flag in ("find_unused_parameters", "static_graph"):  # there is nothing to declare
            arguments.pop(flag, None)
        if "bucket_cap_mb" in arguments:
            arguments["bucket_mb"] = arguments.pop("bucket_cap_mb")
        return paceline.replicate(model, group=process_group, **arguments)

    def bare(self, wrapped: nn.Module) -> nn.Module:
        return wrapped

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        return paceline.no_sync(wrapped)


class DropIn(Library):
    name = "DistributedDataParallel"

    def wrap(self, model: nn.Module, **arguments: Any) -> nn.Module:
        if "broadcast_buffers" in arguments:  # torch 2.13's newer name
            arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers")
        return paceline.DistributedDataParallel(model, **arguments)


TORCH, REPLICATE, DROP_IN = Torch(), Replicate(), DropIn()
OURS: Sequence[Library] = (REPLICATE, DROP_IN)

on_both = pytest.mark.parametrize("library", OURS, ids=str)
