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
def test_a_group_beside_the_one_that_is_destroyed_goes_on(rank: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    models = [paceline.replicate(nn.Linear(2, 2), group=group) for group in (first, second)]
    dist.destroy_process_group(first)

    for model in models:
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()

    assert models[0].weight.grad.tolist() == [[1.0 + rank] * 2] * 2  # its own
    assert models[1].weight.grad.tolist() == [[1.5] * 2] * 2
