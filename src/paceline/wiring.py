"""What every backward of one replica works with, as one value that is replaced as a whole."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from paceline.across import Across
from paceline.buffers import BufferSync
from paceline.comm import Comm
from paceline.control import Control
from paceline.hooks import Hook, average, is_sure, name_of, sends_by_comm, way_of
from paceline.hooks.bucket import Way
from paceline.riders import Places, Rider, by_call

Unused = Literal["allow", "error"]

# Steps some parameters whose gradients all ranks have agreed on, and frees these gradients.
Consumer = Callable[[Sequence[torch.Tensor]], None]


@dataclass(frozen=True)
class Joining:
    """How ranks that run out of batches are treated."""

    divide_by: Literal["active", "initial"] = "active"
    early: Literal["continue", "stop"] = "continue"


@dataclass(frozen=True)
class Wiring:
    """The ranks, how they talk, and what is done with a bucket."""

    name: bytes  # the same on all ranks, different for each replica
    comm: Comm
    control: Control
    hook: Hook
    unused: Unused = "allow"
    buffers: BufferSync | None = None
    skip_unused: bool = False  # do not send buckets that no rank has put anything into
    joining: Joining | None = None  # set inside join()
    consumer: Consumer | None = None  # the optimizer, if it runs inside backward
    deterministic: bool = False  # sums have a fixed order
    riders: Sequence[Rider] = ()  # what else the ranks compare in every backward
    model: str = "replica"  # the class of the module
    may_use_differ: bool = False  # somebody expects parameters to go unused
    across: Across | None = None  # the ranks that hold the other parts of a sharded model

    def scale_on(self, device: torch.device) -> float:
        """Return the factor that copying a gradient folds in: the mean's, if the hook is the plain mean."""
        return self.comm.mean_factor(device) if self._folds_mean else 1.0

    @cached_property
    def is_counted(self) -> bool:
        """Whether the hook sends by the comm that it is given, where it can be counted."""
        return sends_by_comm(self.hook)

    @cached_property
    def is_sure(self) -> bool:
        """Whether the ranks may wait for the hook's collectives without asking each other first."""
        return is_sure(self.hook)

    @property
    def way(self) -> Way:
        """What the hook makes of gradients that cannot be in a bucket. It may change from step to step."""
        return way_of(self.hook)

    @cached_property
    def _folds_mean(self) -> bool:
        return self.hook is average and not self.deterministic

    @property
    def title(self) -> str:
        """What the replica is called in messages: the model's class, and the number of the replica."""
        return f"{self.model} #{self.name.rpartition(b'#')[2].decode()}"

    def topic(self, kind: bytes) -> bytes:
        """Name a kind of frame of this replica."""
        return self.name + b"." + kind

    @cached_property
    def hearing(self) -> Mapping[str, Places]:
        """The riders by the calls that they do something in."""
        return by_call(self.riders)

    @cached_property
    def terms(self) -> list[str]:
        """What has to be the same on every rank besides the plan, in words."""
        settings = [f"hook {name_of(self.hook)}", f"skip_unused={self.skip_unused}"]
        settings += ["deterministic=True"] if self.deterministic else []
        settings += [f"inside join({self.joining})"] if self.joining else []
        settings += [rider.label for rider in self.riders if rider.label]
        return [*settings, "optimizer in backward"] if self.consumer else settings

    @cached_property
    def terms_digest(self) -> int:
        """Four bytes that stand for the terms."""
        return zlib.crc32("|".join(self.terms).encode())
