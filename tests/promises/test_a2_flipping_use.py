"""A2: which parameters are used flips per step and per rank."""

from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import paceline
import paceline.reducer
from paceline.testing import ranks
from paceline.watches import engine
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, story
from tests.promises.scenarios import branching_steps, flipping_route, flipping_steps


@on_both
@ranks(2)
def test_use_that_flips_equals_the_reference_without_a_flag(library: Library) -> None:
    # Past 16 steps the plan has been made anew from what is often missing.
    assert flipping_steps(library, search=False, steps=18) == f"{EQUAL} (0 graph walks in 18 steps)"


@on_both
@ranks(4)
def test_use_that_flips_on_four_ranks_in_many_buckets(library: Library) -> None:
    routes = [flipping_route(step) for step in range(5)]

    assert story(branching_steps(library, routes, bucket_cap_mb=1e-6)) == EQUAL


@on_both
@ranks(2)
def test_torchs_flag_may_stay_and_costs_no_graph_walk(library: Library) -> None:
    assert flipping_steps(library, search=True) == f"{EQUAL} (0 graph walks in 4 steps)"


@ranks(2)
def test_the_graph_is_only_ever_walked_when_a_backward_has_failed(rank: int) -> None:
    from tests.promises.libraries import REPLICATE

    walked = AssertionError("walked the graph")
    with mock.patch.object(engine, "leaves_below", side_effect=walked) as walk:
        routes = [flipping_route(step) for step in range(3)]
        assert story(branching_steps(REPLICATE, routes)) == EQUAL
        assert not walk.called

    model = paceline.replicate(nn.Linear(2, 2))
    output = model(torch.ones(2))
    output.register_hook(Mock(side_effect=RuntimeError("boom")))
    with mock.patch.object(engine, "leaves_below", wraps=engine.leaves_below) as walk:
        with pytest.raises(RuntimeError, match="boom"):
            output.sum().backward()
        assert walk.called


@pytest.mark.parametrize("search", [False, True], ids=["without the flag", "with the flag"])
@ranks(2, warnings="ignore")
def test_torch_needs_a_flag_and_a_walk_per_step(search: bool) -> None:
    seen = flipping_steps(TORCH, search)

    if search:
        assert seen == f"{EQUAL} (4 graph walks in 4 steps)"
    else:
        assert "raised RuntimeError" in seen
