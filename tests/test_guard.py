"""The guard: no optimizer steps on gradients that only this rank has, and there are no false alarms."""

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks


def model_and_optimizer(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = paceline.replicate(nn.Linear(4, 4), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 4), rank + 1.0)).sum().backward()


@ranks(2)
def test_a_step_on_local_gradients_raises_and_changes_nothing(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    before = model.weight.detach().clone()
    with paceline.no_sync(model):
        backward(model, rank)

    with pytest.raises(paceline.UnsyncedGradients) as caught:
        optimizer.step()

    assert str(caught.value) == (
        "step 0: optimizer.step() would use gradients that only this rank has: weight, bias. They were "
        "computed inside no_sync() or accumulate(): run one backward outside of it before the step, or drop "
        "them with zero_grad()."
    )
    assert caught.value.parameters == ("weight", "bias")
    assert torch.equal(model.weight, before)


@ranks(2)
def test_after_a_reduced_backward_the_step_passes(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    with paceline.no_sync(model):
        backward(model, rank)
    backward(model, rank)

    optimizer.step()


@ranks(2)
def test_guard_false_lets_everything_pass(rank: int) -> None:
    model, optimizer = model_and_optimizer(guard=False)
    with paceline.no_sync(model):
        backward(model, rank)

    optimizer.step()


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_dropping_local_gradients_is_no_alarm(rank: int, set_to_none: bool) -> None:
    model, optimizer = model_and_optimizer()
    with paceline.no_sync(model):
        backward(model, rank)
    optimizer.zero_grad(set_to_none=set_to_none)

    optimizer.step()


@ranks(2)
def test_gradients_that_belong_to_no_replica_pass(rank: int) -> None:
    model, _ = model_and_optimizer()
    with paceline.no_sync(model):
        backward(model, rank)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()

    torch.optim.SGD(other.parameters(), lr=0.1).step()


@ranks(1)
def test_a_replica_of_size_one_passes(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    with paceline.no_sync(model):
        backward(model, rank)

    optimizer.step()


@ranks(2)
def test_gradients_replaced_by_the_user_pass(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    backward(model, rank)
    for p in model.parameters():
        p.grad = p.grad.clamp(-0.1, 0.1)

    optimizer.step()


@ranks(2)
def test_a_step_inside_a_running_backward_raises(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    model.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    with pytest.raises(paceline.PacelineError) as caught:
        backward(model, rank)

    assert "still running: step after it" in str(caught.value)


@ranks(2)
def test_a_model_that_was_cast_after_replicate_does_not_step_silently(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    model.double()
    model(torch.full((2, 4), rank + 1.0, dtype=torch.float64)).sum().backward()

    with pytest.raises(
        paceline.UnsyncedGradients,
        match="weight, bias.*cast or moved after the model was replicated",
    ):
        optimizer.step()


@ranks(2)
def test_a_model_that_was_cast_between_two_backwards_does_not_step_silently(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    backward(model, rank)
    optimizer.zero_grad()
    model.double()
    model(torch.full((2, 4), rank + 1.0, dtype=torch.float64)).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="cast or moved"):
        optimizer.step()


@ranks(2)
def test_parameters_with_other_memory_of_the_same_kind_are_no_alarm(rank: int) -> None:
    model, optimizer = model_and_optimizer()
    model.weight.data = model.weight.data.clone()
    backward(model, rank)

    optimizer.step()

    assert (model.weight.grad == 3).all()


@ranks(2)
def test_a_part_that_was_cast_after_replicate_fails_in_backward(rank: int) -> None:
    model = paceline.replicate(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    model[0].double()

    with pytest.raises((TypeError, paceline.PeerFailed), match="0.bias has a torch.float64 gradient"):
        (model[0](torch.ones(1, 4).double()).sum() + model[1](torch.ones(1, 4)).sum()).backward()


@ranks(2)
def test_a_part_that_was_cast_down_and_fits_into_its_bucket_does_not_step_silently(rank: int) -> None:
    model = paceline.replicate(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].bfloat16()
    x = torch.full((1, 4), rank + 1.0)

    with pytest.raises((paceline.UnsyncedGradients, paceline.PeerFailed), match="cast or moved"):
        (model[0](x.bfloat16()).float().sum() + model[1](x).sum()).backward()
        optimizer.step()


@ranks(2)
def test_a_sparse_table_that_was_cast_does_not_step_silently(rank: int) -> None:
    model = paceline.replicate(nn.ModuleList([nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].double()

    with pytest.raises(paceline.UnsyncedGradients, match="0.weight.*cast or moved"):
        model[1](model[0](torch.tensor([rank])).float()).sum().backward()
        optimizer.step()


@ranks(2)
def test_the_gate_is_gone_when_the_last_replica_is(rank: int) -> None:
    from paceline.guard import guard

    model, _ = model_and_optimizer()
    assert guard._handles

    paceline.replica(model).detach()

    assert not guard._handles
