"""The sum of this rank's micro-batches, in an order that does not depend on how many ranks share them.

The micro-batches of a step are the leaves of a balanced binary tree. Sums of 2, 4, 8 ... neighbours are kept
like the digits of a binary counter, so that at most log2 of their number are there at once:

    after micro-batch    0     1        2        3
    level 0              g0             g2
    level 1                    g0+g1    g0+g1
    level 2                                      (g0+g1)+(g2+g3)

A rank with 2**k micro-batches has a subtree, and ``hooks/fixed_order.py`` joins the ranks' subtrees by the
upper levels of the same tree.

Between backwards ``.grad`` shows the sum so far, as ever, and what anybody does to it counts: cleared, it is
nothing; changed or replaced, it is what the micro-batches to come are added to.
"""

import weakref
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import torch

from paceline.errors import name_some

T = TypeVar("T")
Column = dict[int, torch.Tensor]  # by parameter; who is not there has zeros


class Tree:
    """The micro-batches of one step on this rank, until their sum goes out."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._levels: dict[int, Column] = {}  # at level k: sums of 2**k micro-batches
        self._bases: Column = {}  # what gradients held before the first micro-batch
        self._shown: dict[int, Mark] = {}  # what was left in ``.grad``
        self._agreed: dict[int, Mark] = {}  # what the ranks have agreed on in the last reduced backward
        self._kept: set[int] = set()  # those whose base is agreed on: it does not travel again
        self._foreign: set[int] = set()  # those whose base is nothing that this tree has added up
        self._arrived: set[int] = set()  # in the present backward
        self._has_begun = False

    # ---- a backward ------------------------------------------------------------------------------

    def make_room(self, index: int) -> None:
        """Put aside what ``.grad`` holds, so that the gradient to come is alone there.

        Called by the autograd thread that is going to write it.
        """
        if index not in self._arrived:
            self._begin()
            self._arrived.add(index)
            self._set_aside(index)

    def _begin(self) -> None:
        """Forget the sums of gradients that somebody has cleared or changed since they were shown."""
        if self._has_begun:
            return
        self._has_begun = True
        lost = [i for i, mark in self._shown.items() if not mark.is_on(self._parameters[i].grad)]
        for index in lost:
            self._forget(index)
        if lost and not self._shown:
            self._levels.clear()  # a step that starts anew starts with the first leaf
        for index in lost:
            gradient = self._parameters[index].grad
            if gradient is not None:
                self._bases[index], self._shown[index] = gradient.detach(), Mark(gradient)

    def _forget(self, index: int) -> None:
        self._shown.pop(index, None)
        for column in (self._bases, *self._levels.values()):
            column.pop(index, None)
        self._kept.discard(index)
        self._foreign.discard(index)

    def _set_aside(self, index: int) -> None:
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return
        if index not in self._shown:
            self._bases[index] = gradient.detach()
            is_agreed = index in self._agreed and self._agreed[index].is_on(gradient)
            (self._kept if is_agreed else self._foreign).add(index)
        parameter.grad = None

    def push(self) -> None:
        """Take the gradients of a micro-batch, and leave the sum so far in ``.grad``."""
        column = self._leaves(self._arrived)
        self._end()
        with torch.no_grad():
            level = 0
            while level in self._levels:
                column = _join(self._levels.pop(level), column)
                level += 1
            self._levels[level] = _owned(column) if level == 0 else column
            self._show()

    def undo(self) -> None:
        """Let the present backward, which has raised, have added nothing."""
        for index in self._arrived:
            self._parameters[index].grad = None
        if self._has_begun:
            with torch.no_grad():
                self._show()
        self._end()

    def _end(self) -> None:
        self._arrived, self._has_begun = set(), False

    def _leaves(self, indices: Collection[int]) -> Column:
        gradients = {index: self._parameters[index].grad for index in indices if index in self._arrived}
        sparse = [i for i, g in gradients.items() if g is not None and g.layout is not torch.strided]
        if sparse:
            refuse_sparse([self._names[index] for index in sparse])
        return {index: gradient for index, gradient in gradients.items() if gradient is not None}

    def _show(self) -> None:
        """Put the sum so far where users look for it."""
        total: Column = {}
        for level in sorted(self._levels):
            column = self._levels[level]
            total = _join(column, total, in_place=False) if total else dict(column)
        for index, base in self._bases.items():
            total[index] = base + total[index] if index in total else base
        for index, gradient in total.items():
            parameter = self._parameters[index]
            there = parameter.grad
            if there is None or index in self._shown or index in self._bases:
                parameter.grad = there = gradient
            self._shown[index] = Mark(there)  # a first gradient stays what it is, perhaps part of a graph

    # ---- the sum goes out ------------------------------------------------------------------------

    def holds(self, index: int) -> bool:
        """Tell whether something has to be added to a parameter's new gradient before it goes out."""
        return index in self._shown or (index in self._bases and index not in self._kept)

    def fold(self, indices: Sequence[int], weight: float = 1.0) -> None:
        """Make some parameters' gradients the sum of all micro-batches. Called before they are sent.

        ``weight`` is that of all micro-batches of this rank, and so that of what was there before them.
        """
        self._begin()
        for index in indices:
            if index not in self._arrived:
                self._set_aside(index)
        leaves = self._leaves(indices)
        held = [index for index in indices if self.holds(index)]
        if not held:
            return
        total = {index: leaves[index] for index in held if index in leaves}
        for level in sorted(self._levels):
            column = self._levels[level]
            total = _join({index: column[index] for index in held if index in column}, total)
        for index in held:
            if index in self._bases and index not in self._kept:
                base = self._bases[index]
                base = base * weight if weight != 1 and index in self._foreign else base
                total[index] = base + total[index] if index in total else base
        for index, gradient in total.items():
            self._parameters[index].grad = gradient

    def finish(self, members: Sequence[int]) -> None:
        """Add what was agreed on before to what has been agreed on now, and begin anew."""
        with torch.no_grad():
            for index in self._kept:
                parameter = self._parameters[index]
                if parameter.grad is None:
                    parameter.grad = self._bases[index]
                else:
                    parameter.grad.data.add_(self._bases[index])
        self.clear()
        gradients = ((index, self._parameters[index].grad) for index in members)
        self._agreed = {index: Mark(gradient) for index, gradient in gradients if gradient is not None}

    def take_over(self, other: "Tree") -> None:
        """Go on, between two backwards, where a tree of other parameters was: what both have is kept.

        What is new may have got gradients that nobody has counted; they are in the sum, too.
        """
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        moved = {i: places[id(p)] for i, p in enumerate(other._parameters) if id(p) in places}
        self._levels = {level: _moved(column, moved) for level, column in other._levels.items()}
        self._bases, self._shown = _moved(other._bases, moved), _moved(other._shown, moved)
        self._agreed = _moved(other._agreed, moved)
        self._kept = {moved[index] for index in other._kept if index in moved}
        self._foreign = {moved[index] for index in other._foreign if index in moved}
        for index in set(places.values()).difference(moved.values()):
            gradient = self._parameters[index].grad
            if gradient is not None:
                self._bases[index], self._shown[index] = gradient.detach(), Mark(gradient)

    def clear(self) -> None:
        """Forget everything. What ``.grad`` holds is left alone."""
        self._levels, self._bases, self._shown, self._agreed = {}, {}, {}, {}
        self._kept, self._foreign = set(), set()
        self._end()


