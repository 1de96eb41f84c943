"""Lightning's Trainer and its DDP strategies train with our class."""

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

pytestmark = needs("lightning")

FITS = [
    pytest.param("trained", id="accumulation and clipping"),
    pytest.param("unused", id="unused parameters"),
    pytest.param("manual", id="manual optimization"),
    pytest.param("static", id="manual optimization, static graph"),
    pytest.param("turns", id="two optimizers in turns"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("lightning_trainer.py", tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("fit", FITS)
def test_every_rank_trains_our_class_to_the_weights_of_one_process(found: Found, fit: str) -> None:
    assert_wrapped_by_us(found, fit)
    assert_ranks_agree(found, fit)
    assert_as_one_process(found, fit)


def test_a_fit_resumed_from_a_checkpoint_ends_with_the_bits_of_one_that_never_stopped(found: Found) -> None:
    for facts in found:
        assert_same_bits(facts["resumed"]["weights"], facts["trained"]["weights"])


def test_the_checkpoint_holds_the_bare_model_half_way(found: Found) -> None:
    half_way, end = found[0]["first_epoch"], found[0]["trained"]["weights"]

    assert half_way.keys() == end.keys()
    assert all(not half_way[name].equal(end[name]) for name in end)


def test_a_logged_value_is_reduced_over_the_ranks(found: Found) -> None:
    first, second = (facts["trained"]["validation"] for facts in found)

    assert first == second
