"""Sharded parameters as plain ones: local tensors outside of a module's forward, DTensors inside of it.

    optimizer, state_dict, hooks       weight: a plain parameter ─── from_local ──> forward: a DTensor
                                       gradient: a plain tensor  <───────────────── backward

``replicate()`` and ``DistributedDataParallel`` need nothing of this: they take sharded parameters as they
are. It is for what does not, an optimizer or a library that wants plain tensors, and for code that was
written around torch's transform of that kind.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.errors import name_some
from paceline.replication import is_replicated
from paceline.stand_ins import Calls, StandIns, is_computed_again
from paceline.torch_private import is_dtensor, local_of, placed_like

__all__ = ["delocalize", "localize"]

M = TypeVar("M", bound=nn.Module)

Made = dict[tuple[int, bool], torch.Tensor]  # by parameter, and whether autograd was to know of it


def localize(module: M) -> M:
    """Make plain parameters of sharded ones, in place; inside the module's forward they are sharded.

    What forward computes, and what its gradients are, stays the same. Parameters that are one stay one.
    Make optimizers, and replicate, afterwards. ``delocalize()`` undoes it.
    """
    _check(module, "localize()")
    owners = [owner for owner in module.modules() if any(map(is_dtensor, owner._parameters.values()))]
    if not owners:
        raise ValueError(
            f"this {type(module).__name__} has no sharded parameter; parallelize_module() it first"
        )
    within = [name for name, part in module.named_modules() if isinstance(part._parameters, StandIns)]
    if within:
        raise ValueError(f"{name_some(within)} have stand-ins for their parameters already; undo that first")
    _Localized(module, owners)
    return module


def delocalize(module: M) -> M:
    """Undo ``localize()``: the module has its sharded parameters again, with what has become of them."""
    _check(module, "delocalize()")
    found = {id(part.localized): part.localized for _, part in _places(module)}
    if not found:
        raise ValueError(f"this {type(module).__name__} is not localized")
    for localized in found.values():
        localized.remove(module)
    return module


class _Localized:
    """A module whose sharded parameters are plain ones, except inside its forward."""

    def __init__(self, module: nn.Module, owners: list[nn.Module]) -> None:
        self.running = 0  # forwards; for compiled code, which cannot look at more
        self._sharded: dict[int, Any] = {}  # by the plain parameter, which is kept alive here, too
        self._plain: dict[int, nn.Parameter] = {}  # by the sharded one
        self._calls: Calls[Made] = Calls(self._begin, self._end)
        for owner in owners:
            plain = {key: self._localize(p) for key, p in owner._parameters.items()}
            owner.__dict__["_parameters"] = _Parameters(plain, self)
        self._handles = self._calls.attach(module)

    def _localize(self, parameter: Any) -> Any:
        if not is_dtensor(parameter):
            return parameter
        plain = self._plain.get(id(parameter))
        if plain is None:
            plain = nn.Parameter(local_of(parameter).detach(), requires_grad=parameter.requires_grad)
            plain.grad = None if parameter.grad is None else local_of(parameter.grad)
            self._plain[id(parameter)], self._sharded[id(plain)] = plain, parameter
        return plain

    def _begin(self) -> Made:
        self.running += 1
        return {}

    def _end(self, made: Made) -> None:
        self.running -= 1

    def source(self, *, of_many: bool) -> Made | None:
        """Return what was made for the forward that a reader is in; None if it is in none."""
        if torch.compiler.is_dynamo_compiling():
            return {} if self.running else None
        made = self._calls.current(surely=of_many)
        return {} if made is None and is_computed_again() else made

    def sharded(self, plain: Any, made: Made) -> Any:
        """Return what forward reads in place of a plain parameter."""
        like = self._sharded.get(id(plain))
        if like is None:
            return plain
        key = id(plain), torch.is_grad_enabled()
        if key not in made:
            from torch.distributed.tensor import DTensor

            made[key] = DTensor.from_local(
                plain,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
        return made[key]

    def remove(self, module: nn.Module) -> None:
        """Put the sharded parameters back, with the gradients that the plain ones have."""
        for handle in self._handles:
            handle.remove()
        for owner, parameters in _places(module):
            if parameters.localized is self:
                owner.__dict__["_parameters"] = {k: self._restore(p) for k, p in dict.items(parameters)}

    def _restore(self, plain: Any) -> Any:
        sharded = self._sharded.get(id(plain))
        if sharded is None:
            return plain
        local = local_of(sharded)
        if local.data_ptr() != plain.data_ptr():  # it was given other memory
            with torch.no_grad():
                local.copy_(plain)
        sharded.requires_grad_(plain.requires_grad)
        sharded.grad = None if plain.grad is None else placed_like(plain.grad, sharded)
        return sharded


class _Parameters(StandIns):
    """A module's parameters by name, which forward reads as DTensors."""

    def __init__(self, parameters: dict[str, Any], localized: _Localized) -> None:
        super().__init__(parameters)
        self.localized = localized

    def source(self, *, of_many: bool = False) -> Made | None:
        return self.localized.source(of_many=of_many)

    def stand_in(self, key: str, parameter: Any, source: Made) -> Any:
        return self.localized.sharded(parameter, source)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, _Parameters]]:
    """Yield the parts of a module whose parameters are localized."""
    for owner in module.modules():
        parameters = owner.__dict__.get("_parameters")
        if isinstance(parameters, _Parameters):
            yield owner, parameters


def _check(module: Any, what: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{what} takes a torch.nn.Module, got {type(module).__name__}")
    if is_replicated(module):
        raise ValueError(
            f"{what} gives a module other parameters, but this {type(module).__name__} is replicated; "
            "detach() it first, and replicate it afterwards"
        )
