import runpy

from tests.examples.conftest import EXAMPLES


def test_the_example_passes() -> None:
    runpy.run_path(str(EXAMPLES / "test_my_loop.py"))["test_four_ranks_learn_the_same"]()
