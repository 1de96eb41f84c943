"""Gradients that are mostly zeros (embeddings): the rows that exist are gathered, not the zeros."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.comm import Comm
from paceline.tally import Rows


class Share:
    """This rank's rows of one parameter's gradient."""

    def __init__(self, gradient: torch.Tensor | None, parameter: torch.Tensor, factor: float = 1.0) -> None:
        self._parameter = parameter
        self.came_dense = gradient is not None and gradient.layout is torch.strided
        rows = None if gradient is None else _by_rows(gradient.detach())
        self.indices = _no_indices(parameter) if rows is None else rows.indices()[0]
        self.values = _no_values(parameter) if rows is None else rows.values()
        if factor != 1:
            self.values = self.values * factor

    @property
    def count(self) -> int:
        """How many rows this rank has."""
        return self.indices.numel()

    def gather(self, counts: Sequence[int], comm: Comm, divisor: int) -> torch.Tensor:
        """Return the sum of all ranks' rows over ``divisor``, sparse. Every rank knows the ``counts``."""
        most = max(counts)
        if not most:
            return self._as_sparse(self.indices, self.values)
        # Messages of one size, because not every backend can gather different ones.
        all_indices = comm.gather(_padded(self.indices, most))
        all_values = comm.gather(_padded(self.values, most).view(-1))
        indices = [row[:count] for row, count in zip(all_indices.wait(), counts, strict=True)]
        values = [
            row.view(most, *self.values.shape[1:])[:count]
            for row, count in zip(all_values.wait(), counts, strict=True)
        ]
        return self._as_sparse(torch.cat(indices), torch.cat(values) / divisor)

    def _as_sparse(self, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        # Said aloud, because torch 2.11 warns of checks that are off without anybody having said so.
        invariants: Any = torch.sparse.check_sparse_tensor_invariants
        with invariants(enable=False):
            flat, shape = indices.unsqueeze(0), self._parameter.shape
            return torch.sparse_coo_tensor(flat, values, shape, device=values.device).coalesce()


def gather_rows(
    shares: Mapping[int, Share],
    told: Sequence[Mapping[int, Rows]],
    parameters: Sequence[torch.Tensor],
    comm: Comm,
    divisor: int,
) -> dict[int, torch.Tensor]:
    """Return the reduced gradients of all parameters of which some rank has told that it has rows.

    A gradient that was dense on some rank is dense.
    """
    reduced = {}
    for index in sorted(set().union(*told)):
        each = [rank.get(index, Rows()) for rank in told]
        share = shares.get(index) or Share(None, parameters[index])
        gradient = share.gather([rows.count for rows in each], comm, divisor)
        reduced[index] = gradient.to_dense() if any(rows.came_dense for rows in each) else gradient
    return reduced


def _by_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Bring a gradient into the one form in which it travels: each row once, in order."""
    if gradient.layout is torch.strided:
        return gradient.to_sparse(1)
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        return gradient.to_dense().to_sparse(1)
    return gradient.coalesce()


def _no_indices(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=parameter.device)


def _no_values(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)


def _padded(rows: torch.Tensor, most: int) -> torch.Tensor:
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded
