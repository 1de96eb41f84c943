"""K1: one layer under two re-entrant checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL, batch, reference, share, verdict
from tests.promises.scenarios import Boom, checkpointed_layer, k1_two_reentrant_checkpoints


@on_both
@pytest.mark.parametrize("head", [True, False], ids=["a parameter outside", "none outside"])
@ranks(2)
def test_a_layer_under_two_reentrant_checkpoints_equals_the_reference(library: Library, head: bool) -> None:
    assert checkpointed_layer(library, head=head) == EQUAL


class InAndOut(nn.Module):
    """One layer, first under a re-entrant checkpoint and then plainly: its plain gradient arrives first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return self.layer(torch.tanh(checkpoint(self.layer, x, use_reentrant=True)))


@on_both
@ranks(2)
def test_a_layer_inside_and_outside_of_a_checkpoint_equals_the_reference(library: Library) -> None:
    model = InAndOut()
    expected = reference(model, lambda m: m(batch()).square().mean().backward())
    wrapped = library.wrap(model)

    for _ in range(2):
        wrapped.zero_grad()
        wrapped(share(batch())).square().mean().backward()

        assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_one_rank_may_checkpoint_what_the_other_does_not(rank: int, library: Library) -> None:
    class Sometimes(InAndOut):
        checkpoints = rank == 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.checkpoints else self.layer(torch.tanh(self.layer(x)))

    model = Sometimes()
    expected = reference(model, lambda m: m(batch()).square().mean().backward())
    wrapped = library.wrap(model)

    for _ in range(3):
        wrapped.zero_grad()
        wrapped(share(batch())).square().mean().backward()

        assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_an_exception_inside_a_checkpoint_reaches_the_peers_and_training_goes_on(
    rank: int, library: Library
) -> None:
    model = InAndOut()
    expected = reference(model, lambda m: m(batch()).square().mean().backward())
    wrapped = library.wrap(model)

    def inside(x: torch.Tensor) -> torch.Tensor:
        return Boom.apply(model.layer(x)) if rank == 1 else model.layer(x)

    x = share(batch()).clone().requires_grad_()
    loss = model.layer(checkpoint(inside, x, use_reentrant=True)).sum()
    with pytest.raises(ValueError if rank == 1 else paceline.PeerFailed, match="boom in the attention"):
        loss.backward()

    wrapped(share(batch())).square().mean().backward()
    assert verdict(wrapped, expected) == EQUAL


class Maze(nn.Module):
    """A layer used inside a checkpoint in a checkpoint, beside it and outside of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.inner = nn.Linear(4, 4)

    def nested(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(checkpoint(self.twice, x, use_reentrant=True)))

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.layer(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.nested, x, use_reentrant=True))
        return self.layer(x)


@on_both
@ranks(2)
def test_checkpoints_in_checkpoints_equal_the_reference_in_many_buckets(library: Library) -> None:
    model = Maze()
    expected = reference(model, lambda m: m(batch()).square().mean().backward())
    wrapped = library.wrap(model, bucket_cap_mb=1e-6)

    for _ in range(2):
        wrapped.zero_grad()
        wrapped(share(batch())).square().mean().backward()

        assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_checkpoints_inside_no_sync_are_reduced_later(library: Library) -> None:
    model = Maze()

    def train(m: nn.Module, x: torch.Tensor) -> None:
        m(x).square().mean().backward()

    def both(m: nn.Module) -> None:
        train(m, batch())
        train(m, batch() + 1)

    expected = reference(model, both)
    wrapped = library.wrap(model)

    with library.no_sync(wrapped):
        train(wrapped, share(batch()))
    train(wrapped, share(batch()) + 1)

    assert verdict(wrapped, expected) == EQUAL


@ranks(2, warnings="ignore")
def test_torchs_ranks_differ_and_it_says_nothing() -> None:
    assert k1_two_reentrant_checkpoints(TORCH) == DIFFER
