"""The parameters of a replica, and the hooks by which the engine hears of their gradients.

A hook sits on the autograd node that writes ``.grad``. Frozen parameters are watched too: if one is unfrozen
later, its first gradient has to be noticed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch

from paceline.sharded import Part, leaf_of
from paceline.torch_private import accumulator_of
from paceline.watches.modules import module_watch

Named = tuple[str, torch.nn.Parameter]
Hook = Callable[[Any, Any], None]  # called with what came into a node, and with what it made of it
_ADDRESS = torch.Tensor.data_ptr


class Watched:
    """Parameters with their names and their ``leaves``: the tensors by which they are reduced."""

    def __init__(self, named: Sequence[Named], before: "Watched | None" = None) -> None:
        known: dict[int, torch.Tensor] = {}
        if before is not None:
            heard = zip(before.parameters, before.leaves, before._nodes, strict=True)
            known = {id(p): leaf for p, leaf, node in heard if accumulator_of(p) is node}
        self.names: Sequence[str] = [name for name, _ in named]
        self.parameters: Sequence[torch.nn.Parameter] = [parameter for _, parameter in named]
        self.leaves: Sequence[torch.Tensor] = [
            known[id(p)] if id(p) in known else leaf_of(p, name) for name, p in named
        ]
        self._kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        self._swaps = module_watch.swaps
        # All are asked before every optimizer step: not as a method of each, but where some have their own.
        are_plain = all(type(leaf).data_ptr is _ADDRESS for leaf in self.leaves)
        self._address_of: Callable[[Any], int] = _ADDRESS if are_plain else methodcaller("data_ptr")
        self._addresses = list(map(self._address_of, self.leaves))
        # The nodes are kept because the hooks live and die with them.
        self._nodes: Sequence[Any] = [accumulator_of(parameter) for parameter in self.parameters]
        self.by_node: Mapping[Any, int] = {node: index for index, node in enumerate(self._nodes)}
        self._handles: list[Any] = []

    def hear(self, hook_of: Callable[[int], Hook]) -> None:
        """Have a hook of each parameter called when its gradient has been written."""
        _listeners.update(map(id, self.parameters))
        for index, (node, leaf) in enumerate(zip(self._nodes, self.leaves, strict=True)):
            hook = _settling(leaf, hook_of(index)) if isinstance(leaf, Part) else hook_of(index)
            self._handles.append(node.register_hook(hook))

    def hear_before(self, hook_of: Callable[[int], Callable[[Any], Any]]) -> None:
        """Have a hook of each parameter called when its gradient is going to be written."""
        self._handles += [node.register_prehook(hook_of(index)) for index, node in enumerate(self._nodes)]

    def let_go(self) -> None:
        """Take every hook off."""
        if self._handles:
            _listeners.subtract(map(id, self.parameters))
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes, self.by_node = [], [], {}

    @property
    def named_leaves(self) -> list[tuple[str, torch.Tensor]]:
        """The leaves with the names of their parameters."""
        return list(zip(self.names, self.leaves, strict=True))

    @property
    def have_stayed(self) -> bool:
        """Whether all are where they were: who is cast or moved gets another address; swaps are counted."""
        return (
            self._swaps == module_watch.swaps and list(map(self._address_of, self.leaves)) == self._addresses
        )

    @property
    def hears_all(self) -> bool:
        """Whether the hooks are where autograd comes by: who is cast, moved or swapped gets another node."""
        return not self.unheard()

    def unheard(self) -> dict[str, torch.nn.Parameter]:
        """Return the others. It takes some microseconds for each parameter."""
        nodes = zip(self.names, self.parameters, self._nodes, strict=True)
        return {name: p for name, p, node in nodes if accumulator_of(p) is not node}

    def moved(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that were cast, moved or swapped: torch forgets their hooks then."""
        if self.have_stayed:
            return {}
        kinds = [(parameter.dtype, parameter.device) for parameter in self.parameters]
        moved = self.unheard() if kinds != self._kinds or self._swaps != module_watch.swaps else {}
        if not moved:
            # Other memory of the same kind: the hooks are still there.
            self._addresses = list(map(self._address_of, self.leaves))
            self._swaps = module_watch.swaps
        return moved


# How many replicas hear of a parameter's gradients, by its identity; they hold it as long as they do.
_listeners: Counter[int] = Counter()


def is_heard(parameter: torch.Tensor) -> bool:
    """Tell whether any replica hears of a parameter's gradients."""
    return _listeners[id(parameter)] > 0


def _settling(leaf: Part, hook: Hook) -> Hook:
    """Sum up what is partial over a sharded parameter's own mesh before a hook hears of it."""

    def settle_and_tell(inputs: Any, outputs: Any) -> None:
        leaf.settle()
        hook(inputs, outputs)

    return settle_and_tell
