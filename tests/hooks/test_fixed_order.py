"""Sums over the ranks in a fixed order: a balanced tree over the ranks, whatever the message's size."""

import pytest
import torch

from paceline.comm import SoloComm, comm_over
from paceline.hooks import InOrder
from paceline.hooks.fixed_order import WHOLE_NBYTES
from paceline.testing import ranks
from tests.hooks.world import World

SMALL, LARGE = 5, WHOLE_NBYTES // 4 + 3  # in one collective, and in two


def drawn(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    return numbers.to(dtype)


def by_hand(rows: list[torch.Tensor]) -> torch.Tensor:
    """Add neighbours, then neighbours of these."""
    while len(rows) > 1:
        pairs = [one + other for one, other in zip(rows[0::2], rows[1::2], strict=False)]
        rows = pairs + rows[2 * len(pairs) :]
    return rows[0]


def over(
    size: int, numel: int, dtype: torch.dtype, *, mean: bool = False
) -> tuple[World, list[torch.Tensor]]:
    """Sum over ``size`` ranks that take turns."""
    world = World(size)
    comms = [InOrder(comm) for comm in world.comms]
    flats = [drawn(rank, numel, dtype) for rank in range(size)]
    with torch.no_grad():
        pending = [(c.average if mean else c.total)(flat) for c, flat in zip(comms, flats, strict=True)]
        while sum(each.advance() for each in pending):
            pass
        results = [each.wait() for each in pending]
    assert all(result is flat for result, flat in zip(results, flats, strict=True))
    return world, results


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8])
def test_the_sum_is_that_of_a_balanced_tree_on_every_rank(size: int, numel: int) -> None:
    _, results = over(size, numel, torch.float32)

    expected = by_hand([drawn(rank, numel) for rank in range(size)])
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_every_addition_rounds_to_the_dtype_of_the_gradient(dtype: torch.dtype) -> None:
    _, results = over(4, LARGE, dtype, mean=True)

    expected = by_hand([drawn(rank, LARGE, dtype) for rank in range(4)]) * 0.25
    assert all(torch.equal(result, expected) for result in results)


def test_large_tensors_travel_in_parts_and_small_ones_as_a_whole() -> None:
    small, _ = over(4, SMALL, torch.float32)
    large, _ = over(4, LARGE, torch.float32)

    assert [call.sent.numel() for call in small.calls[0]] == [SMALL]
    assert [call.sent.numel() for call in large.calls[0]] == [LARGE + 1, (LARGE + 1) // 4]


def test_what_else_is_in_the_message_does_not_show() -> None:
    _, [whole, *_] = over(4, LARGE, torch.float32)
    world = World(4)
    halves = [drawn(rank, LARGE)[: LARGE // 3].clone() for rank in range(4)]
    pending = [InOrder(comm).total(half) for comm, half in zip(world.comms, halves, strict=True)]

    assert all(torch.equal(each.wait(), whole[: LARGE // 3]) for each in pending)


def test_a_process_alone_only_scales() -> None:
    comm = InOrder(SoloComm())
    comm.factor = 0.5
    flat = drawn(0, SMALL)

    assert torch.equal(comm.total(flat.clone()).wait(), flat)
    assert torch.equal(comm.average(flat.clone()).wait(), flat * 0.5)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def sums_over_gloo(rank: int, size: int) -> None:
    for numel in (SMALL, LARGE):
        for dtype in DTYPES:
            flat = drawn(rank, numel, dtype)
            with torch.no_grad():
                InOrder(comm_over(None)).total(flat).wait()
            assert torch.equal(flat, by_hand([drawn(each, numel, dtype) for each in range(size)])), dtype


@ranks(2)
def test_two_ranks_over_gloo_get_the_same_sum(rank: int) -> None:
    sums_over_gloo(rank, 2)


@ranks(3)
def test_three_ranks_over_gloo_get_the_same_sum(rank: int) -> None:
    sums_over_gloo(rank, 3)


@ranks(4)
def test_four_ranks_over_gloo_get_the_same_sum(rank: int) -> None:
    sums_over_gloo(rank, 4)


@ranks(3)
def test_exchange_gives_each_rank_its_part_of_everybody(rank: int) -> None:
    rows = comm_over(None).exchange(torch.arange(6.0) + 10 * rank).wait()

    assert rows.tolist() == [[10.0 * source + 2 * rank + i for i in range(2)] for source in range(3)]
