import re
import runpy
import sys

import pytest

from tests.examples.conftest import EXAMPLES, Starter


@pytest.fixture(scope="module")
def four_epochs(start: Starter) -> str:
    return start.run("paceline run", "digits.py", "--epochs", 4)


def test_digits_are_read_right_on_held_out_images(four_epochs: str) -> None:
    accuracy = re.search(r"accuracy, held out +([\d.]+)% of 360 images", four_epochs)

    assert accuracy, four_epochs
    assert float(accuracy[1]) >= 97


def test_the_buffers_of_batchnorm_are_equal_on_all_ranks(four_epochs: str) -> None:
    assert re.search(r"BatchNorm buffers +6, equal on all ranks", four_epochs), four_epochs


def test_a_missing_scikit_learn_gets_a_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    read_digits = runpy.run_path(str(EXAMPLES / "digits.py"))["read_digits"]

    with pytest.raises(SystemExit, match=r"pip install 'paceline\[examples\]'"):
        read_digits()
