"""M3: three forwards, then three backwards; F/F/B, F/B/B, F/F/B/B."""

import pytest

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL
from tests.promises.scenarios import ORDERS, scripted


@on_both
@pytest.mark.parametrize("script", ORDERS)
@ranks(2)
def test_forwards_and_backwards_in_any_order_equal_the_reference(library: Library, script: str) -> None:
    assert scripted(library, script) == EQUAL


@on_both
@ranks(4)
def test_three_forwards_then_three_backwards_on_four_ranks(library: Library) -> None:
    assert scripted(library, "F1 F2 F3 B3 B1 B2") == EQUAL


@pytest.mark.parametrize("script", ["F1 F2 F3 B1 B2 B3", "F1 F2 B1 B2"])
@ranks(2)
def test_torch_reduces_only_the_first_backward_and_says_nothing(script: str) -> None:
    assert scripted(TORCH, script) == DIFFER
