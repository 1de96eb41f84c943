import re

import pytest

from tests.examples.conftest import Starter
from tests.examples.test_train import value_of


@pytest.fixture(scope="module")
def twelve_steps(start: Starter) -> str:
    return start.run("paceline run -n 3", "parameter_server.py", "--steps", 12, "--batch", 32)


def test_the_loss_falls(twelve_steps: str) -> None:
    first, last = map(float, value_of("loss, first to last", twelve_steps).split(" to "))

    assert last < first - 0.5


def test_the_trainers_end_with_the_same_network(twelve_steps: str) -> None:
    assert value_of("network on rank 0", twelve_steps) == value_of("network on rank 1", twelve_steps)
    assert value_of("networks equal", twelve_steps) == "yes"


def test_the_first_steps_equal_those_of_one_process(twelve_steps: str) -> None:
    difference = float(value_of("one process, 3 steps", twelve_steps).removeprefix("largest difference "))

    assert difference < 1e-5


def test_one_rank_shows_progress(twelve_steps: str) -> None:
    assert re.findall(r"step (\d+)/12  loss \d\.\d+", twelve_steps)[-1] == "12"
