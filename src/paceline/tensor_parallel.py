"""Sharded parameters as plain ones: local tensors outside of a module's forward, DTensors inside of it.

``replicate()`` and ``DistributedDataParallel`` need nothing of this: they take sharded parameters as they
are. It is for what does not, an optimizer or a library that wants plain tensors, and for code that was
written around torch's transform of that kind.
"""

from typing import Any, TypeVar

from torch import nn

from paceline import localized
from paceline.errors import name_some
from paceline.registry import registry
from paceline.stand_ins import StandIns
from paceline.torch_private import is_dtensor

__all__ = ["delocalize", "localize"]

M = TypeVar("M", bound=nn.Module)


def localize(module: M) -> M:
    """Make plain parameters of sharded ones, in place; inside the module's forward they are sharded.

    What forward computes, and what its gradients are, stays the same. Parameters that are one within the
    module stay one.
    Make optimizers, and replicate, afterwards. ``delocalize()`` undoes it.
    """
    _check(module, "localize()")
    if not any(map(is_dtensor, module.parameters())):
        raise ValueError(
            f"this {type(module).__name__} has no sharded parameter; parallelize_module() it first"
        )
    within = [name for name, part in module.named_modules() if isinstance(part._parameters, StandIns)]
    if within:
        raise ValueError(f"{name_some(within)} have stand-ins for their parameters already; undo that first")
    localized.localize(module)
    return module


def delocalize(module: M) -> M:
    """Undo ``localize()``: the module has its sharded parameters again, with what has become of them."""
    _check(module, "delocalize()")
    found = {id(part.localized): part.localized for _, part in localized.places_in(module)}
    if not found:
        raise ValueError(f"this {type(module).__name__} is not localized")
    whole = [each for each in found.values() if each.module() is not module]
    if whole:
        raise ValueError(
            f"this {type(module).__name__} is a part of a module that is localized, or holds one: "
            "delocalize() that one itself"
        )
    for each in found.values():
        each.remove(module)
    return module


def _check(module: Any, what: str) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{what} takes a torch.nn.Module, got {type(module).__name__}")
    if registry.holds(module):
        raise ValueError(
            f"{what} gives a module other parameters, but this {type(module).__name__} is replicated; "
            "detach() it first, and replicate it afterwards"
        )
