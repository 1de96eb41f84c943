"""Lines come out whole, and one redrawn line stays live on a terminal."""

import io
import itertools
import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch import output
from paceline.launch.output import CLEAR, Feed, File, Lines, Piece, Terminal


def pieces(*chunks: bytes) -> list[tuple[bytes, bool]]:
    lines = Lines()
    found = [piece for chunk in chunks for piece in lines.feed(chunk)] + list(lines.finish())
    return [(piece.text, piece.finished) for piece in found]


def finished(*chunks: bytes) -> list[bytes]:
    return [text for text, done in pieces(*chunks) if done]


@pytest.fixture
def written(monkeypatch) -> bytearray:
    """Collect what screens write."""
    data = bytearray()
    monkeypatch.setattr(output, "write_all", lambda descriptor, new: data.extend(new))
    return data


def test_a_line_is_finished_by_its_newline_or_by_the_end():
    assert pieces(b"one\ntw", b"o\n", b"rest") == [(b"one", True), (b"two", True), (b"rest", True)]


def test_empty_lines_stay():
    assert finished(b"a\n\nb\n") == [b"a", b"", b"b"]


def test_windows_line_ends_are_line_ends():
    assert pieces(b"a\r\nb\r\n") == [(b"a", True), (b"b", True)]


def test_a_redrawn_line_shows_each_state_and_ends_as_the_last():
    assert pieces(b"\rstep 1", b"\rstep 2", b"\n") == [
        (b"step 1", False),
        (b"step 2", False),
        (b"step 2", True),
    ]
    assert pieces(b"step 1\r", b"step 2\r", b"\n") == [
        (b"step 1", False),
        (b"step 2", False),
        (b"step 2", True),
    ]


def test_a_state_that_arrives_in_parts_is_put_together():
    assert pieces(b"\rst", b"ep 1\n")[-1] == (b"step 1", True)


def test_a_line_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(output, "LONGEST_LINE", 4)

    assert pieces(b"abcdef", b"gh\n") == [(b"abcdef", True), (b"gh", True)]


@given(st.text("ab\n", max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_chunks_do_not_matter(text, cuts):
    whole = text.encode()
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    chunks = [whole[a:b] for a, b in itertools.pairwise(edges)]

    assert finished(*chunks) == whole.decode().removesuffix("\n").encode().split(b"\n") * bool(whole)


def show(screen, *shown: tuple[str, bytes, bool]) -> None:
    for owner, text, done in shown:
        screen.show(owner, f"[{owner}] ".encode(), Piece(text, done))


def test_a_file_gets_finished_lines_only(written):
    show(File(1), ("0", b"50%", False), ("1", b"hello", True), ("0", b"100%", True))

    assert written == b"[1] hello\n[0] 100%\n"


def test_lines_of_others_appear_above_the_live_line(written):
    show(Terminal(1), ("0", b"50%", False), ("1", b"hello", True), ("0", b"60%", False), ("0", b"done", True))

    assert written == b"[0] 50%" + CLEAR + b"[1] hello\n[0] 50%" + CLEAR + b"[0] 60%" + CLEAR + b"[0] done\n"


def test_a_second_live_line_waits_for_its_end(written):
    show(Terminal(1), ("0", b"a", False), ("1", b"b", False), ("1", b"c", True))

    assert written == b"[0] a" + CLEAR + b"[1] c\n[0] a"


def test_a_wiped_line_frees_the_place(written):
    show(Terminal(1), ("0", b"a", False), ("0", b"    ", False), ("1", b"b", False))

    assert written == b"[0] a" + CLEAR + b"[1] b"


def test_a_live_line_never_wraps(written, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")

    show(Terminal(1), ("0", b"0123456789", False))

    assert written == b"[0] 01234"


def test_torchs_own_rank_prefix_gives_way_to_ours(written):
    Feed(io.BytesIO(b"[rank1]: a\n[rank1]:[W1 b\n[rank1] c\n"), File(1), b"> ").finish()
    Feed(io.BytesIO(b"[rank1]: d\n"), File(1), b"").finish()

    assert written == b"> a\n> [W1 b\n> [rank1] c\n[rank1]: d\n"


def test_a_feed_keeps_the_last_lines(written):
    keep: deque[str] = deque(maxlen=2)
    feed = Feed(io.BytesIO(b"a\nb\nc"), File(1), b"> ", keep)

    feed.finish()

    assert written == b"> a\n> b\n> c\n"
    assert list(keep) == ["b", "c"]
    assert feed.at_end


@pytest.mark.parametrize(
    ("terminals", "kinds"),
    [(set(), (File, File)), ({1}, (Terminal, File)), ({2}, (File, Terminal)), ({1, 2}, (Terminal, Terminal))],
)
def test_each_stream_has_the_screen_that_suits_it(monkeypatch, terminals, kinds):
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor in terminals)

    out, err = output.screens()

    assert (type(out), type(err)) == kinds
    assert (out is err) == (terminals == {1, 2})
