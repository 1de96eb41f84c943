"""A module whose sharded parameters are plain ones, except while its forward runs.

optimizer, state_dict, hooks       weight: a plain parameter ─── from_local ──> forward: a DTensor
                                   gradient: a plain tensor  <───────────────── backward
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.sharded import localized
from paceline.stand_ins import Calls, StandIns, is_computed_again
from paceline.torch_private import is_dtensor, local_of, placed_like, take_over_localizing

Made = dict[tuple[int, bool], torch.Tensor]  # by parameter, and whether autograd was to know of it
Pair = tuple[nn.Parameter, Any]  # a plain parameter, and the sharded one whose part it is


def localize(module: nn.Module) -> None:
    """Make plain parameters of the sharded ones. Those that are one stay one."""
    Localized(module, [(_part_of(p), p) for p in module.parameters() if is_dtensor(p)])


def adopt(module: nn.Module) -> None:
    """Take over a module that torch has localized in its own way, with the same parameters.

    After the first forward, torch's would not list them any more.
    """
    pairs = take_over_localizing(module)
    if pairs:
        Localized(module, pairs)


def _part_of(sharded: Any) -> nn.Parameter:
    part = nn.Parameter(local_of(sharded).detach(), requires_grad=sharded.requires_grad)
    part.grad = None if sharded.grad is None else local_of(sharded.grad)
    return part


class Localized:
    """A module whose sharded parameters are plain ones, except inside its forward."""

    def __init__(self, module: nn.Module, pairs: Sequence[Pair]) -> None:
        self.module = weakref.ref(module)
        self.running = 0  # forwards; for compiled code, which cannot look at more
        self._sharded = {id(plain): sharded for plain, sharded in pairs}
        self._plain = {id(sharded): plain for plain, sharded in pairs}  # keeps them alive, too
        localized.update(pairs)
        self._calls: Calls[Made] = Calls(self._begin, self._end)
        for owner in module.modules():
            if any(id(p) in self._sharded or id(p) in self._plain for p in owner._parameters.values()):
                plain = {key: self._plain.get(id(p), p) for key, p in owner._parameters.items()}
                owner.__dict__["_parameters"] = _Parameters(plain, self)
        self._handles = self._calls.attach(module)

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
        for owner, parameters in places_in(module):
            if parameters.localized is self:
                for plain in dict.values(parameters):
                    if id(plain) in self._sharded:  # a bias may be None
                        localized.pop(plain, None)
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

    def __init__(self, parameters: dict[str, Any], localized: Localized) -> None:
        super().__init__(parameters)
        self.localized = localized

    def source(self, *, of_many: bool = False) -> Made | None:
        return self.localized.source(of_many=of_many)

    def stand_in(self, key: str, parameter: Any, source: Made) -> Any:
        return self.localized.sharded(parameter, source)


def places_in(module: nn.Module) -> Iterator[tuple[nn.Module, _Parameters]]:
    """Yield the parts of a module whose parameters are localized."""
    for owner in module.modules():
        parameters = owner.__dict__.get("_parameters")
        if isinstance(parameters, _Parameters):
            yield owner, parameters
