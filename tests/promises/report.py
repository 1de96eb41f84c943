"""Write docs/promises.md from what is seen: ``python -m tests.promises.report``.

Every scenario is run on torch's DistributedDataParallel and through both of paceline's doors. Nothing in the
table is written by hand but the situations.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.promises.libraries import DROP_IN, REPLICATE, TORCH, TORCH_SECONDS, Library
from tests.promises.observe import observe, observe_bits, observe_listeners
from tests.promises.scenarios import MATRIX

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
LIBRARIES: tuple[Library, ...] = (TORCH, REPLICATE, DROP_IN)

LISTENING = ("M", "`MASTER_ADDR=127.0.0.1`")
SAME_BITS = ("AB", "same input: steps 0 and 1; two bucket sizes; 1, 2 and 4 ranks (`deterministic=True`)")
BY_TEST_ALONE = {"E": "the exit of a run that trained: 100 clean exits of 100 (`PACELINE_EXITS=100`)"}

PAGE_TEXT = """# Promises, and what was seen

**No optimizer step ever runs on gradients that the ranks do not agree on.** Either the gradients are the
agreed ones on every rank, or every rank gets an exception before the optimizer moves.

This page is written by `make promises`, from runs of the same scenarios on torch {version}'s
`DistributedDataParallel`, on `paceline.replicate()` and on `paceline.DistributedDataParallel`: two ranks,
Gloo, CPU; torch's group had a timeout of {seconds} s. *Reference* is one process on the whole batch; *silent*
means that nothing was raised. Where paceline's two doors saw the same, it is told once. Each id leads to its
tests.

| id | situation | torch {version} | paceline |
|---|---|---|---|
{table}

Shown by its test alone:

{by_test_alone}

"""

Seen = Mapping[str, str]  # library -> what was seen


def main() -> None:
    """Run everything and write the page."""
    rows = []
    for row in MATRIX:
        rows.append((row.id, row.situation, _watch(row.id, lambda library, id=row.id: observe(id, library))))
    rows.append((*SAME_BITS, _watch(SAME_BITS[0], observe_bits)))
    rows.append((*LISTENING, _watch(LISTENING[0], observe_listeners)))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(rows, torch.__version__.split("+")[0]))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def _watch(id: str, look: Callable[[Library], str]) -> Seen:
    seen = {}
    for library in LIBRARIES:
        seen[library.name] = look(library)
        print(f"{id:3} {library.name:24} {seen[library.name]}")
        sys.stdout.flush()
    return seen


def page(rows: list[tuple[str, str, Seen]], version: str) -> str:
    """Lay out the page."""
    return PAGE_TEXT.format(
        version=version,
        seconds=TORCH_SECONDS,
        table="\n".join(
            f"| {link(id)} | {situation} | {theirs(seen)} | {ours(seen)} |" for id, situation, seen in rows
        ),
        by_test_alone="\n".join(f"- {link(id)}: {situation}" for id, situation in BY_TEST_ALONE.items()),
    )


def link(id: str) -> str:
    """Name a row by a link to its tests."""
    (file,) = sorted(Path(__file__).parent.glob(f"test_{id.lower()}_*.py"))
    return f"[{id}](../tests/promises/{file.name})"


def theirs(seen: Seen) -> str:
    """Tell what torch did."""
    return _cell(seen[TORCH.name])


def ours(seen: Seen) -> str:
    """Tell what paceline did: once if both doors did the same."""
    if seen[REPLICATE.name] == seen[DROP_IN.name]:
        return _cell(seen[REPLICATE.name])
    return "<br>".join(f"`{door}`: {_cell(seen[door.name])}" for door in (REPLICATE, DROP_IN))


def _cell(text: str) -> str:
    for sign, written in (("|", "\\|"), ("<", "&lt;"), ("\n", " ")):
        text = text.replace(sign, written)
    return text


if __name__ == "__main__":
    main()
