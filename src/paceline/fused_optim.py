"""The optimizer inside backward: a bucket is stepped as soon as all ranks have agreed on it, and freed.

So the gradients of the whole model never exist at once. What needs all of them at once, such as clipping by
their common norm, cannot be had with it.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.optim import Optimizer

from paceline.errors import name_some
from paceline.places import ByPlace
from paceline.reducer import Reducer
from paceline.torch_private import before_clipping

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
        groups = self.optimizer.param_groups
        parts = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
        # For the moment of a step the optimizer has these parameters only, with its state and its settings.
        self.optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            if self.optimizer.param_groups:
                with torch.enable_grad():
                    self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
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


class NormGate:
    """Stands before ``clip_grad_norm_``: it would find no gradients, and say so to nobody."""

    def __init__(self) -> None:
        self._reducers: ByPlace[Reducer] = ByPlace()

    def add(self, reducer: Reducer) -> None:
        """Refuse to clip the gradients of this reducer while an optimizer inside backward has them."""
        if not self._reducers:
            before_clipping(self.check)
        self._reducers.add(reducer)

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse to take a norm of gradients that are gone."""
        given = {id(parameter) for parameter in parameters}
        for reducer in self._reducers.here():
            if reducer.wiring.consumer is None:
                continue
            names = [name for name, p in reducer.named() if id(p) in given and p.grad is None]
            if names:
                raise ValueError(
                    "clip_grad_norm_() needs all gradients at once, but the optimizer inside backward has "
                    f"stepped and freed these: {name_some(names)}. Step after backward(), or clip by value "
                    "in the loss"
                )


norm_gate = NormGate()
