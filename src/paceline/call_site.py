"""Which line of the user's a call comes from, through however much of torch and paceline."""

import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from types import FrameType

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(path + os.sep for path in (*site.getsitepackages(), sysconfig.get_path("purelib")))


def users_frame() -> FrameType | None:
    """Return the innermost frame of the user's own code; else of a library that is neither torch nor ours."""
    found = None
    for frame in frames_from(sys._getframe(1)):
        kind = _kind_of(frame.f_code.co_filename)
        if kind == "user":
            return frame
        found = found or (frame if kind == "library" else None)
    return found


def users_line() -> str:
    """Return the file and the line of the user's own code, as ``train.py:12``."""
    frame = users_frame()
    return "" if frame is None else f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def users_words() -> str:
    """Return what is written in that line."""
    frame = users_frame()
    return "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that it was called by."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _kind_of(filename: str) -> str:
    path = os.path.abspath(filename)
    if path.startswith((_OURS, _TORCH)) or filename.startswith("<frozen"):
        return "ours"
    if path.startswith(_INSTALLED):
        return "library"
    # Installed packages lie below the standard library, so this comes after them.
    return "ours" if path.startswith(_STANDARD) else "user"


@cache
def _shown(filename: str) -> str:
    """Shorten a path to the working folder, if it is in there."""
    near = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if near.startswith(os.pardir) else near
