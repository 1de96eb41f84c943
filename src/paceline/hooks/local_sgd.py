"""Local SGD: every rank steps on its own gradients, and now and then the ranks average their weights.

    local_sgd(every=8)                          all ranks after every 8th optimizer step
    local_sgd(hierarchy={2: 4, 8: 16})          4 neighbours after every 2nd, all 16 after every 8th
    local_sgd(every=8, hierarchy={1: 4})        gradients among 4 neighbours in each backward
    local_sgd(every=8, dtype=torch.bfloat16)    what travels is how far the weights have moved, in 16 bits

Between these points the ranks' weights differ, by design. The optimizer's own state (momentum) stays each
rank's.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.comm import Comm, Pending
from paceline.hooks.average import average
from paceline.hooks.averaging import Anchors, average_parameters
from paceline.hooks.bucket import GradBucket, Named, Way
from paceline.hooks.checks import check_dtype, check_whole
from paceline.hooks.remembering import RememberingHook, Shapes
from paceline.sharded import owner_of
from paceline.watches.engine import engine_watch

EVERY = 8


def local_sgd(
    every: int | None = None,
    start_step: int = 0,
    hierarchy: Mapping[int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> "LocalSGD":
    """Average weights after every ``every``-th optimizer step (default 8), instead of gradients.

    The first ``start_step`` steps average gradients. ``hierarchy`` adds averages among neighbouring ranks:
    {steps between them: how many ranks}. Its last entry has to be all ranks, unless ``every`` is given.
    With a ``dtype`` all ranks' average is of how far each weight has moved since the last one, and travels
    in this dtype; a copy of the weights is kept for that.
    """
    check_dtype("local_sgd", dtype)
    check_whole("local_sgd", "start_step", start_step, 0)
    if every is not None:
        check_whole("local_sgd", "every", every, 1)
    elif not hierarchy:
        every = EVERY
    if every == 1 and dtype is not None:
        raise ValueError(
            "local_sgd(every=1) averages gradients in every backward, and dtype is for weights. Take "
            "in_dtype(dtype), which sends gradients in 16 bits"
        )
    levels = _levels(hierarchy or {})
    if every is not None and levels and every % levels[-1].every:
        raise ValueError(
            f"local_sgd() needs every to be a multiple of the hierarchy's last {levels[-1].every} steps, got "
            f"{every}"
        )
    return LocalSGD(every, start_step, levels, dtype)


@dataclass(frozen=True)
class Level:
    """An average among some neighbouring ranks after every so many steps."""

    every: int
    ranks: int


def _levels(hierarchy: Mapping[int, int]) -> tuple[Level, ...]:
    for every, ranks in hierarchy.items():
        check_whole("local_sgd", "a hierarchy's steps", every, 1)
        check_whole("local_sgd", "a hierarchy's ranks", ranks, 2)
    levels = sorted(hierarchy.items())
    for (every, ranks), (longer, larger) in itertools.pairwise(levels):
        if longer % every or larger % ranks or larger == ranks:
            raise ValueError(
                "local_sgd() needs a hierarchy in which both steps and ranks are multiples of those before, "
                f"such as {{2: 4, 8: 16}}, got {dict(levels)}"
            )
    return tuple(Level(every, ranks) for every, ranks in levels)


class LocalSGD(RememberingHook):
    """See ``local_sgd()``."""

    is_sure = True
    may_join = False  # ranks that have run out of batches do not step, so they would not average

    def __init__(
        self, every: int | None, start_step: int, levels: tuple[Level, ...], dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._anchors = None if dtype is None else Anchors(dtype)
        self._every = every
        self._start_step = start_step
        self._levels = levels
        # After how many steps, and among whom: from the most ranks to the fewest.
        self._comms: list[tuple[int, Comm]] = []
        self._handle: Any = None
        # For each optimizer, by its first parameter: its steps, and the backward that the last one was for.
        self._optimizers: dict[str, tuple[int, int]] = {}

    @property
    def is_local(self) -> bool:
        """Whether the ranks step on gradients of their own by now."""
        return self.step > self._start_step

    @property
    def way(self) -> Way:
        """What becomes of gradients that cannot be in a bucket."""
        return "own" if self.is_local else "mean"

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        if not self.is_local:
            return average(bucket, comm)
        every, neighbours = self._comms[-1] if self._comms else (0, comm)
        return average(bucket, neighbours) if every == 1 else Pending(bucket.flat)

    def bind(self, named: Named, comm: Comm) -> None:
        comms = self._split(comm) if comm.size > 1 else []  # a collective: before what one rank may refuse
        if self._anchors is not None and self._comm not in (None, comm):
            self._anchors.clear()  # other ranks have none, or others
        super().bind(named, comm)
        self._let_go()
        self._comms = comms
        if comms:
            self._handle = register_optimizer_step_post_hook(self._on_step)

    def average_now(self) -> None:
        """Average the weights over all ranks: before saving them, or before another hook. A collective."""
        if self._comm is not None and self._comm.size > 1:
            average_parameters([parameter for _, parameter in self._named], self._comm)
            if self._anchors is not None:
                self._anchors.clear()

    def settle(self) -> None:
        self.average_now()

    def unbind(self) -> None:
        super().unbind()
        self._let_go()
        if self._anchors is not None:
            self._anchors.clear()  # another model may have other parameters under the same names

    def _let_go(self) -> None:
        self._comms = []
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _split(self, comm: Comm) -> list[tuple[int, Comm]]:
        odd = [level.ranks for level in self._levels if comm.size % level.ranks]
        if odd:
            raise ValueError(f"{self!r}: {comm.size} ranks cannot be split into groups of {odd[0]}")
        whole = next((level.every for level in self._levels if level.ranks == comm.size), None)
        every = whole if self._every is None else self._every
        if every is None or whole not in (None, every):
            raise ValueError(
                f"{self!r} has to say once after how many steps all {comm.size} ranks are averaged: with "
                "every, or with a hierarchy whose last entry is all ranks"
            )
        smaller = [level for level in reversed(self._levels) if level.ranks != comm.size]
        return [(every, comm), *((level.every, comm.split(level.ranks)) for level in smaller)]

    def _on_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Average what has been stepped on. Called by torch after each step of any optimizer."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        stepped = [(name, parameter) for name, parameter in self._named if id(owner_of(parameter)) in held]
        if not stepped or not self._counts(stepped[0][0]):
            return
        if engine_watch.inside():
            raise RuntimeError(
                f"{self!r} averages weights after optimizer.step(), but an optimizer steps inside backward; "
                "use one or the other"
            )
        steps, _ = self._optimizers[stepped[0][0]]
        for every, comm in self._comms:
            if steps % every == 0:
                if every > 1:
                    self._average(stepped, comm)
                return

    def _average(self, named: Named, comm: Comm) -> None:
        if self._anchors is not None and comm is self._comms[0][1]:
            self._anchors.average(named, comm)
        else:
            average_parameters([parameter for _, parameter in named], comm)

    def _counts(self, optimizer: str) -> bool:
        """Count a step, at most once for each backward: an optimizer may be wrapped in another."""
        steps, seen = self._optimizers.get(optimizer, (0, 0))
        if not self.is_local or seen == self.step:
            return False
        self._optimizers[optimizer] = (steps + 1, self.step)
        return True

    def state_dict(self) -> dict[str, Any]:
        anchors = {} if self._anchors is None else self._anchors.by_name
        saved = {name: anchor.clone() for name, anchor in anchors.items()}
        return {**super().state_dict(), "optimizers": dict(self._optimizers), "anchors": saved}

    def _shapes(self) -> Shapes:
        return {name: a.shape for name, a in (self._anchors.by_name if self._anchors else {}).items()}

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._anchors is not None:
            self._anchors.by_name = {n: anchor.clone() for n, anchor in state.get("anchors", {}).items()}
        self._optimizers = {name: (steps, seen) for name, (steps, seen) in state["optimizers"].items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_comms": [], "_handle": None}

    def __repr__(self) -> str:
        settings = [f"every={self._every}"] if self._every is not None else []
        settings += [f"start_step={self._start_step}"]
        if self._levels:
            settings += [f"hierarchy={ {level.every: level.ranks for level in self._levels} }"]
        settings += [f"dtype={self._dtype}"] if self._dtype is not None else []
        return f"local_sgd({', '.join(settings)})"
