"""The Hugging Face Trainer trains with our class."""

import pytest

from tests.integrations.helpers import (
    Found,
    assert_as_one_process,
    assert_ranks_agree,
    assert_same_bits,
    assert_wrapped_by_us,
    needs,
    run,
)

pytestmark = needs("transformers")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("hf_trainer.py", tmp_path_factory.mktemp("transformers"))


RUNS = [
    pytest.param("trained", id="accumulation and clipping"),
    pytest.param("checkpointed", id="re-entrant gradient checkpointing"),
]


@pytest.mark.parametrize("training", RUNS)
def test_every_rank_trains_our_class_to_the_weights_of_one_process(found: Found, training: str) -> None:
    assert_wrapped_by_us(found, training)
    assert_ranks_agree(found, training)
    assert_as_one_process(found, training, rtol=1e-4, atol=1e-4)


def test_a_training_resumed_from_a_checkpoint_ends_with_the_bits_of_one_that_never_stopped(
    found: Found,
) -> None:
    for facts in found:
        assert facts["resumed"]["steps"] == 2
        assert_same_bits(facts["resumed"]["weights"], facts["trained"]["weights"])


def test_every_rank_evaluates_to_the_same_loss(found: Found) -> None:
    first, second = (facts["trained"]["loss"] for facts in found)

    assert first == second
