"""U: 5 samples on rank 0, 1 on rank 1, mean loss: the gradient of the concatenated batch, to 1e-6."""

import pytest
import torch
from torch import nn

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, batch, gradients, reference
from tests.promises.scenarios import loss_of, small_model, u_uneven_batches


@on_both
@ranks(2)
def test_weights_give_the_gradient_of_the_concatenated_batch(library: Library) -> None:
    assert u_uneven_batches(library) == EQUAL


@ranks(2)
def test_torch_has_no_word_for_it() -> None:
    assert u_uneven_batches(TORCH).endswith("% off the reference (relative norm), silent")


def relative_error(model: nn.Module, expected: dict[str, torch.Tensor | None]) -> float:
    got = torch.cat([g.flatten() for g in gradients(model).values() if g is not None])
    want = torch.cat([g.flatten() for g in expected.values() if g is not None])
    return float((got - want).norm() / want.norm())


@on_both
@pytest.mark.parametrize("rows", [[[5, 2], [1]], [[0], [3]], [[4], [0, 1, 2]], [[7, 0], [0, 5]]], ids=str)
@ranks(2)
def test_with_accumulation_and_with_weight_zero_on_a_rank(
    library: Library, rows: list[list[int]], rank: int
) -> None:
    model = small_model()
    counts = [count for each in rows for count in each]
    whole = batch(sum(counts))
    expected = reference(model, lambda m: loss_of(m, whole).backward())
    wrapped = library.wrap(model)
    pieces = list(whole.split(counts))
    mine = pieces[: len(rows[0])] if rank == 0 else pieces[len(rows[0]) :]
    for piece in mine[:-1]:
        with library.no_sync(wrapped), library.weight(wrapped, len(piece)):
            loss_of(wrapped, piece).backward()
    with library.weight(wrapped, len(mine[-1])):
        loss_of(wrapped, mine[-1]).backward()
    assert relative_error(wrapped, expected) < 1e-6
