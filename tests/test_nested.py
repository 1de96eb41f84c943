"""Tensors are found in whatever a module may be called with, and what holds none is left alone."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.nested import map_tensors

Pair = namedtuple("Pair", ["left", "right"])
ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


def doubled(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor * 2, value)


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str = "a"
    made: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", self.x + 1)


@dataclass
class HalfMade:
    x: torch.Tensor
    later: torch.Tensor = field(init=False)


class Counting(list[Any]):
    """A list with a constructor of its own."""

    def __init__(self, *, start: int) -> None:
        super().__init__()
        self.start = start


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (ONE, TWO),
        ((ONE, 3), (TWO, 3)),
        ([ONE, [ONE]], [TWO, [TWO]]),
        ({"a": {"b": ONE}}, {"a": {"b": TWO}}),
        (Pair(ONE, "x"), Pair(TWO, "x")),
        (OrderedDict(b=ONE, a=3), OrderedDict(b=TWO, a=3)),
        (defaultdict(list, a=ONE), defaultdict(list, a=TWO)),
        (UserDict(a=ONE), UserDict(a=TWO)),
        (torch.max(torch.ones(2), dim=0)[:1], (TWO,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_type(value: Any, want: Any) -> None:
    got = doubled(value)

    assert got == want
    assert type(got) is type(want)


def test_a_defaultdict_keeps_its_factory() -> None:
    assert doubled(defaultdict(list, a=ONE))["new"] == []


def test_structures_that_torch_returns() -> None:
    got = doubled(torch.max(torch.tensor([1, 5]), dim=0))

    assert (got.values, got.indices) == (10, 2)


def test_dataclasses_are_not_made_again() -> None:
    sample = Sample(ONE)

    got = doubled(sample)

    assert (got.x, got.made, got.name) == (2, 4, "a")
    assert (sample.x, sample.made) == (1, 2)
    assert doubled(HalfMade(ONE)).x == 2


def test_classes_with_constructors_of_their_own() -> None:
    value = Counting(start=7)
    value.append(ONE)

    got = doubled(value)

    assert (got, got.start, type(got)) == ([TWO], 7, Counting)
    assert value == [ONE]


def test_packed_sequences_are_handed_over_whole() -> None:
    seen: list[Any] = []

    map_tensors(lambda item: seen.append(item) or item, [pack_sequence([torch.ones(2)])])

    assert [type(item) for item in seen] == [PackedSequence]


@pytest.mark.parametrize(
    "value",
    [[1, [2]], (1, "a"), {"cache": []}, Pair(1, 2), torch.Size([2, 3]), Pair, Sample, "text", None, {ONE}],
    ids=str,
)
def test_what_does_not_change_is_the_very_same_object(value: Any) -> None:
    assert doubled(value) is value


def test_a_container_beside_a_tensor_is_still_the_callers_own() -> None:
    cache: list[int] = []

    got = doubled({"x": ONE, "cache": cache})

    assert got["cache"] is cache
