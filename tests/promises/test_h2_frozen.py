"""H2: parameter frozen after wrapping."""

import torch
from torch import nn

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import h2_frozen, loss_of, small_model


@on_both
@ranks(2)
def test_a_parameter_frozen_after_wrapping_leaves_the_others_reduced(library: Library) -> None:
    assert h2_frozen(library) == EQUAL


@on_both
@ranks(2)
def test_a_parameter_frozen_before_the_first_backward_leaves_the_others_reduced(library: Library) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    model[2].bias.requires_grad_(False)
    expected = reference(model, lambda m: loss_of(m, batch()).backward())

    loss_of(wrapped, share(batch())).backward()

    assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_what_a_frozen_parameter_gathered_in_no_sync_is_reduced(library: Library) -> None:
    model = small_model()

    def train(m: nn.Sequential, x: torch.Tensor) -> None:
        loss_of(m, x).backward()
        m[0].requires_grad_(False)
        loss_of(m, x + 1).backward()

    expected = reference(model, lambda m: train(m, batch()))
    wrapped = library.wrap(model)

    with library.no_sync(wrapped):
        loss_of(wrapped, share(batch())).backward()
    model[0].requires_grad_(False)
    loss_of(wrapped, share(batch()) + 1).backward()

    assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_freezing_back_and_forth_trains_like_the_reference(library: Library) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    for step in range(8):
        model[0].requires_grad_(step % 3 != 1)
        model[2].requires_grad_(step % 4 != 2)
        wrapped.zero_grad()
        expected = reference(model, lambda m, step=step: loss_of(m, batch() + step).backward())

        loss_of(wrapped, share(batch()) + step).backward()

        assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_freezing_on_one_rank_only_keeps_the_weights_of_the_ranks_equal(rank: int, library: Library) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if rank == 1:
        model[0].requires_grad_(False)
    for _ in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, share(batch())).backward()
        optimizer.step()

    weights = gather(model[0].weight.detach())
    assert torch.equal(weights[0], weights[1])


@ranks(2, warnings="ignore")
def test_torch_leaves_the_others_unreduced_and_raises_one_forward_later() -> None:
    assert h2_frozen(TORCH).startswith(f"step 2: {DIFFER}; step 3: every rank raised RuntimeError")
