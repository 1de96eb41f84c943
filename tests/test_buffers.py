"""Buffers: rank 0's, on every rank, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.buffers import finish_broadcast, start_broadcast
from paceline.comm import GroupComm
from paceline.frames import Closing
from paceline.testing import ranks


def same_on_all_ranks(tensor: torch.Tensor) -> bool:
    mine = tensor.detach().contiguous().view(-1).view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return all(torch.equal(part, parts[0]) for part in parts)


@ranks(2)
def test_state_of_any_dtype_is_taken_bit_for_bit(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    raw = torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8)
    dtypes = [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.int64,
    ]
    tensors = [raw.view(dtype).clone() for dtype in [*dtypes, torch.int8, torch.uint16, torch.complex64]]
    tensors += [raw < 128, raw.clone().view(torch.float32).view(4, 4).t(), torch.empty(0), raw[:3].clone()]

    finish_broadcast(start_broadcast(tensors, GroupComm(dist.group.WORLD)))

    for tensor in tensors:
        assert same_on_all_ranks(tensor), tensor.dtype
    assert not same_on_all_ranks(raw)


def test_what_a_rank_says_of_its_buffers_survives_packing() -> None:
    closing = Closing(7, b"\1\0", 2, failure="boom", buffers=b"12345678\0\1\1")

    assert Closing.unpack(closing.pack()) == closing


@ranks(2)
def test_large_state_travels_in_chunks(rank: int) -> None:
    import paceline.buffers

    paceline.buffers.CHUNK_NBYTES = 64
    tensors = [torch.full((size,), float(rank)) for size in (3, 40, 5, 1, 16)]

    transfers = start_broadcast(tensors, GroupComm(dist.group.WORLD))
    finish_broadcast(transfers)

    assert len(transfers) == 4
    assert all((tensor == 0).all() for tensor in tensors)


@ranks(2)
@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_batch_norm_buffers_start_equal_and_stay_equal(rank: int, wrap) -> None:
    torch.manual_seed(rank)
    bare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    bare[1].running_mean.fill_(rank)
    model = wrap(bare)
    assert all(same_on_all_ranks(buffer) for buffer in bare.buffers())

    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
        model.zero_grad()
    if wrap is paceline.DistributedDataParallel:  # torch takes them before a forward: one that moves nothing
        bare.eval()
        model(torch.randn(8, 4))

    assert all(same_on_all_ranks(buffer) for buffer in bare.buffers())
    assert bare[1].num_batches_tracked == 3


@ranks(2)
def test_broadcast_buffers_false_leaves_them_to_each_rank_after_the_start(rank: int) -> None:
    torch.manual_seed(rank)
    bare = nn.Sequential(nn.BatchNorm1d(4))
    bare[0].running_mean.fill_(rank)
    paceline.replicate(bare, broadcast_buffers=False)
    assert same_on_all_ranks(bare[0].running_mean)

    bare(torch.randn(8, 4) + rank).sum().backward()

    assert not same_on_all_ranks(bare[0].running_mean)


@ranks(2)
def test_a_buffer_that_was_replaced_is_still_kept_equal(rank: int) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(2))
    paceline.replicate(model)
    model.seen = torch.full((2,), float(rank + 5))

    model(torch.ones(1, 2)).sum().backward()

    assert model.seen.tolist() == [5.0, 5.0]


@ranks(2)
def test_two_forwards_before_a_backward_are_not_disturbed(rank: int) -> None:
    model = paceline.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    first, second = model(torch.randn(8, 4)), model(torch.randn(8, 4))
    (first.sum() + second.sum()).backward()

    assert model.module[0].weight.grad is not None


@ranks(2)
def test_evaluating_on_one_rank_only_does_not_wait_for_the_others(rank: int) -> None:
    model = paceline.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model(torch.randn(8, 4)).sum().backward()

    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
        model.train()
    model(torch.randn(8, 4)).sum().backward()
