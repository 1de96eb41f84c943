"""An orthonormal basis of what a few long rows span, for many matrices at once.

The ranks compute it from the same bits, each for itself, and have to come to the same bits.
"""

import torch

from paceline.hooks.widened import widened

LOST = 1e-6  # what is left of a row when it is a sum of the rows before, by rounding


def orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Return bases like ``rows``, (matrices, rank, length). A row of zeros stands for a direction too few."""
    exact = rows.to(widened(rows.dtype))
    largest = exact.abs().amax(dim=(1, 2), keepdim=True)  # squares must neither overflow nor vanish
    exact = exact / largest.clamp_min(torch.finfo(exact.dtype).tiny)
    # A GPU takes matrices one by one for a QR decomposition, 90 us each.
    is_many = rows.is_cuda and len(rows) > 2 * rows.shape[1]
    basis = by_gram_schmidt(exact) if is_many else by_householder(exact)
    return basis.to(rows.dtype)


def by_householder(rows: torch.Tensor) -> torch.Tensor:
    """Take one operator for all matrices; what rows do not span is filled up with any directions."""
    basis: torch.Tensor = torch.linalg.qr(rows.mT).Q.mT
    return basis


def by_gram_schmidt(rows: torch.Tensor) -> torch.Tensor:
    """Take some operators for each row, all matrices at once. What is infinite or not a number stays so."""
    basis = rows.clone()
    for place in range(rows.shape[1]):
        row = rows[:, place : place + 1]
        length = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        for _ in range(2 if place else 0):  # once is not exact enough, twice is
            before = basis[:, :place]
            row = torch.baddbmm(row, row @ before.mT, before, alpha=-1)
        left = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        is_lost = (left <= LOST * length) & length.isfinite()
        basis[:, place : place + 1] = (row / left).masked_fill(is_lost, 0)
    return basis
