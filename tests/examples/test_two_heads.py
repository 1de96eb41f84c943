import re

import pytest

from tests.examples.conftest import Starter


@pytest.mark.parametrize(("launcher", "ranks"), [("paceline run", 2), ("python", 1)])
def test_two_heads_on_one_body_end_with_equal_weights(start: Starter, launcher: str, ranks: int) -> None:
    printed = start.run(launcher, "two_heads.py")

    sums = re.findall(r"sum of the weights (-?[\d.]+)", printed)
    assert len(sums) == ranks, printed
    assert len(set(sums)) == 1, printed
