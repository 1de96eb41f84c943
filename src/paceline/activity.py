"""What this process is doing, read off the stack of the thread that trains. Costs that thread nothing.

From the innermost frame outwards, the first well known one says which phase of a step it is, and the first
one that is the user's own says where.
"""

import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType

import torch

from paceline.places import here

COMPILING = "compiling"
PHASES = {  # by what stands in a file's name after torch's folder
    "utils/data/": "loading data",
    "_dynamo/convert_frame.py": COMPILING,
    "_dynamo/symbolic_convert.py": COMPILING,
    "_dynamo/output_graph.py": COMPILING,
    "_functorch/_aot_autograd/graph_compile.py": COMPILING,
    "_inductor/compile_fx.py": COMPILING,
    "_inductor/async_compile.py": COMPILING,
    "_inductor/codecache.py": COMPILING,
    "optim/": "optimizer",
    "autograd/graph.py": "backward",
    "distributed/checkpoint/state_dict_saver.py": "saving",
    "distributed/checkpoint/state_dict_loader.py": "loading a checkpoint",
}
MODULE_CALL = "nn/modules/module.py"
SERIALIZATION = "serialization.py"
COLLECTIVE = "distributed/distributed_c10d.py"
WAITING = ("control/", "comm.py")  # where paceline itself waits for others
OWN_CODE = "its own code"

_TORCH = str(Path(torch.__file__).parent) + "/"
_PACELINE = str(Path(__file__).parent) + "/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})


class _Trainer:
    """Which thread trains, and what it said that it is busy with."""

    def __init__(self) -> None:
        self.ident = 0
        self.is_one = True  # no two threads of this process have run backwards
        self.busy: list[str] = []
        self._known = 0  # who ran the last backward, if nobody has made a replica since
        self._first = 0

    def prepares(self) -> None:
        """Note that the calling thread makes a replica."""
        if here().comm is None:  # not one rank among the threads of a rehearsal
            self.ident, self._known = get_ident(), 0

    def runs_backward(self) -> None:
        """Note that the calling thread runs a backward."""
        if get_ident() != self._known and here().comm is None:
            self.ident = self._known = get_ident()
            self._first = self._first or self.ident
            self.is_one = self.is_one and self._first == self.ident


trainer = _Trainer()


def look() -> tuple[str, str]:
    """Return the phase of the thread that trains, and its innermost frame of the user's."""
    frame = sys._current_frames().get(trainer.ident)
    try:
        return _read(frame)
    finally:
        del frame  # it may be this very one, and would hold on to itself and to everything around it


def _read(frame: FrameType | None) -> tuple[str, str]:
    phase = where = ""
    for each in _outwards(frame):
        phase = _phase(each, phase)
        where = where or _where(each)
    return phase or OWN_CODE, where


def where_now() -> str:
    """Return the innermost frame of the user's that has led the calling thread here."""
    return next((found for each in _outwards(sys._getframe()) if (found := _where(each))), "")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _phase(frame: FrameType, inner: str) -> str:
    """Return the phase that the frames so far stand for, and this one outside of them."""
    # A backward computes a forward again under checkpointing; evaluation shows in the outermost module.
    if inner not in ("", "forward", "evaluating"):
        return inner
    kind = _kind(frame.f_code.co_filename)
    if kind == MODULE_CALL and frame.f_code.co_name == "_call_impl":
        return "forward" if getattr(frame.f_locals.get("self"), "training", True) else "evaluating"
    if inner:
        return "backward" if kind == "backward" else inner
    if kind == SERIALIZATION:
        return "saving" if "save" in frame.f_code.co_name else ""
    if kind == COLLECTIVE:
        return f"torch.distributed.{frame.f_code.co_name}()"
    return "" if kind == MODULE_CALL else kind


def _where(frame: FrameType) -> str:
    code = frame.f_code
    if not _is_users(code.co_filename):
        return ""
    function = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{Path(code.co_filename).name}:{frame.f_lineno}{function}"


@functools.lru_cache(4096)
def _kind(file: str) -> str:
    """Say what frames of a file stand for: a phase, or a file that has to be looked at more closely."""
    if file.startswith(_PACELINE):
        return "waiting for other ranks" if file.removeprefix(_PACELINE).startswith(WAITING) else ""
    if not file.startswith(_TORCH):
        return ""
    name = file.removeprefix(_TORCH)
    if name in (MODULE_CALL, SERIALIZATION, COLLECTIVE):
        return name
    return next((phase for part, phase in PHASES.items() if name.startswith(part)), "")


@functools.lru_cache(4096)
def _is_users(file: str) -> bool:
    return not (
        file.startswith((_TORCH, _PACELINE, "<frozen ", "<string>", *_LIBRARIES))
        or "/site-packages/" in file
        or "/dist-packages/" in file
    )
