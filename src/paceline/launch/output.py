"""Many ranks' output on one terminal, or in one file.

A line comes out whole, after its rank's prefix. A line that a rank redraws with carriage returns stays live
on a terminal: it is the last line, and other ranks' lines appear above it. One rank at a time owns the live
line; what others redraw is shown when it is finished. Where there is no terminal, only finished lines are
written.
"""

import os
import re
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Protocol

LONGEST_LINE = 1 << 20  # bytes after which a line counts as finished
CLEAR = b"\r\x1b[K"
TORCH_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch marks what a rank complains about; once is enough


@dataclass(frozen=True)
class Piece:
    """Something a rank wrote: a finished line, or the present state of a line it redraws."""

    text: bytes
    finished: bool


class Lines:
    """Cuts what arrives from one rank into pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Take bytes as they come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield Piece(_last_state(line), finished=True)
        if len(self._rest) > LONGEST_LINE:
            yield from self.finish()
        elif b"\r" in self._rest:
            state = _last_state(self._rest)
            # A trailing \r stays: what comes next starts the line anew.
            self._rest = b"\r" + state + (b"\r" if self._rest.endswith(b"\r") else b"")
            yield Piece(state, finished=False)

    def finish(self) -> Iterator[Piece]:
        """Take the end of the stream for the end of the line."""
        if state := _last_state(self._rest):
            yield Piece(state, finished=True)
        self._rest = b""


def _last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line that goes back to its start now and then."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Screen(Protocol):
    """Where pieces are shown."""

    def show(self, owner: object, prefix: bytes, piece: Piece) -> None:
        """Show one piece of what ``owner`` writes."""


class File:
    """A file or pipe: finished lines only."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def show(self, owner: object, prefix: bytes, piece: Piece) -> None:
        """Write the line if it is finished."""
        if piece.finished:
            write_all(self._descriptor, prefix + piece.text + b"\n")


class Terminal:
    """A terminal: finished lines, and one live line below them."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._owner: object = None
        self._live = b""

    def show(self, owner: object, prefix: bytes, piece: Piece) -> None:
        """Write a finished line above the live one, or redraw the live one."""
        clear = CLEAR if self._live else b""
        if not piece.finished and self._owner not in (None, owner):
            return
        if not piece.finished and piece.text.strip():
            self._owner, self._live = owner, self._cut(prefix + piece.text)
            write_all(self._descriptor, clear + self._live)
            return
        if owner == self._owner:
            self._owner, self._live = None, b""
        line = prefix + piece.text + b"\n" if piece.finished else b""
        write_all(self._descriptor, clear + line + self._live)

    def _cut(self, line: bytes) -> bytes:
        """Shorten a line that would wrap: only the row the cursor is in can be cleared."""
        columns = shutil.get_terminal_size().columns
        text = line.decode(errors="replace")
        return line if len(text) < columns or b"\x1b" in line else text[: columns - 1].encode()


class Feed:
    """One stream of one rank, on its way to a screen; ``keep`` collects its last lines."""

    def __init__(
        self, source: IO[bytes], screen: Screen, prefix: bytes, keep: deque[str] | None = None
    ) -> None:
        self.source = source
        self.at_end = False
        self._screen = screen
        self._prefix = prefix
        self._keep = keep
        self._lines = Lines()

    def pump(self) -> bool:
        """Pass on what has arrived, and tell whether there may be more right now."""
        data = self.source.read(1 << 16)
        self.at_end = data == b""
        self._show(self._lines.feed(data or b""))
        return bool(data)

    def finish(self) -> None:
        """Pass on all that has arrived, and take it for complete."""
        while self.pump():
            pass
        self._show(self._lines.finish())

    def _show(self, pieces: Iterator[Piece]) -> None:
        for piece in pieces:
            if self._prefix:
                piece = Piece(TORCH_PREFIX.sub(b"", piece.text), piece.finished)
            if self._keep is not None and piece.finished:
                self._keep.append(piece.text.decode(errors="replace"))
            self._screen.show(self, self._prefix, piece)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything, however slowly the reader reads."""
    while data:
        data = data[os.write(descriptor, data) :]


def screens() -> tuple[Screen, Screen]:
    """Return where stdout and stderr of the ranks go; one terminal is one screen."""
    if os.isatty(1) and os.isatty(2):
        terminal = Terminal(1)
        return terminal, terminal
    return Terminal(1) if os.isatty(1) else File(1), Terminal(2) if os.isatty(2) else File(2)
