"""H1: parameter unfrozen after wrapping."""

import pytest
import torch

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import change_of_mind, h1_unfrozen, loss_of, small_model


@on_both
@ranks(2)
def test_a_parameter_unfrozen_after_wrapping_is_reduced_from_the_next_backward_on(library: Library) -> None:
    assert h1_unfrozen(library) == EQUAL


@on_both
@ranks(2)
def test_everything_trainable_may_be_frozen_and_everything_frozen_be_trained(library: Library) -> None:
    def swap(model: torch.nn.Sequential) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    assert change_of_mind(library, swap, frozen_at_first=True) == EQUAL


@on_both
@ranks(2)
def test_a_parameter_unfrozen_inside_no_sync_is_reduced_with_what_it_gathered(library: Library) -> None:
    model = small_model()

    def train(m: torch.nn.Module, x: torch.Tensor, *, local: bool) -> None:
        bare = library.bare(m) if local else m
        bare[0].requires_grad_(True)
        if local:
            with library.no_sync(m):
                loss_of(m, x).backward()
        else:
            loss_of(m, x).backward()
        loss_of(m, x + 1).backward()

    model[0].requires_grad_(False)
    expected = reference(model, lambda m: train(m, batch(), local=False))
    wrapped = library.wrap(model)

    train(wrapped, share(batch()), local=True)

    assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(3)
def test_unfreezing_on_one_rank_only_is_one_clear_error_on_every_rank(rank: int, library: Library) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    wrapped = library.wrap(model)
    loss_of(wrapped, share(batch())).backward()
    if rank == 1:
        model[0].requires_grad_(True)

    with pytest.raises(paceline.RanksDisagree, match=r"0\.weight.*rank 1") as caught:
        loss_of(wrapped, share(batch())).backward()

    assert "frozen" in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1


@ranks(2)
def test_torch_never_reduces_it_and_says_nothing() -> None:
    assert h1_unfrozen(TORCH) == DIFFER
