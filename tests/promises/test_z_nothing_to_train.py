"""Z: a model with no trainable parameter."""

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, small_model, z_nothing_to_train


@on_both
@ranks(2)
def test_a_model_with_no_trainable_parameter_passes_through(library: Library) -> None:
    assert z_nothing_to_train(library) == "passes through"


@on_both
@pytest.mark.parametrize(
    "model", [nn.Identity(), small_model().requires_grad_(False)], ids=["empty", "frozen"]
)
@ranks(2)
def test_everything_around_a_model_with_nothing_to_train_works(
    rank: int, library: Library, model: nn.Module
) -> None:
    wrapped = library.wrap(model)
    x = share(batch()).clone().requires_grad_()

    with library.no_sync(wrapped):
        wrapped(x).sum().backward()
    wrapped(x).sum().backward()

    assert x.grad is not None
    assert paceline.replica(wrapped).step == 0
    with paceline.accumulate(wrapped, micro_batches=2):
        wrapped(x).sum().backward()


@on_both
@ranks(2)
def test_frozen_weights_start_as_those_of_rank_0(rank: int, library: Library) -> None:
    wrapped = library.wrap(small_model(seed=rank).requires_grad_(False))

    weights = gather([p.detach() for p in wrapped.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@on_both
@ranks(2)
def test_a_model_with_nothing_to_train_may_be_unfrozen_later(library: Library) -> None:
    model = small_model().requires_grad_(False)
    wrapped = library.wrap(model)
    model.requires_grad_(True)
    expected = reference(model, lambda m: loss_of(m, batch()).backward())

    loss_of(wrapped, share(batch())).backward()

    assert verdict(wrapped, expected) == EQUAL


@ranks(2)
def test_torch_refuses() -> None:
    assert z_nothing_to_train(TORCH).startswith("every rank raised RuntimeError")
