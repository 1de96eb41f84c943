"""Parameters that are taken out of a replicated module and trained on: nobody reduces them any more."""

import gc
import weakref

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def share(rank: int) -> torch.Tensor:
    return torch.full((3, 4), 1.0 + rank)


def take_head_out(model: nn.Sequential) -> nn.Module:
    head, model[2] = model[2], nn.Identity()
    return head


@ranks(2)
@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_an_optimizer_that_steps_them_is_refused(rank: int, wrap) -> None:
    net = built()
    model = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model(share(rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    head = take_head_out(net)

    head(model(share(rank))).sum().backward()
    with pytest.raises(paceline.UnsyncedGradients, match="2.weight, 2.bias. .* taken out of the module"):
        optimizer.step()

    optimizer.zero_grad()
    optimizer.step()  # nothing is left


@ranks(2)
def test_gradients_of_no_sync_that_leave_with_their_layer_are_not_forgotten(rank: int) -> None:
    model = paceline.replicate(built())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.no_sync(model):
        model(share(rank)).sum().backward()
    take_head_out(model)
    model(share(rank)).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="2.weight, 2.bias"):
        optimizer.step()


@ranks(2)
def test_whoever_reduces_them_again_is_trusted(rank: int) -> None:
    model, alone = paceline.replicate(built()), built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = take_head_out(model)
    model(share(rank)).sum().backward()
    optimizer.zero_grad()

    paceline.replicate(head)  # by itself
    head(model(share(rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    paceline.replica(head).detach()
    model[2] = head  # and back in its place
    model(share(rank)).sum().backward()
    optimizer.step()

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        reference.zero_grad()
        alone(torch.cat([share(0), share(1)])).sum().div(2).backward()
        reference.step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


@ranks(2)
def test_those_that_get_no_gradient_or_are_not_stepped_do_not_matter(rank: int) -> None:
    model = paceline.replicate(built())
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    head = take_head_out(model)
    body = torch.optim.SGD(model.parameters(), lr=0.1)

    model(share(rank)).sum().backward()
    everything.step()
    head(model(share(rank))).sum().backward()
    body.step()


@ranks(2)
def test_one_that_is_frozen_when_it_leaves_and_unfrozen_later(rank: int) -> None:
    model = paceline.replicate(built())
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = take_head_out(model)
    model(share(rank)).sum().backward()
    assert not head.weight.requires_grad
    head.requires_grad_(True)

    head(model(share(rank))).sum().backward()
    with pytest.raises(paceline.UnsyncedGradients, match="2.weight"):
        optimizer.step()


@ranks(2)
def test_two_of_one_name_are_told_apart(rank: int) -> None:
    model, heads = paceline.replicate(built()), []
    for _ in range(2):
        heads.append(model[2])
        model[2] = nn.Linear(4, 2)
        model(share(rank)).sum().backward()
    for head in heads:
        head(share(rank)).sum().backward()

    for head in heads:
        with pytest.raises(paceline.UnsyncedGradients, match="2.weight, 2.bias"):
            torch.optim.SGD(head.parameters(), lr=0.1).step()


@ranks(2)
def test_a_layer_that_moves_to_another_replica_is_reduced_there(rank: int) -> None:
    one, other = paceline.replicate(built()), paceline.replicate(built())
    head = take_head_out(one)
    other[2] = head
    other(share(rank)).sum().backward()
    one(share(rank)).sum().backward()
    other(share(rank)).sum().backward()

    torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1).step()


@ranks(2)
def test_one_whose_return_fails_is_still_known(rank: int) -> None:
    model = paceline.replicate(built())
    head = take_head_out(model)
    model(share(rank)).sum().backward()
    if rank == 0:
        model[2] = head
    with pytest.raises(paceline.RanksDisagree):
        model(share(rank)).sum().backward()
    model[2] = nn.Identity()
    model.zero_grad()

    head(model(share(rank))).sum().backward()
    with pytest.raises(paceline.UnsyncedGradients, match="2.weight"):
        torch.optim.SGD(head.parameters(), lr=0.1).step()


@ranks(2)
def test_one_can_be_swapped_and_others_clipped(rank: int) -> None:
    model = paceline.replicate(built())
    head = take_head_out(model)
    head(model(share(rank))).sum().backward()
    paceline.replica(model).clip_grad_norm_(1.0)

    torch.utils.swap_tensors(head.weight, nn.Parameter(torch.zeros(2, 4)))


@ranks(2)
def test_nothing_holds_them(rank: int) -> None:
    model = paceline.replicate(built())
    model(share(rank)).sum().backward()
    model.zero_grad()
    seen = weakref.ref(take_head_out(model).weight)
    model(share(rank)).sum().backward()

    gc.collect()
    assert seen() is None
