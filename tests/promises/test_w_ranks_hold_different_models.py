"""W: same parameter count, one shape differs; and every other way in which two models can differ."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks
from tests.promises.libraries import REPLICATE, Library, on_both
from tests.promises.measure import batch, gather, share
from tests.promises.scenarios import loss_of, small_model


def other_shape(model: nn.Module) -> None:
    model.head = nn.Linear(4, 3)


def other_dtype(model: nn.Module) -> None:
    model.head.to(torch.bfloat16)


def missing_parameter(model: nn.Module) -> None:
    model.head.bias = None


def frozen(model: nn.Module) -> None:
    model.head.requires_grad_(False)


def other_order(model: nn.Module) -> None:
    model._modules = OrderedDict(reversed(model._modules.items()))


def other_buffer(model: nn.Module) -> None:
    model.register_buffer("count", torch.zeros(2))


# what makes rank 1's model different -> what the message says about it
DIFFERENCES: dict[Callable[[nn.Module], None], list[str]] = {
    other_shape: ["head.weight is (2, 4)", "but (3, 4)", "head.bias is (2,)", "but (3,)"],
    other_dtype: ["head.weight is (2, 4) float32", "but (2, 4) bfloat16"],
    missing_parameter: ["head.bias is (2,) float32", "but missing"],
    frozen: ["head.weight is (2, 4) float32, trainable", "but (2, 4) float32, frozen"],
    other_order: ["order", "head.weight", "body.weight"],
    other_buffer: ["count is buffer (1,) ", "but buffer (2,) "],
}


def build() -> nn.Module:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    model.register_buffer("count", torch.zeros(1))
    return model


def refusal(library: Library, change: Callable[[nn.Module], None], odd: tuple[int, ...], rank: int) -> str:
    """Return the message that all ranks got because some ranks' models are different."""
    model = build()
    if rank in odd:
        change(model)
    with pytest.raises(paceline.RanksDisagree) as caught:
        library.wrap(model)
    texts = gather(str(caught.value))
    assert len(set(texts)) == 1
    return texts[0]


@on_both
@pytest.mark.parametrize("change", DIFFERENCES)
@ranks(2)
def test_the_message_names_what_differs_with_both_values_on_every_rank(
    rank: int, library: Library, change: Callable[[nn.Module], None]
) -> None:
    text = refusal(library, change, (1,), rank)

    for words in (*DIFFERENCES[change], "rank 0", "rank 1", "Build the model the same way on every rank"):
        assert words in text


@pytest.mark.parametrize("odd", [(0,), (1,), (0, 2)])
@ranks(3)
def test_the_message_names_the_ranks_on_each_side(rank: int, odd: tuple[int, ...]) -> None:
    text = refusal(REPLICATE, other_shape, odd, rank)
    others = [r for r in range(3) if r not in odd]

    def side(members: tuple[int, ...] | list[int]) -> str:
        return f"rank{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"

    assert f"(3, 4) float32, trainable on {side(odd)}" in text
    assert f"(2, 4) float32, trainable on {side(others)}" in text


@ranks(3)
def test_three_different_shapes_are_all_told(rank: int) -> None:
    with pytest.raises(paceline.RanksDisagree) as caught:
        paceline.replicate(nn.Linear(2 + rank, 1, bias=False))

    for other in range(3):
        assert f"(1, {2 + other}) float32, trainable on rank {other}" in str(caught.value)


@ranks(2)
def test_more_than_five_differences_are_counted(rank: int) -> None:
    with pytest.raises(paceline.RanksDisagree, match="and 3 more"):
        paceline.replicate(nn.Sequential(*(nn.Linear(2 + rank, 2 + rank) for _ in range(4))))


@on_both
@ranks(2)
def test_after_the_refusal_the_model_is_plain_and_can_be_mended(rank: int, library: Library) -> None:
    model = small_model()
    model[2].requires_grad_(rank == 0)
    with pytest.raises(paceline.RanksDisagree):
        library.wrap(model)
    loss_of(model, share(batch())).backward()
    own = gather(model[0].weight.grad)
    assert not torch.equal(own[0], own[1])
    model.zero_grad()

    model[2].requires_grad_(True)
    wrapped = library.wrap(model)
    loss_of(wrapped, share(batch())).backward()

    agreed = gather(model[0].weight.grad)
    assert torch.equal(agreed[0], agreed[1])
