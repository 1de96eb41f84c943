"""A backward of distributed autograd: nothing is sent before its end, and it takes its own gradients only."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.backward import LocalBackward, SyncedBackward
from paceline.passes import Passes

Other = Callable[[int], None]  # takes a gradient of another backward than the open one


class SyncedPass(SyncedBackward):
    """One whose gradients are reduced."""

    def __init__(self, passes: Passes, other: Other, *args: Any) -> None:
        super().__init__(*args)
        self._listen()  # to every gradient: it may be one of another pass
        self._passes, self._other = passes, other

    def arrived(self, parameter: int) -> None:
        if self._passes.has_turn:
            super().arrived(parameter)
        else:
            self._other(parameter)


class LocalPass(LocalBackward):
    """One inside ``no_sync()``. What it leaves in its context is none of the parameters' own gradients."""

    def __init__(self, passes: Passes, other: Other, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters, set())
        self._passes, self._other = passes, other

    def arrived(self, parameter: int) -> None:
        if self._passes.has_turn:
            super().arrived(parameter)
        else:
            self._other(parameter)
