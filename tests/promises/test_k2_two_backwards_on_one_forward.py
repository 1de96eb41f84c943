"""K2: two ``backward()`` on one forward (``retain_graph``)."""

import pytest
import torch
from torch import nn

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL, batch, reference, share, verdict
from tests.promises.scenarios import k2_two_backwards_on_one_forward, loss_of, scripted, small_model


@on_both
@pytest.mark.parametrize("script", ["F1 B1 B1", "F1 B1 B1 B1"])
@ranks(2)
def test_every_backward_on_a_retained_graph_is_reduced(library: Library, script: str) -> None:
    assert scripted(library, script) == EQUAL


@on_both
@ranks(2)
def test_two_losses_on_one_forward_with_a_step_between_them_train_like_the_reference(
    library: Library,
) -> None:
    model = small_model()

    def train(m: nn.Module, x: torch.Tensor) -> None:
        output = m(x)
        output.square().mean().backward(retain_graph=True)
        m.zero_grad()
        (output.abs().mean() * 3).backward()

    expected = reference(model, lambda m: train(m, batch()))
    wrapped = library.wrap(model)

    train(wrapped, share(batch()))

    assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_a_second_backward_inside_no_sync_adds_what_is_local_to_what_is_agreed(library: Library) -> None:
    model = small_model()
    whole = reference(model, lambda m: loss_of(m, batch()).backward())
    own = reference(model, lambda m: loss_of(m, share(batch())).backward())
    wrapped = library.wrap(model)
    loss = loss_of(wrapped, share(batch()))

    loss.backward(retain_graph=True)
    with library.no_sync(wrapped):
        loss.backward()

    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole[name] + own[name])


@ranks(2)
def test_torch_reduces_only_the_first_and_says_nothing() -> None:
    assert k2_two_backwards_on_one_forward(TORCH) == DIFFER
