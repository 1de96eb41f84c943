"""Hooks on a user's module that work for this module alone: in copies and pickles of it they do nothing."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.buffer_policies import Due
from paceline.own_hooks import OwnHook
from paceline.torch_private import takes_hooks


class ModuleHook(OwnHook):
    """A forward hook of one module. A copy that shares its hooks, or has copies of them, is left alone.

    In compiled code, where nothing can be exchanged, it does nothing and looks at nothing.
    """

    def __init__(self, module: nn.Module, act: Callable[[], None]) -> None:
        self._module = weakref.ref(module)
        self._act = act

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._module():
            self._act()


class PutOff(ModuleHook):
    """Notes in compiled code that what is due around a forward has to wait."""

    def __init__(self, module: nn.Module, act: Callable[[], None], due: Due) -> None:
        super().__init__(module, act)
        self._due = due

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(module)
        elif module.training and torch.is_grad_enabled():
            self._due.is_put_off = True


def around_forward(
    module: nn.Module,
    before: Callable[[], None] | None,
    after: Callable[[], None] | None,
    due: Due,
) -> list[Any]:
    """Have functions called before and after each forward of a module; return the handles to remove.

    First and last in line: what other hooks do to the module belongs to its forward. In compiled code
    that is only noted, in ``due``.
    """
    handles: list[Any] = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(ModuleHook(module, before), prepend=True))
    if before is not None or after is not None:
        # Behind the others: torch 2.11 mistakes hooks for each other if one that it traces is put in front.
        handles.append(module.register_forward_hook(PutOff(module, after or _do_nothing, due)))
    return handles


class FailureWatch(ModuleHook):
    """Hears of what a forward raised, outside of compiled code, where it leaves no trace."""

    def __init__(self, module: nn.Module, act: Callable[[BaseException], None]) -> None:
        super().__init__(module, _do_nothing)
        self._hear = act

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        error = sys.exception()
        # An exception that the caller is handling while it calls forward is not of this forward.
        if (
            error is None
            or error.__traceback__ is None
            or error.__traceback__.tb_frame is not sys._getframe(1)
        ):
            return
        if module is self._module():
            self._hear(error)


def watch_forward(
    module: nn.Module, begins: Callable[[], None], failed: Callable[[BaseException], None]
) -> list[Any]:
    """Have functions called when a forward begins, and when it has raised; return the handles to remove.

    A scripted module takes no hooks. What they would notice, its backward finds out, a little later.
    """
    if not takes_hooks(module):
        return []
    return [
        module.register_forward_pre_hook(ModuleHook(module, begins), prepend=True),
        module.register_forward_hook(FailureWatch(module, failed), always_call=True),
    ]


def _do_nothing() -> None:
    """Act on nothing."""
