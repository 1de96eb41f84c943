"""N: one rank's gradient is NaN or Inf."""

import math
from typing import Any

import pytest
import torch

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, n_not_finite, small_model


@on_both
@ranks(2)
def test_every_rank_raises_and_no_weight_is_poisoned(library: Library) -> None:
    seen = n_not_finite(library)

    assert seen.startswith("every rank raised NotFinite: step 0: the gradient of ")
    assert "holds NaN on rank 1" in seen
    assert seen.endswith("0 of 2 ranks' weights are NaN after optimizer.step()")


@ranks(2)
def test_torch_poisons_every_rank() -> None:
    assert n_not_finite(TORCH) == "2 of 2 ranks' weights are NaN after optimizer.step(), silent"


@on_both
@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@ranks(4)
def test_all_ranks_lose_the_same_step_and_train_on(
    rank: int, library: Library, mode: Any, number: float
) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    paceline.replica(wrapped).check_finite(mode)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    lost = []
    for step in range(4):
        optimizer.zero_grad()
        expected = reference(model, lambda m: loss_of(m, batch()).backward())
        before = [p.detach().clone() for p in model.parameters()]
        scale = number if (rank, step) == (2, 1) else 1.0
        error = ""
        try:
            (loss_of(wrapped, share(batch())) * scale).backward()
        except paceline.NotFinite as caught:
            error = str(caught)
        if model[0].weight.grad is None:
            lost.append(step)
            optimizer.step()
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            assert bool(error) == (mode == "raise")
        else:
            assert verdict(wrapped, expected) == EQUAL
            optimizer.step()
        assert len(set(gather(error))) == 1

    assert lost == [1]
