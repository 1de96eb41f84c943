"""The gate before ``optimizer.step()``: nothing steps on gradients that only this rank has.

While all gradients are agreed, the gate costs one address per parameter; only a suspicion looks closer.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import UnsyncedGradients, name_some
from paceline.reducer import Reducer

Suspects = Mapping[str, torch.Tensor]


class Guard:
    """Stands before every torch optimizer of this process while there are replicas to guard."""

    def __init__(self) -> None:
        self._reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._handle: Any = None

    def add(self, reducer: Reducer) -> None:
        """Let no optimizer step on unsynced gradients of this reducer."""
        self._reducers.add(reducer)
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._on_step)

    def remove(self, reducer: Reducer) -> None:
        """Stop guarding a reducer."""
        self._reducers.discard(reducer)
        if not self._reducers and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Look before each step of any optimizer. Called by torch on the thread that steps."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._check(optimizer)
            return None

        def closure_then_check() -> Any:
            loss = closure()
            self._check(optimizer)
            return loss

        # The gradients that count are those which the closure leaves: it may be the one that reduces.
        if len(args) > 1:
            return (args[0], closure_then_check, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_check}

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        for reducer in list(self._reducers):
            check_step(reducer, optimizer)


def check_step(reducer: Reducer, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer would use gradients that the ranks have not agreed on."""
    moved = reducer.moved()
    if moved:
        _refuse_moved(reducer, moved, _ids(optimizer))
    if not reducer.all_agreed:
        _refuse_local(reducer, reducer.unsynced(), _ids(optimizer))


def _refuse_local(reducer: Reducer, suspects: Suspects, stepped: set[int]) -> None:
    names = [name for name, p in suspects.items() if id(p) in stepped and _has_anything(p)]
    if names:
        raise UnsyncedGradients(
            f"step {reducer.step}: optimizer.step() would use gradients that only this rank has: "
            f"{name_some(names)}. {reducer.why_unsynced()}.",
            names,
        )


def _refuse_moved(reducer: Reducer, suspects: Suspects, stepped: set[int]) -> None:
    names = [name for name, p in suspects.items() if id(p) in stepped and p.grad is not None]
    if names:
        raise UnsyncedGradients(
            f"step {reducer.step}: optimizer.step() would use gradients that were never reduced: "
            f"{name_some(names)}. These parameters were cast or moved after the model was replicated, and "
            "torch forgets its hooks then. Move the model first, or detach() and replicate it again.",
            names,
        )


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_anything(parameter: torch.Tensor) -> bool:
    """Tell gradients from the zeros that zero_grad(set_to_none=False) leaves, which are alike
    everywhere.
    """
    if parameter.grad is None:
        return False
    gradient = parameter.grad.detach()
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return bool(torch.count_nonzero(values))


guard = Guard()
