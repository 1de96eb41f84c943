"""torch's own Join runs on our class, alone and beside a ZeroRedundancyOptimizer."""

import pytest

from tests.integrations.helpers import (
    Found,
    assert_as_one_process,
    assert_ranks_agree,
    assert_wrapped_by_us,
    run,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("torch_join.py", tmp_path_factory.mktemp("join"))


RUNS = [
    pytest.param("initial", id="divided by all ranks"),
    pytest.param("active", id="divided by the ranks still active"),
    # With torch's class, the rank that has joined steps its share on the gradients of its own last input.
    pytest.param("zero", id="with ZeroRedundancyOptimizer"),
]


@pytest.mark.parametrize("training", RUNS)
def test_uneven_inputs_train_our_class_to_the_weights_of_one_process(found: Found, training: str) -> None:
    assert [facts[training]["steps"] for facts in found] == [5, 3]
    assert_wrapped_by_us(found, training)
    assert_ranks_agree(found, training)
    assert_as_one_process(found, training)


def test_early_termination_throws_on_every_rank(found: Found) -> None:
    assert [facts["stopped"] for facts in found] == [
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
        "Rank 1 exhausted all inputs.",
    ]
