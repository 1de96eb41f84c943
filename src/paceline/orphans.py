"""Parameters that were taken out of a replicated module: nobody reduces them any more. They may be trained.

An orphan holds neither the parameter nor a weak reference to it, with which torch would not swap it. Its ear,
which hears of gradients, lives and dies with the parameter.
"""

import weakref
from typing import Any

import torch


class _Ear:
    """Hears that a parameter has got a gradient. Called by autograd's thread."""

    def __init__(self, *, is_touched: bool) -> None:
        self.is_touched = is_touched

    def __call__(self, _parameter: torch.Tensor) -> None:
        self.is_touched = True


class Orphan:
    """One of them. ``is_touched``: it has got a gradient that no replica may know of."""

    def __init__(self, name: str, parameter: Any, *, is_touched: bool) -> None:
        self.name = name
        self.key = id(parameter)  # as long as it lives
        ear = _Ear(is_touched=is_touched)
        frozen = not parameter.requires_grad  # it may be unfrozen later
        if frozen:
            parameter.requires_grad_(True)
        try:
            self._handle = parameter.register_post_accumulate_grad_hook(ear)
        finally:
            if frozen:
                parameter.requires_grad_(False)
        self._ear = weakref.ref(ear)

    @property
    def is_alive(self) -> bool:
        """Whether the parameter is still there."""
        return self._ear() is not None

    @property
    def is_touched(self) -> bool:
        """Whether it has got a gradient since it was looked at last."""
        ear = self._ear()
        return ear is not None and ear.is_touched

    def forget(self) -> None:
        """Note that its gradient is gone, or has been reduced after all."""
        if (ear := self._ear()) is not None:
            ear.is_touched = False

    def end(self) -> None:
        """Take the hook off."""
        self._handle.remove()
