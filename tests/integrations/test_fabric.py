"""Fabric's DDP strategy trains with our class."""

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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("fabric_loop.py", tmp_path_factory.mktemp("fabric"))


def test_every_rank_trains_our_class_to_the_weights_of_one_process(found: Found) -> None:
    assert_wrapped_by_us(found, "trained")
    assert_ranks_agree(found, "trained")
    assert_as_one_process(found, "trained")


def test_gradients_stay_local_inside_no_backward_sync(found: Found) -> None:
    assert [facts["synced"] for facts in found] == [[False, True] * 2] * 2


def test_a_loaded_checkpoint_goes_on_to_the_same_bits(found: Found) -> None:
    for facts in found:
        assert_same_bits(facts["resumed"]["weights"], facts["trained"]["weights"])


def test_a_checkpoint_has_the_keys_of_the_bare_model(found: Found) -> None:
    assert found[0]["keys"] == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
