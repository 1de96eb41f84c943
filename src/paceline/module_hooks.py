"""Hooks on a user's module that work for this module alone: in copies and pickles of it they do nothing."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn


class ModuleHook:
    """A forward hook of one module. A copy that shares its hooks, or has copies of them, is left alone."""

    def __init__(self, module: nn.Module, act: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._act = act

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *_: Any) -> None:
        if module is self._module():
            self._act()

    def __reduce__(self) -> Any:
        # A function that takes anything and returns None, and that loads where paceline is not installed.
        return getattr, (nullcontext(), "__exit__")


def around_forward(
    module: nn.Module, before: Callable[[], None] | None, after: Callable[[], None] | None
) -> list[Any]:
    """Have functions called before and after each forward of a module; return the handles to remove.

    First and last in line: what other hooks do to the module belongs to its forward.
    """
    handles: list[Any] = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(ModuleHook(module, before), prepend=True))
    if after is not None:
        handles.append(module.register_forward_hook(ModuleHook(module, after)))
    return handles
