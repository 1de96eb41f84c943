"""C: static graph, first micro-step in ``no_sync``."""

from paceline.testing import ranks
from tests.promises.libraries import DROP_IN, TORCH, Library, on_both
from tests.promises.measure import EQUAL
from tests.promises.scenarios import c_static_graph_first_step_local


@on_both
@ranks(2)
def test_the_first_micro_step_of_a_static_graph_may_be_local(library: Library) -> None:
    assert c_static_graph_first_step_local(library) == EQUAL


@ranks(4)
def test_the_first_micro_step_of_a_static_graph_may_be_local_on_four_ranks() -> None:
    assert c_static_graph_first_step_local(DROP_IN) == EQUAL


@ranks(2, warnings="ignore")
def test_torch_fails_an_internal_assert() -> None:
    assert "INTERNAL ASSERT FAILED" in c_static_graph_first_step_local(TORCH)
