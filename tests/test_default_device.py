"""What paceline makes for itself stays where it belongs, whatever torch.set_default_device() says.

The default device is "meta" here, which holds no values: a tensor that names no device of its own cannot be
sent, compared or read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DistributedDataParallel as Ours
from paceline import hooks
from paceline.comm import GroupComm
from paceline.control import GroupControl
from paceline.testing import ranks

STEPS = 4
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "average": dict,
    "powersgd": lambda: {"hook": hooks.powersgd(rank=1, start_step=1)},
    "quantized": lambda: {"hook": hooks.quantized(bits=4)},
    "in_dtype": lambda: {"hook": hooks.in_dtype(torch.bfloat16)},
    "local_sgd": lambda: {"hook": hooks.local_sgd(every=2, start_step=1)},
    "deterministic": lambda: {"deterministic": True},
    "check_finite": lambda: {"check_finite": "skip"},
    "precision": lambda: {"precision": paceline.Precision(torch.bfloat16, reduce=torch.float32)},
    "buffers": lambda: {"buffers": "before_forward"},
}


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 160, device="cpu"), nn.BatchNorm1d(160, device="cpu"), nn.Linear(160, 4, device="cpu")
    )


def share(rank: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=source, device="cpu")


def train(model: nn.Module, rank: int, steps: int = STEPS, *, skips: bool = False) -> list[torch.Tensor]:
    """Return the state that some steps of training end in.

    With ``skips`` rank 1 leaves a batch out: what others do inside of autograd, where torch knows of no
    default device, it does outside.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        if step == 1 and rank == 1 and skips:
            paceline.skip(model)
        else:
            model(share(rank, step)).float().square().mean().backward()
        optimizer.step()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def assert_same(train: Callable[[], list[torch.Tensor]]) -> None:
    """Raise unless training has the same bits with another default device."""
    got = []
    for device in ("meta", "cpu"):  # links are tried when the first model comes
        with default_device(device):
            got.append(train())
    for with_meta, with_cpu in zip(*got, strict=True):
        assert with_meta.device.type == "cpu"
        assert torch.equal(with_cpu, with_meta)


@pytest.mark.parametrize("way", WAYS)
@ranks(2, timeout=60)
def test_a_replica_trains_alike_with_another_default_device(rank: int, way: str) -> None:
    assert_same(lambda: train(paceline.replicate(net(), **WAYS[way]()), rank, skips=way != "buffers"))


@ranks(2, timeout=60)
def test_a_wrapper_trains_alike_with_another_default_device(rank: int) -> None:
    def train_wrapped() -> list[torch.Tensor]:
        model = Ours(net(), find_unused_parameters=True)
        state = train(model, rank)
        assert model.reducer._get_local_used_map().device.type == "cpu"
        return state

    assert_same(train_wrapped)


@ranks(2, timeout=60)
def test_ranks_with_different_numbers_of_batches_join_with_another_default_device(rank: int) -> None:
    def train_joined() -> list[torch.Tensor]:
        model = paceline.replicate(net())
        with paceline.join(model):
            return train(model, rank, STEPS - rank)

    assert_same(train_joined)


@ranks(2, timeout=60)
def test_weights_accumulation_norms_and_audits_work_with_another_default_device(rank: int) -> None:
    def train_with_them() -> list[torch.Tensor]:
        model = paceline.replicate(net())
        paceline.audit(model, every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        norms = []
        for step in range(STEPS):
            with paceline.accumulate(model, micro_batches=2):
                for half in share(rank, step).split([2, 2]):
                    with paceline.weight(model, 1 + rank):
                        model(half).square().mean().backward()
            norms.append(paceline.replica(model).clip_grad_norm_(0.1))
            optimizer.step()
            optimizer.zero_grad()
        assert paceline.replica(model).grad_norm() == 0
        paceline.audit(model, every=None)
        return [*norms, *(p.detach() for p in model.parameters())]

    assert_same(train_with_them)


@ranks(2, timeout=60)
def test_rows_of_a_sparse_table_are_gathered_with_another_default_device(rank: int) -> None:
    def train_table() -> list[torch.Tensor]:
        torch.manual_seed(1)
        table = paceline.replicate(nn.Embedding(10, 3, sparse=True, device="cpu"))
        if rank == 0:
            table(torch.tensor([1, 2], device="cpu")).square().sum().backward()
        else:
            paceline.skip(table)
        assert table.weight.grad.is_sparse
        return [table.weight.grad.to_dense()]

    assert_same(train_table)


@ranks(2, timeout=60)
def test_frames_over_a_group_stay_on_the_host_with_another_default_device(rank: int) -> None:
    with default_device("meta"):
        control = GroupControl(GroupComm(dist.group.WORLD))
        for length in (1, 1000):  # the second one is too long for the first round
            control.post(b"topic", bytes([rank]) * length)

            assert control.collect(b"topic", 30) == [bytes([each]) * length for each in (0, 1)]
