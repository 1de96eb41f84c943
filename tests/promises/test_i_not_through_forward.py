"""I: any path but the wrapper's forward."""

import pytest
import torch

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL, batch, reference, share, verdict
from tests.promises.scenarios import WAYS, Generator, another_way, i_not_through_forward

on_every_way = pytest.mark.parametrize("way", WAYS)


@on_both
@on_every_way
@ranks(2)
def test_gradients_are_reduced_by_whatever_path_they_came(library: Library, way: str) -> None:
    assert another_way(library, WAYS[way]) == EQUAL


@on_both
@ranks(2)
def test_several_paths_in_one_loss_are_reduced_together(library: Library) -> None:
    model = Generator(4, 3)

    def train(m: torch.nn.Module, bare: Generator, x: torch.Tensor) -> None:
        (m(x).square().mean() + bare.generate(x).mean() + (bare.weight * x.mean()).sum()).backward()

    expected = reference(model, lambda m: train(m, m, batch()))
    wrapped = library.wrap(model)

    train(wrapped, library.bare(wrapped), share(batch()))

    assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_a_functional_call_on_the_parameters_is_reduced(library: Library) -> None:
    model = Generator(4, 3)

    def train(bare: Generator, x: torch.Tensor) -> None:
        parameters = {name: 2 * p for name, p in bare.named_parameters()}
        torch.func.functional_call(bare, parameters, (x,)).square().mean().backward()

    expected = reference(model, lambda m: train(m, batch()))
    wrapped = library.wrap(model)

    train(library.bare(wrapped), share(batch()))

    assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_a_path_around_the_wrapper_inside_no_sync_is_guarded_too(library: Library) -> None:
    model = Generator(4, 3)
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with library.no_sync(wrapped):
        model.generate(share(batch())).mean().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="weight, bias"):
        optimizer.step()


@ranks(2)
def test_torch_does_not_reduce_and_says_nothing() -> None:
    assert i_not_through_forward(TORCH) == DIFFER
