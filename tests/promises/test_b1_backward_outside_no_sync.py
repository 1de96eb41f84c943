"""B1: forward inside ``no_sync``, backward outside."""

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, LOCAL
from tests.promises.scenarios import b1_backward_outside_no_sync


@on_both
@ranks(2)
def test_a_backward_outside_no_sync_is_reduced_wherever_its_forward_was(library: Library) -> None:
    assert b1_backward_outside_no_sync(library) == EQUAL


@ranks(2)
def test_torch_does_not_reduce_and_says_nothing() -> None:
    assert b1_backward_outside_no_sync(TORCH) == LOCAL
