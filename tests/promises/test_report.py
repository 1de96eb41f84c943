"""The page of promises: every row has its tests, and is written as it was seen."""

import pytest

from tests.promises.libraries import DROP_IN, REPLICATE, TORCH
from tests.promises.report import BY_TEST_ALONE, LISTENING, PAGE, SAME_BITS, link, ours, page
from tests.promises.scenarios import MATRIX

SHOWN = [row.id for row in MATRIX] + [SAME_BITS[0], LISTENING[0], *BY_TEST_ALONE]
PROMISED = "A A2 B1 B2 B3 C G1 G2 H1 H2 H3 I K1 K2 M3 L V U AB W W2 X J Q S N P Z M E"


def test_every_row_of_the_matrix_is_shown() -> None:
    assert sorted(SHOWN) == sorted(PROMISED.split())


@pytest.mark.parametrize("id", SHOWN)
def test_every_row_that_is_shown_has_a_test_file_of_its_name(id: str) -> None:
    assert link(id).startswith(f"[{id}](../tests/promises/test_{id.lower()}_")


def test_what_both_doors_saw_is_told_once() -> None:
    assert ours({REPLICATE.name: "works", DROP_IN.name: "works"}) == "works"
    assert ours({REPLICATE.name: "keeps", DROP_IN.name: "a | b"}) == (
        "`replicate()`: keeps<br>`DistributedDataParallel`: a \\| b"
    )


def test_the_page_holds_what_was_seen() -> None:
    seen = {TORCH.name: "ranks differ", REPLICATE.name: "equal", DROP_IN.name: "equal"}

    text = page([("A", "a step", seen)], "9.9")

    assert "| a step | ranks differ | equal |" in text
    assert "| torch 9.9 |" in text


def test_the_page_in_the_docs_has_every_row() -> None:
    text = PAGE.read_text()

    assert [id for id in SHOWN if f"| {link(id)} |" not in text and f"- {link(id)}:" not in text] == []
