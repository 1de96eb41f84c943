"""Numbers in which the order of a tensor's elements counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.fingerprint import read_each, read_in_order


@given(st.permutations(range(9)))
def test_a_permutation_has_the_same_sum_and_another_number(order: list[int]) -> None:
    rows = torch.arange(36.0).reshape(9, 4)
    moved = rows[order]

    assert read_each([rows]) == read_each([moved])
    assert (read_in_order([rows]) == read_in_order([moved])) == (order == sorted(order))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("length", [0, 1, 3, 17])
def test_every_element_counts_and_the_tensor_stays_as_it_is(dtype: torch.dtype, length: int) -> None:
    tensor = torch.arange(1, length + 1).to(dtype)
    before = tensor.clone()
    changed = [tensor.clone() for _ in range(length)]
    for place, other in enumerate(changed):
        other[place] += 1

    numbers = read_in_order([tensor, *changed])

    assert len(set(numbers)) == length + 1
    assert torch.equal(tensor, before)
