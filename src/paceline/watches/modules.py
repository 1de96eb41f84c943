"""Modules: whether the structure of any has changed."""

from typing import Any

import torch


class _ModuleWatch:
    """Counts what changes in the structure of any module: parameters and parts, set or removed."""

    def __init__(self) -> None:
        self.changes = 0
        self._is_on = False

    def start(self) -> None:
        """Look from now on, for as long as the process lives."""
        if not self._is_on:
            self._is_on = True
            modules: Any = torch.nn.modules.module
            modules.register_module_parameter_registration_hook(self._note)
            modules.register_module_module_registration_hook(self._note)
            self._watch_removals()

    def _watch_removals(self) -> None:
        remove: Any = torch.nn.Module.__delattr__  # no hook tells of it

        def remove_and_note(module: torch.nn.Module, name: str) -> None:
            remove(module, name)
            self.changes += 1

        torch.nn.Module.__delattr__ = remove_and_note  # type: ignore[method-assign]

    def _note(self, _module: Any, _name: str, value: Any) -> None:
        self.changes += value is not None


module_watch = _ModuleWatch()