class Mark:
    """Recognizes a gradient that nobody has changed. Keeps no memory alive."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def is_on(self, gradient: torch.Tensor | None) -> bool:
        """Tell whether this is the gradient, as it was."""
        return gradient is not None and self._gradient() is gradient and gradient._version == self._version


def _moved(column: dict[int, T], moved: dict[int, int]) -> dict[int, T]:
    return {moved[index]: value for index, value in column.items() if index in moved}


def refuse_sparse(names: Sequence[str]) -> None:
    """Refuse gradients whose rows are added up in no fixed order."""
    raise ValueError(
        f"deterministic=True needs dense gradients, but these are sparse: {name_some(names)}. Make the "
        "embedding with sparse=False, or replicate without deterministic=True"
    )


def _join(left: Column, right: Column, *, in_place: bool = True) -> Column:
    """Add two subtrees. With ``in_place`` the left one's memory is used.

    Who is on one side only gets zeros added, so that a zero has the same sign as where another rank sends
    zeros.
    """
    both, lone = [i for i in left if i in right], [i for i in left if i not in right]
    new = [i for i in right if i not in left]
    result: Column = dict(left)
    if in_place:
        _add_to([left[i] for i in both], [right[i] for i in both])
        _add_to([left[i] for i in lone], 0.0)
    else:
        result |= zip(both, _added([left[i] for i in both], [right[i] for i in both]), strict=True)
        result |= zip(lone, _added([left[i] for i in lone], 0.0), strict=True)
    result |= zip(new, _added([right[i] for i in new], 0.0), strict=True)
    return result


def _add_to(left: list[torch.Tensor], right: Any) -> None:
    if left:
        torch._foreach_add_(left, right)


def _added(left: list[torch.Tensor], right: Any) -> Sequence[torch.Tensor]:
    return torch._foreach_add(left, right) if left else ()


def _owned(column: Column) -> Column:
    """Make sure that no two gradients share memory, and that none is part of a graph: they are added to."""
    seen: set[int] = set()
    result = {}
    for index, gradient in column.items():
        address = gradient.untyped_storage().data_ptr()
        shares = address in seen or gradient.requires_grad
        seen.add(address)
        result[index] = gradient.detach().clone() if shares else gradient
    return result
