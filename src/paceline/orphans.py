"""Parameters that were taken out of a replicated module: nobody reduces them any more. They may be trained.

Nothing is held here: the hook that hears of their gradients lives with the parameter.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Orphan:
    """One of them. ``is_touched``: it has got a gradient that no replica knows of."""

    def __init__(self, name: str, parameter: Any, *, is_touched: bool) -> None:
        self.name = name
        self.is_touched = is_touched
        self._parameter = weakref.ref(parameter)
        frozen = not parameter.requires_grad  # it may be unfrozen later
        if frozen:
            parameter.requires_grad_(True)
        try:
            self._handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
        finally:
            if frozen:
                parameter.requires_grad_(False)
        _orphans[parameter] = self

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        """Hear that it has got a gradient. Called by autograd's thread."""
        self.is_touched = True

    @property
    def suspect(self) -> torch.Tensor | None:
        """The parameter, if it has such a gradient now."""
        parameter = self._parameter()
        if parameter is None or parameter.grad is None:
            self.is_touched = False
        return parameter if self.is_touched else None

    def end(self) -> None:
        """Take the hook off: somebody looks after it again, or nobody has to."""
        self._handle.remove()
        self.is_touched = False


_orphans: Any = WeakIdKeyDictionary()  # by their parameters


def adopt(parameters: Iterable[torch.Tensor]) -> None:
    """Note that some replica reduces these from now on."""
    if len(_orphans):
        for parameter in parameters:
            orphan = _orphans.pop(parameter, None)
            if orphan is not None:
                orphan.end()
