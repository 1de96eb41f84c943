"""Orthonormal bases: they span what the rows span, and what has gone wrong shows."""

from collections.abc import Callable

import pytest
import torch

from paceline.hooks.orthonormal import by_gram_schmidt, by_householder, orthonormal

Basis = Callable[[torch.Tensor], torch.Tensor]

each_way = pytest.mark.parametrize("basis_of", [by_gram_schmidt, by_householder])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def projection(basis: torch.Tensor) -> torch.Tensor:
    return basis.mT @ basis


@each_way
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_rows_are_orthonormal_and_span_the_same(basis_of: Basis, rank: int) -> None:
    rows = drawn(7, rank, 50)

    basis = basis_of(rows)

    torch.testing.assert_close(basis @ basis.mT, torch.eye(rank).expand(7, rank, rank), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows @ projection(basis), rows, atol=1e-4, rtol=0)


@each_way
def test_rows_that_are_nearly_alike_are_told_apart(basis_of: Basis) -> None:
    row = drawn(3, 1, 50)
    rows = torch.cat([row, row + 1e-3 * drawn(3, 2, 50, seed=1)], dim=1)

    basis = basis_of(rows)

    torch.testing.assert_close(basis @ basis.mT, torch.eye(3).expand(3, 3, 3), atol=1e-5, rtol=0)


@each_way
def test_rows_that_are_alike_or_nothing_still_give_a_projection(basis_of: Basis) -> None:
    row = drawn(1, 50)
    rows = torch.stack([torch.cat([row, row]), torch.zeros(2, 50), torch.cat([torch.zeros(1, 50), row])])

    twice = projection(basis_of(rows)) @ projection(basis_of(rows))

    torch.testing.assert_close(twice, projection(basis_of(rows)), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows @ projection(basis_of(rows)), rows, atol=1e-4, rtol=0)


@each_way
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_matrix(basis_of: Basis, poison: float) -> None:
    rows = drawn(3, 2, 50)
    rows[1, 0, 7] = poison

    finite = basis_of(rows).isfinite().all(dim=2).all(dim=1)

    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_size_does_not_matter(scale: float, dtype: torch.dtype) -> None:
    rows = drawn(3, 2, 50).to(dtype)

    basis = orthonormal(scale * rows)

    torch.testing.assert_close(projection(basis), projection(orthonormal(rows)), atol=1e-5, rtol=0)


def test_16_bits_are_computed_in_32() -> None:
    rows = drawn(3, 2, 50).bfloat16()

    basis = orthonormal(rows)

    assert basis.dtype is torch.bfloat16
    torch.testing.assert_close(basis, by_householder(rows.float()).bfloat16(), atol=1e-2, rtol=0)
