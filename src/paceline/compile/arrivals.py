"""Gradients that leave a compiled backward at the point where they are complete, not at its end.

    in the graph   paceline::arrived(gradients, group, after): an operator that the compiler cannot look into
    at run time    Delivery: which parameters of which replicas a run of the graph computes gradients for

One compiled graph may serve several modules, so it holds no parameter and no replica: whose gradients these
are is read off the autograd node whose backward is running. A run whose gradients may not be taken early
(autograd.grad, backward(inputs=...), hooks on parameters, ...) gets the same graph without the operators.

Private names of torch, seen on 2.11 and 2.13:

    torch._C._current_autograd_node        the node that this thread executes
    torch._C._will_engine_execute_node     whether the present backward is going to write a leaf's gradient
"""

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.reducer import Reducer
from paceline.torch_private import engine_watch

Taker = tuple[Reducer, list[int], list[int]]  # who takes which parameters, and their positions in the group


class _Now(threading.local):
    """The delivery that this thread is in."""

    delivery: "Delivery | None" = None


_now = _Now()
_library: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "arrived(Tensor[] gradients, int group, Tensor? after) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),
)


def _arrived(gradients: Sequence[torch.Tensor], group: int, _after: torch.Tensor | None) -> torch.Tensor:
    assert _now.delivery is not None
    _now.delivery.take(group, gradients)
    return gradients[0].new_empty(1)


def _arrived_fake(
    gradients: Sequence[torch.Tensor], _group: int, _after: torch.Tensor | None
) -> torch.Tensor:
    return gradients[0].new_empty(1)


_library.impl("arrived", _arrived, "CompositeExplicitAutograd")
_library.impl("arrived", _arrived_fake, "Meta")
ARRIVED = torch.ops.paceline.arrived.default


class Delivery:
    """One run of a compiled backward: where the gradients of its groups go."""

    def __init__(self, groups: Sequence[Sequence[Taker]]) -> None:
        self._groups = groups

    def take(self, group: int, gradients: Sequence[torch.Tensor]) -> None:
        """Hand the gradients of a group over."""
        for reducer, indices, positions in self._groups[group]:
            reducer.take(indices, [gradients[position] for position in positions])

    def run(self, function: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        """Run compiled code whose gradients are taken."""
        before, _now.delivery = _now.delivery, self
        try:
            return function(arguments)
        finally:
            _now.delivery = before


class Receiver:
    """Finds out, for each run of one compiled backward, who takes its gradients.

    ``groups`` are positions among the tensors that the forward was given, of which there are ``edge_count``.
    """

    def __init__(self, groups: Sequence[Sequence[int]], edge_count: int) -> None:
        self._groups = groups
        self._edge_count = edge_count
        self._known: _Known | None = None

    def delivery(self) -> Delivery | None:
        """Return where the gradients of the present run go; None, if they cannot be taken early."""
        current: Any = torch._C._current_autograd_node()
        edges = current.next_functions
        if len(edges) != self._edge_count:
            return None
        nodes = [edges[position][0] for group in self._groups for position in group]
        reducers = [reducer for reducer in engine_watch.in_order() if reducer.may_take]
        maps = [reducer.nodes for reducer in reducers]
        known = self._known
        if known is None or known.nodes != nodes or not _are_same(known.maps, maps):
            known = self._known = _Known(nodes, maps, self._find(nodes, reducers))
        if known.delivery is None or _somebody_listens(known.parameters) or not _are_written(nodes):
            return None
        return known.delivery

    def _find(self, nodes: Sequence[Any], reducers: Sequence[Reducer]) -> Delivery | None:
        found, rest = [], list(nodes)
        for group in self._groups:
            takers = _takers_of(rest[: len(group)], reducers)
            if not takers:
                return None
            found.append(takers)
            del rest[: len(group)]
        return Delivery(found)


class _Known:
    """What was found last time: usually it is the same again."""

    def __init__(self, nodes: Sequence[Any], maps: Sequence[Any], found: Delivery | None) -> None:
        self.nodes = nodes
        self.maps = maps
        self.delivery = found
        self.parameters = [node.variable for node in nodes] if found is not None else []


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _takers_of(nodes: Sequence[Any], reducers: Sequence[Reducer]) -> list[Taker]:
    takers: list[Taker] = []
    missing = len(nodes)
    for reducer in reducers:
        places = [(position, reducer.nodes.get(node)) for position, node in enumerate(nodes)]
        ours = [(position, index) for position, index in places if index is not None]
        if ours:
            takers.append((reducer, [index for _, index in ours], [position for position, _ in ours]))
            missing -= len(ours)
    return takers if not missing else []


def _are_written(nodes: Sequence[Any]) -> bool:
    """Tell whether the present backward is going to write these gradients."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # they are going to be returned, by autograd.grad()
        return False


def _somebody_listens(parameters: Sequence[Any]) -> bool:
    """Tell whether somebody has asked to see, or to change, a gradient when it is written."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
