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

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.reducer import Reducer
from paceline.watches.engine import engine_watch

# Who takes which parameters, and their places in the group; the replica as one of several, by its number.
Taker = tuple[Reducer, tuple[int, ...], Sequence[int]]
Share = tuple[int, tuple[int, ...], Sequence[int]]


class _Now(threading.local):
    """The delivery that this thread is in."""

    delivery: "Delivery | None" = None


_now = _Now()  # an operator gets tensors and numbers, and nothing else
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
        if len(edges) != self._edge_count or engine_watch.making_graphs:
            return None
        nodes = [edges[position][0] for group in self._groups for position in group]
        reducers = [reducer for reducer in engine_watch.in_order() if reducer.may_take]
        if self._known is None or not self._known.holds_for(nodes, reducers):
            groups = self._find(nodes, reducers)
            self._known = None if groups is None else _Known(nodes, reducers, groups)
        if self._known is None or not _are_written(nodes):
            return None
        return self._known.delivery(reducers)

    def _find(self, nodes: Sequence[Any], reducers: Sequence[Reducer]) -> list[list[Share]] | None:
        found, rest = [], list(nodes)
        for group in self._groups:
            shares = _shares_of(rest[: len(group)], reducers)
            if not shares:
                return None
            found.append(shares)
            del rest[: len(group)]
        return found


class _Known:
    """What was found last time, which is usually so again. Compiled code lives long, so nothing is kept."""

    def __init__(
        self, nodes: Sequence[Any], reducers: Sequence[Reducer], groups: Sequence[Sequence[Share]]
    ) -> None:
        self._nodes = list(map(id, nodes))  # as long as the reducers are the same, they hold them
        self._watches = [(weakref.ref(reducer), reducer.watch) for reducer in reducers]
        self._groups = groups

    def holds_for(self, nodes: Sequence[Any], reducers: Sequence[Reducer]) -> bool:
        """Tell whether the same parameters of the same replicas are due."""
        return (
            len(self._watches) == len(reducers)
            and all(
                ref() is reducer and number == reducer.watch
                for (ref, number), reducer in zip(self._watches, reducers, strict=True)
            )
            and self._nodes == list(map(id, nodes))
        )

    def delivery(self, reducers: Sequence[Reducer]) -> Delivery | None:
        """Return where gradients go, unless somebody has asked to see or to change one when it is written."""
        for shares in self._groups:
            for number, indices, _ in shares:
                parameters = reducers[number].parameters
                if any(_is_heard(parameters[index]) for index in indices):
                    return None
        return Delivery(
            [[(reducers[number], indices, places) for number, indices, places in g] for g in self._groups]
        )


def _is_heard(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _shares_of(nodes: Sequence[Any], reducers: Sequence[Reducer]) -> list[Share]:
    """Sort the parameters of a group by replicas; none, if one belongs to no replica."""
    shares: list[Share] = []
    left = set(range(len(nodes)))
    for number, reducer in enumerate(reducers):
        places = [place for place in sorted(left) if nodes[place] in reducer.nodes]
        if places:
            shares.append((number, tuple(reducer.nodes[nodes[place]] for place in places), places))
            left.difference_update(places)
    return shares if not left else []


def _are_written(nodes: Sequence[Any]) -> bool:
    """Tell whether the present backward is going to write these gradients."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # they are going to be returned, by autograd.grad()
        return False
