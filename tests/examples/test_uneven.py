import re

from tests.examples.conftest import Starter


def test_ranks_with_different_numbers_of_batches_end_with_equal_weights(start: Starter) -> None:
    printed = start.run("paceline run", "uneven.py")

    sums = re.findall(r"(\d+) batches here, loss [\d.]+, sum of the weights (-?[\d.]+)", printed)
    assert sorted(count for count, _ in sums) == ["20", "25"], printed
    assert len({total for _, total in sums}) == 1, printed
    assert "25 steps so far" in printed
    assert "in_dtype(torch.bfloat16, average)" in printed
