"""G1: static graph, forward returns a dataclass or any object."""

import pytest

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL
from tests.promises.scenarios import Answer, Envelope, returned_object

on_any_object = pytest.mark.parametrize("kind", [Answer, Envelope])


@on_both
@on_any_object
@ranks(2)
def test_what_forward_returns_does_not_matter_to_a_static_graph(library: Library, kind: type) -> None:
    assert returned_object(library, kind, static_graph=True) == EQUAL


@on_any_object
@ranks(2, warnings="ignore")
def test_torch_never_reduces_and_says_nothing(kind: type) -> None:
    assert returned_object(TORCH, kind, static_graph=True) == DIFFER
