"""The optimizer inside backward: a bucket is stepped as soon as all ranks have agreed on it, and freed.

So the gradients of the whole model never exist at once. What needs all of them at once, such as clipping by
their common norm, cannot be had with it.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.optim import Optimizer

Per = Literal["bucket", "parameter"]


class StepInBackward:
    """Steps the parameters of an optimizer that it is given, and frees their gradients."""

    def __init__(self, optimizer: Optimizer, per: Per = "bucket") -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"step_in_backward() takes a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if per not in ("bucket", "parameter"):
            raise ValueError(f'per has to be "bucket" or "parameter", got {per!r}')
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS needs all gradients at once; it cannot step inside backward")
        self.optimizer = optimizer
        self._per = per

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step these parameters. Called by the engine, with the same ones on every rank."""
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        ready = [p for p in parameters if id(p) in mine and p.grad is not None]
        if self._per == "bucket":
            self._step(ready)
        else:
            for parameter in ready:
                self._step([parameter])

    def _step(self, parameters: Sequence[torch.Tensor]) -> None:
        chosen = {id(p) for p in parameters}
        # The same state and the settings of this moment (a scheduler may have changed them), but only some
        # of the parameters.
        part: Any = copy.copy(self.optimizer)
        part.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in chosen]}
            for group in self.optimizer.param_groups
        ]
        part.param_groups = [group for group in part.param_groups if group["params"]]
        if part.param_groups:
            with torch.enable_grad():
                type(self.optimizer).step(part)
        for parameter in parameters:
            parameter.grad = None


class StepEach:
    """Steps parameters by optimizers of their own, as ``_apply_optimizer_in_backward`` attaches them."""

    def __init__(self, optimizers: dict[int, Sequence[Optimizer]]) -> None:
        self._optimizers = optimizers

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step these parameters, each by its own optimizers."""
        for parameter in parameters:
            own = self._optimizers.get(id(parameter), ())
            if not own or parameter.grad is None:
                continue
            with torch.enable_grad():
                for optimizer in own:
                    optimizer.step()
            parameter.grad = None
