"""A process group that has been destroyed: there are no other ranks, and the model is a plain one again."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing import ranks


@ranks(2)
@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_one_rank_goes_on_alone(rank: int, wrap) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model(torch.randn(5, 4))[0].square().sum().backward()
    optimizer.step()
    before = net[0].weight.detach().clone()
    dist.destroy_process_group()

    if rank == 0:
        optimizer.zero_grad()
        net(torch.randn(5, 4))[0].square().sum().backward()
        optimizer.step()
        assert not torch.equal(net[0].weight, before)


@ranks(2)
def test_blocks_around_a_backward_and_clipping_wait_for_nobody_either(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    dist.destroy_process_group()

    if rank == 0:
        with paceline.accumulate(model, 3):
            model(torch.ones(1, 2)).sum().backward()
        with paceline.batch(model):
            model(torch.ones(1, 2)).sum().backward()
        paceline.replica(model).clip_grad_norm_(1.0)
        with paceline.join(model):
            model(torch.ones(1, 2)).sum().backward()


@ranks(2)
def test_one_group_that_is_destroyed_among_others_is_not_the_end(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2), group=(group := dist.new_group([0, 1])))
    dist.destroy_process_group(group)

    model(torch.full((1, 2), 1.0 + rank)).sum().backward()

    assert model.weight.grad.tolist() == [[1.5] * 2] * 2
