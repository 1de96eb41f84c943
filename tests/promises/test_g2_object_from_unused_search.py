"""G2: unused-parameter search, forward returns an object."""

import pytest

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL
from tests.promises.scenarios import Answer, Envelope, returned_object


@on_both
@pytest.mark.parametrize("kind", [Answer, Envelope])
@ranks(2)
def test_what_forward_returns_does_not_matter_when_unused_parameters_are_allowed(
    library: Library, kind: type
) -> None:
    assert returned_object(library, kind, find_unused_parameters=True) == EQUAL


@ranks(2, warnings="ignore")
def test_torch_raises_and_then_fails_an_internal_assert() -> None:
    seen = returned_object(TORCH, Envelope, find_unused_parameters=True)

    assert "step 1: every rank raised RuntimeError" in seen
    assert "INTERNAL ASSERT FAILED" in seen
