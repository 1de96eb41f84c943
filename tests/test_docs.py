"""The documentation names what there is: every exception and message, every argument, files that exist."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from paceline import DistributedDataParallel as Ours
from paceline import errors

Theirs = torch.nn.parallel.DistributedDataParallel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
EXCEPTIONS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)
]
PLAIN = ("AttributeError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def words(text: str) -> str:
    """Return a text without its line breaks."""
    return " ".join(text.split())


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


# ---- errors.md --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_exception_is_explained(kind: type) -> None:
    assert kind is errors.PacelineError or f"\n## {kind.__name__}\n" in text_of("errors.md")


def test_the_tree_of_exceptions_is_the_one_in_the_source() -> None:
    tree = re.search(r"\n    PacelineError\n(?:    [├└].*\n)+", errors.__doc__ or "")
    assert tree

    for line in dedent(tree[0]).strip().splitlines():
        assert line in text_of("errors.md")


def messages(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fixed parts of every message that an exception is made with."""
    kinds = {*PLAIN, *(kind.__name__ for kind in EXCEPTIONS)}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in kinds and node.args:
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            fixed = [part.value for part in parts if isinstance(part, ast.Constant)]
            yield node.lineno, [part for part in fixed if isinstance(part, str)]


SOURCES = sorted((ROOT / "src" / "paceline").rglob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_message_is_shown(file: Path) -> None:
    shown = words(text_of("errors.md"))
    # What is short stands between two names and is found anywhere.
    parts = [(line, words(part)) for line, message in messages(file) for part in message if len(part) >= 12]

    assert [(line, part) for line, part in parts if part not in shown] == []


def test_the_search_for_messages_finds_them() -> None:
    found = [part for file in SOURCES for _, message in messages(file) for part in message]

    assert len(found) > 50
    assert any("is gone: it closed its connection" in part for part in found)


# ---- from-ddp.md ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_every_argument_of_the_class_has_a_row(kind: type) -> None:
    arguments = list(inspect.signature(kind.__init__).parameters)[1:]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", text_of("from-ddp.md"), re.MULTILINE)

    assert [argument for argument in arguments if argument not in rows] == []


def test_attributes_that_are_said_to_be_there_are_there() -> None:
    table = text_of("from-ddp.md").split("## Methods and attributes")[1].split("Not there yet")[0]
    firsts = " ".join(re.findall(r"^\|(.+?)\|", table, re.MULTILINE))
    names = set(re.findall(r"`(\w+)(?:\(\))?`", firsts)) - {"pickle"}
    model = Ours(torch.nn.Linear(1, 1))

    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(model, name)] == []


def test_names_that_are_said_to_be_missing_are_missing() -> None:
    sentence = text_of("from-ddp.md").split("Not there yet")[1].split(". If a script")[0]
    names = set(re.findall(r"`(\w+)`", sentence)) - {"AttributeError"}
    model = Ours(torch.nn.Linear(1, 1))

    assert "logger" in names
    assert [name for name in sorted(names) if hasattr(model, name)] == []


# ---- how-it-works.md --------------------------------------------------------------------------------


def test_the_map_of_the_source_names_every_module() -> None:
    table = text_of("how-it-works.md").split("## The source, bottom up")[1]
    parts = [p for p in (ROOT / "src" / "paceline").iterdir() if not p.name.startswith(("_", "py."))]

    names = [f"`{part.name}/`" if part.is_dir() else f"`{part.name}`" for part in parts]
    assert [name for name in names if name not in table] == []


# ---- all pages --------------------------------------------------------------------------------------


def anchors(file: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@each_page
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)

    assert broken == []


@each_page
def test_python_in_the_pages_compiles(page: Path) -> None:
    for block in re.findall(r"^ *```(?:python|py)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(dedent(block))
