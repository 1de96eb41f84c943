"""Accelerate trains with our class."""

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

pytestmark = needs("accelerate")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run("accelerate_loop.py", tmp_path_factory.mktemp("accelerate"))


RUNS = [
    pytest.param("trained", {}, id="accumulate and clip"),
    pytest.param("late", {}, id="trigger_sync_in_backward"),
    pytest.param("compressed", {"rtol": 1e-3, "atol": 1e-3}, id="fp16 hook"),
    pytest.param("uneven", {}, id="join_uneven_inputs"),
]


@pytest.mark.parametrize(("loop", "tolerance"), RUNS)
def test_every_rank_trains_our_class_to_the_weights_of_one_process(
    found: Found, loop: str, tolerance: dict[str, float]
) -> None:
    assert_wrapped_by_us(found, loop)
    assert_ranks_agree(found, loop)
    assert_as_one_process(found, loop, **tolerance)


def test_accelerate_finds_its_place_from_our_launcher(found: Found) -> None:
    assert [facts["backend"] for facts in found] == [("MULTI_CPU", "gloo")] * 2


def test_unwrapping_gives_the_users_model(found: Found) -> None:
    assert all(facts["unwrapped"] for facts in found)


def test_a_loaded_state_goes_on_to_the_same_bits(found: Found) -> None:
    for facts in found:
        assert_same_bits(facts["resumed"]["weights"], facts["trained"]["weights"])


def test_the_hook_compresses(found: Found) -> None:
    exact, compressed = found[0]["compressed"]["alone"], found[0]["compressed"]["weights"]

    assert any(not compressed[name].equal(exact[name]) for name in exact)


def test_ranks_with_uneven_inputs_run_all_of_theirs(found: Found) -> None:
    assert [facts["uneven"]["batches"] for facts in found] == [4, 3]
