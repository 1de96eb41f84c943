"""P: a bit flipped in one rank's weights, or in its optimizer's state."""

import pytest
import torch

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import batch, gather, share
from tests.promises.scenarios import flip_bit, loss_of, p_flipped_bit, small_model


@on_both
@ranks(2)
def test_it_is_found_within_k_steps_and_the_tensor_named(library: Library) -> None:
    seen = p_flipped_bit(library)

    assert seen.startswith("3 steps later: every rank raised RanksDisagree: step 4: the ranks do not hold")
    assert "2.weight is not the same on ranks 0, 1" in seen


@ranks(2)
def test_torch_never_notices() -> None:
    assert p_flipped_bit(TORCH) == "4 steps later the weights differ, silent"


@on_both
@pytest.mark.parametrize("what", ["a weight", "optimizer state"])
@pytest.mark.parametrize("odd", [0, 2])
@ranks(3)
def test_with_a_majority_the_odd_rank_is_named_and_healed(
    rank: int, library: Library, what: str, odd: int
) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(wrapped, share(batch())).backward()
            optimizer.step()

    def flip() -> None:
        if rank == odd:
            flip_bit(
                model[0].weight if what == "a weight" else optimizer.state[model[0].weight]["exp_avg_sq"]
            )

    paceline.audit(wrapped, every=3)
    train(2)
    flip()
    with pytest.raises(paceline.RanksDisagree) as caught:
        train(3)
    assert caught.value.ranks == (odd,)
    assert len(set(gather(str(caught.value)))) == 1

    paceline.audit(wrapped, every=3, heal=True)
    train(4)
    assert len({str(held) for held in gather([p.tolist() for p in model.parameters()])}) == 1
    assert len({str(held) for held in gather(optimizer.state_dict())}) == 1
