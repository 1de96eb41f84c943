"""Gradients that were not reduced yet: which they are, and what they stand for."""

from collections.abc import Collection, Iterable, Sequence

import torch

from paceline.weights import Ledger


class LocalGradients:
    """The gradients that only this rank has."""

    def __init__(self, parameters: Sequence[torch.Tensor], ledger: Ledger) -> None:
        self._parameters = parameters
        self.indices: set[int] = set()
        self._found: frozenset[int] = frozenset()
        self.ledger = ledger
        self._versions: list[int] = []  # when the last weighted backward had ended
        self._before: list[torch.Tensor | None] | None = None  # a backward of weight 0
        self._is_on_top = False  # the present backward adds to gradients that are agreed on

    @property
    def counts(self) -> bool:
        """Whether the gradients of the present backward count: its weight is not 0."""
        return self._before is None

    def note_found(self, indices: Collection[int]) -> None:
        """Note gradients that were there at the start."""
        self.indices.update(indices)
        self._found = frozenset(indices)

    def note_strangers(self, indices: Iterable[int]) -> None:
        """Note parameters of whose gradients nobody has heard for some time."""
        self.indices.update(index for index in indices if self._parameters[index].grad is not None)

    @property
    def are_found(self) -> bool:
        """Whether no others have come to those that were there at the start."""
        return self.indices <= self._found

    def move_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """Go on with other parameters. A new one may have got a gradient already, in no_sync()."""
        known = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        kept = {index for index in self.indices if self._parameters[index].grad is not None}
        self._parameters, self._found = parameters, frozenset()
        old = {i for i, p in enumerate(parameters) if known.get(id(p), -1) in kept}
        new = {i for i, p in enumerate(parameters) if id(p) not in known and p.grad is not None}
        self.indices = old | new

    def drop(self, members: Collection[int]) -> None:
        """Forget the gradients of a step that did not succeed, so that nothing half-reduced is used."""
        for index in members:
            self._parameters[index].grad = None
        self.are_agreed(members)
        self._before = None

    def are_agreed(self, members: Collection[int]) -> None:
        """Note that all ranks have them now."""
        if self.indices:
            self.indices.difference_update(members)
        self.ledger.clear()

    def forget_cleared(self) -> None:
        """Notice gradients that were dropped by zero_grad() before they were reduced."""
        if self.indices and self._before is None:
            self.indices -= {index for index in self.indices if self._parameters[index].grad is None}

    # ---- weights ---------------------------------------------------------------------------------

    def prepare(self, *, is_reduced: bool) -> None:
        """Get ready for a backward inside weight()."""
        self.forget_cleared()
        self._forget_zeroed()
        if not self.indices:
            self.ledger.clear()
        gradients = [parameter.grad for parameter in self._parameters]
        there = [g for i, g in enumerate(gradients) if g is not None and i not in self.indices]
        is_alone = is_reduced and not self.indices
        self._is_on_top = not is_alone and has_anything(there)
        self._rescale([g for i, g in enumerate(gradients) if g is not None and i in self.indices])
        if self.ledger.now == 0:
            self._before = gradients
            for parameter in self._parameters:
                parameter.grad = None

    def note_backward(self, *, is_reduced: bool) -> None:
        """Add the present backward's weight to what is going to be reduced."""
        if not self.indices and self.ledger.now is None:
            self.ledger.clear()
        is_alone = is_reduced and self.ledger.total is None
        self._found = frozenset()  # others come to them now
        self.ledger.add()
        if self._is_on_top and self.ledger.now and not is_alone:
            raise ValueError(
                "weight(): several backwards are to be reduced together, on top of gradients that are "
                "reduced already. Call zero_grad() before the first of them"
            )

    def _rescale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Bring what is there into units of the present weight."""
        factor = self.ledger.take_unit()
        if factor == 1:
            return
        with torch.no_grad():
            dense = [g.detach() for g in gradients if g.layout is torch.strided]
            if dense:
                torch._foreach_mul_(dense, factor)
            for gradient in gradients:
                if gradient.layout is not torch.strided:
                    gradient.mul_(factor)

    def end(self) -> None:
        """Note that a backward inside weight() has ended, in whatever way."""
        self.set_back()
        self._versions = self._versions_now()

    def set_back(self) -> None:
        """Undo what a backward of weight 0 has done to the gradients, whatever it was."""
        if self._before is not None:
            for parameter, gradient in zip(self._parameters, self._before, strict=True):
                parameter.grad = gradient
            self._before = None

    def _forget_zeroed(self) -> None:
        """Notice zero_grad(set_to_none=False): what stood for something is gone."""
        gradients = [self._parameters[index].grad for index in self.indices]
        if self.indices and self._versions_now() != self._versions and not has_anything(gradients):
            self.indices.clear()

    def _versions_now(self) -> list[int]:
        """Tell how often the gradients were written in place."""
        gradients = (self._parameters[index].grad for index in sorted(self.indices))
        return [gradient._version for gradient in gradients if gradient is not None]


def has_anything(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Tell gradients from the zeros that zero_grad(set_to_none=False) leaves, which are alike everywhere.

    On a GPU the host waits once for all of them.
    """
    values = [_values_of(gradient.detach()) for gradient in gradients if gradient is not None]
    counts = [torch.count_nonzero(each) for each in values]
    return bool(counts) and bool(torch.stack([count.to(counts[0].device) for count in counts]).any())


def _values_of(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
