"""Modules: whether the structure of any has changed, and whether tensors were swapped in place."""

import functools
from typing import Any

import torch


class _ModuleWatch:
    """Counts what changes in the structure of any module: parameters and parts, set or removed.

    Tensors that are swapped stay the same objects, but autograd knows them by other nodes.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.swaps = 0
        self._is_on = False

    def start(self) -> None:
        """Look from now on, for as long as the process lives."""
        if not self._is_on:
            self._is_on = True
            modules: Any = torch.nn.modules.module
            modules.register_module_parameter_registration_hook(self._note)
            modules.register_module_module_registration_hook(self._note)
            self._watch_removals()
            self._watch_swaps()
            self._watch_conversions()

    def _watch_removals(self) -> None:
        remove: Any = torch.nn.Module.__delattr__  # no hook tells of it

        def remove_and_note(module: torch.nn.Module, name: str) -> None:
            remove(module, name)
            self.changes += 1

        torch.nn.Module.__delattr__ = remove_and_note  # type: ignore[method-assign]

    def _watch_swaps(self) -> None:
        swap: Any = torch.utils.swap_tensors

        @functools.wraps(swap)
        def swap_and_note(one: torch.Tensor, other: torch.Tensor) -> None:
            swap(one, other)
            self.swaps += 1

        torch.utils.swap_tensors = swap_and_note

    def _watch_conversions(self) -> None:
        convert: Any = torch.nn.Module._apply

        @functools.wraps(convert)
        def convert_and_note(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
            converted: torch.nn.Module = convert(module, *args, **kwargs)
            self.changes += torch.__future__.get_overwrite_module_params_on_conversion()
            return converted

        torch.nn.Module._apply = convert_and_note  # type: ignore[assignment,method-assign]

    @property
    def state(self) -> tuple[int, int]:
        """Two counts that only grow: of changes, and of swaps."""
        return self.changes, self.swaps

    def _note(self, _module: Any, _name: str, value: Any) -> None:
        self.changes += value is not None


module_watch = _ModuleWatch()
