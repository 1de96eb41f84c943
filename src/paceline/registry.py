"""Which modules are replicated.

It is kept here, by identity, because what is stored in a module would travel with its copies and pickles. An
entry ends with its module. A replica whose module is gone may go on, where others leave parameters to it.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from paceline.control import Control
from paceline.reporter import reporter


class Registry:
    """The replicas of this process, by their modules."""

    def __init__(self) -> None:
        self._by_module: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._by_module)

    def add(self, module: nn.Module, replica: Any) -> None:
        """Note that a module is replicated."""
        self._by_module[id(module)] = replica

    def remove(self, replica: Any) -> None:
        """Forget a replica's module, which may be another one's by now."""
        for key, found in self._by_module.copy().items():
            if found is replica:
                self._by_module.pop(key, None)

    def modules(self, but: Any = None) -> set[int]:
        """Return the replicated modules by their identities, without one replica's."""
        return {key for key, found in self._by_module.copy().items() if found is not but}

    def everyone(self, but: Any = None) -> list[Any]:
        """Return all replicas but one, with those that only go on because others leave parameters to them."""
        found = list(self._by_module.copy().values())
        for replica in found:  # it grows meanwhile
            found += [keeper for keeper in replica.sharing.keepers if keeper not in found]
        return [replica for replica in found if replica is not but]

    def ended(self, module: nn.Module) -> Any:
        """Return the replica of a module whose wrapper is gone, if it goes on for others."""
        return next((r for r in self.everyone() if r.sharing.is_over and r.module is module), None)

    def find(self, module: nn.Module) -> Any:
        """Return the replica of a module, or of what it is wrapped around."""
        found = (self._by_module.get(id(each)) for each in _unwrapped(module))
        return next((replica for replica in found if replica is not None), None)

    def holds(self, module: nn.Module) -> bool:
        """Tell whether a module, a part of it, or what it is wrapped around is replicated."""
        return any(id(part) in self._by_module for part in (*_unwrapped(module), *module.modules()))

    def beside(self, control: Control) -> list[Any]:
        """Return the replicas whose comm has brought along this control plane, the last one first, as they
        can be detached.
        """
        found = [r for r in self._by_module.copy().values() if r.comm.own_control() is control]
        return found[::-1]

    def progress(self) -> str:
        """Say how far an open backward has come. Called by the thread that reports."""
        reducers = (found.reducer for found in self._by_module.copy().values())
        return next((told for each in reducers if each is not None and (told := each.progress)), "")


def _unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, and what is inside of it: of compiled ones, and of wrappers."""
    inner: nn.Module | None = module
    while inner is not None:
        yield inner
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))


registry = Registry()
reporter.progress = registry.progress
