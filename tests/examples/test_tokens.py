import re

from tests.examples.conftest import Starter


def test_batches_of_different_lengths_train_and_end_with_equal_weights(start: Starter) -> None:
    printed = start.run("paceline run", "tokens.py")

    ends = re.findall(r"\bloss ([\d.]+), sum of the weights (-?[\d.]+)", printed)
    assert len(ends) == 2, printed
    assert len({total for _, total in ends}) == 1, printed
    first = float(re.findall(r"step 0: \d+ tokens here, loss ([\d.]+)", printed)[0])
    assert max(float(loss) for loss, _ in ends) < first - 1
