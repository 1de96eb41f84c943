"""``rehearse()``: a training step on several ranks that are threads of this process, for a unit test.

    main      rehearse(step, ranks=2) ─┬─ starts ──── waits ──── nothing open? ── bit-equal? ─ results
    rank 0                             ├─ step(world) ─ replicate ─ backward ─ ...
    rank 1                             └─ step(world) ─ replicate ─ backward ─ ...

Everything but the transport is what a real run has. What a rank raises, and what a run would only show after
a time limit, ends the rehearsal with one exception.
"""

import ctypes
import inspect
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import PeerTimeout, RanksDisagree, UnsyncedGradients, name_ranks, name_some, words_of
from paceline.guard import guard, left_unsynced
from paceline.hooks import way_of
from paceline.hub import Hub, Left
from paceline.launch.world import World, world
from paceline.places import Place, here, working_at
from paceline.reducer import Reducer
from paceline.registry import registry
from paceline.threads import Line, ThreadComm
from paceline.watches.engine import engine_watch

GRACE_SECONDS = 1.0  # that ranks have to end once they were told to


def rehearse(step_fn: Callable[..., Any], ranks: int = 4, *, timeout_seconds: float = 30.0) -> list[Any]:
    """Run a training step once per rank, each on a thread of its own; return what the ranks returned.

    ``step_fn`` takes this rank's world, or nothing; it builds its own model, as each process of a real run
    does. If ranks raise, the exception of the one that was first is raised, with notes on the others. It is
    an error, too, to return with gradients that were never reduced, or with parameters that are not
    bit-equal.
    """
    call = _caller_of(step_fn)
    _check_numbers(ranks, timeout_seconds)
    if here().comm is not None:
        raise RuntimeError("rehearse() inside rehearse(): a rank of a rehearsal cannot have ranks of its own")
    hub = Hub(ranks, timeout_seconds)
    line = Line(hub, range(ranks))
    players = [Player(hub, ThreadComm(line, rank), call) for rank in range(ranks)]
    with _doors_held(line, players):
        _play(hub, players)
        _raise_first(hub, players)
        _refuse_open(players)
        _refuse_unequal(players)
    return [player.result for player in players]


# ---- one rank ------------------------------------------------------------------------------------


class Player(Place):
    """One rank: the thread that runs the step function, and the place where its replicas are."""

    comm: ThreadComm

    def __init__(self, hub: Hub, comm: ThreadComm, call: Callable[[World], Any]) -> None:
        super().__init__()
        self.comm = comm
        self.rank = comm.rank
        self.result: Any = None
        self.stack = ""  # where it was when its time was over
        # Held here, because a model may end with the step function.
        self.reducers: list[Reducer] = []
        self._last: dict[int, dict[str, torch.Tensor]] = {}
        self._hub = hub
        self._call = call
        self.thread = threading.Thread(
            target=self._run, name=f"rank {self.rank} of {comm.size} (rehearsal)", daemon=True
        )

    def has_come(self, listener: Any) -> None:
        self.reducers.append(listener)

    def has_gone(self, listener: Any) -> None:
        self._last[id(listener)] = {name: p.detach().clone() for name, p in listener.named()}

    def parameters(self, place: int) -> dict[str, torch.Tensor]:
        """Return the parameters of this rank's n-th replica, as they are, or were when it was detached."""
        reducer = self.reducers[place]
        return self._last.get(id(reducer)) or {name: p.detach() for name, p in reducer.named()}

    def _run(self) -> None:
        with working_at(self):
            try:
                self.result = self._call(world())
                left = Left(open=self.what_is_open())
            except BaseException as error:
                left = Left(error)
        self._hub.leave(self.rank, left)

    def unreduced(self) -> dict[str, Reducer]:
        """Return the parameters whose gradients only this rank has."""
        return {name: reducer for reducer in self.reducers for name in left_unsynced(reducer)}

    def what_is_open(self) -> str:
        """Say what the step function has left open, or nothing."""
        if any(map(_is_running, self.reducers)):
            return "a backward that had not ended"
        names = list(self.unreduced())
        return f"gradients that were never reduced: {name_some(names)}" if names else ""

    def outcome(self) -> str:
        """Say how it ended, for the notes on an exception."""
        left = self._hub.left.get(self.rank)
        if self.stack or left is None:
            return f"had not finished, and was here:\n{self.stack}"
        return "returned" if left.error is None else f"raised {words_of(left.error)}"


def _is_running(reducer: Reducer) -> bool:
    try:
        reducer.check_idle()
    except RuntimeError:
        return True
    return False


# ---- all of them ---------------------------------------------------------------------------------


@contextmanager
def _doors_held(line: Line, players: Sequence[Player]) -> Iterator[None]:
    """Keep what the engine hangs into torch in place while the threads run, and leave nothing behind."""
    with engine_watch.standing(), guard.standing():
        try:
            yield
        finally:
            for player in players:
                for replica in registry.beside(player.comm.own_control()):
                    replica.detach()
            line.release()


def _play(hub: Hub, players: Sequence[Player]) -> None:
    """Run all ranks to their end, or to the end of their time."""
    deadline = time.monotonic() + hub.seconds
    try:
        for player in players:
            player.thread.start()
        for player in players:
            player.thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        running = [player for player in players if player.thread.is_alive()]
        if running:
            _end(hub, running)


def _end(hub: Hub, running: Sequence[Player]) -> None:
    """Note where the ranks are that keep the others waiting, and end all of them as far as possible."""
    waiting = hub.waiting()
    stuck = [player for player in running if player.rank not in waiting] or running
    frames = sys._current_frames()
    for player in stuck:
        player.stack = _stack(frames.get(player.thread.ident or 0))
    hub.stop()
    for player in stuck:
        _raise_in(player.thread)
    deadline = time.monotonic() + GRACE_SECONDS
    for player in running:
        player.thread.join(max(0.0, deadline - time.monotonic()))


class Stopped(BaseException):
    """Raised in the thread of a rank whose time is over."""


def _raise_in(thread: threading.Thread) -> None:
    """Have a thread raise at its next line of Python. One that waits inside C goes on until that returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))


def _stack(frame: Any) -> str:
    """Format a stack, without the lines by which the thread came to the step function."""
    entries = [entry for entry in traceback.extract_stack(frame) if entry.filename != threading.__file__]
    ours = [place for place, entry in enumerate(entries) if entry.filename == __file__]
    return "".join(traceback.format_list(entries[ours[-1] + 1 :] if ours else entries)) or "(it has ended)"


# ---- what came of it -----------------------------------------------------------------------------


def _raise_first(hub: Hub, players: Sequence[Player]) -> None:
    """Raise the exception that the others follow from, if there is one."""
    errors = [left.error for left in hub.left.values() if left.error is not None]
    stuck = [player.rank for player in players if player.stack]
    cause = hub.cause()
    first = cause[1] if cause is not None else None
    if stuck and (first is None or isinstance(first, Stopped)):
        stacks = "\n".join(
            f"rank {player.rank} was here:\n{player.stack}" for player in players if player.stack
        )
        first = PeerTimeout(
            f"{name_ranks(stuck)} did not finish within {hub.seconds:g} s of rehearsal. Look at what is done "
            f"there, or give rehearse() more timeout_seconds.\n{stacks}",
            stuck[0],
        )
    elif first is None:
        first = errors[0] if errors else None
    if first is not None:
        told = _ranks_by({player.rank: player.outcome() for player in players})
        first.add_note("\n".join(["in a rehearsal:", *(f"{name_ranks(who)} {what}" for what, who in told)]))
        raise first


def _refuse_open(players: Sequence[Player]) -> None:
    """Refuse what would be lost, or used by this rank alone, in a step that follows."""
    told = _ranks_by({player.rank: player.what_is_open() for player in players})
    found = "; ".join(f"{what} ({name_ranks(who)})" for what, who in told if what)
    if not found:
        return
    names = dict.fromkeys(name for player in players for name in player.unreduced())
    raise UnsyncedGradients(
        f"the step function returned and left something open: {found}. Reduce them before the step "
        "function ends: run the last backward outside of no_sync(), leave accumulate(), or drop them with "
        "zero_grad().",
        tuple(names),
    )


def _ranks_by(told: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Put together the ranks of which the same is told."""
    ranks: dict[str, list[int]] = {}
    for rank, words in told.items():
        ranks.setdefault(words, []).append(rank)
    return list(ranks.items())


def _refuse_unequal(players: Sequence[Player]) -> None:
    """Refuse ranks whose parameters are not bit-equal at the end."""
    for place, reducer in enumerate(players[0].reducers):
        if way_of(reducer.hook) == "own":
            continue  # local SGD: weights differ between two averages, by design
        for name, mine in players[0].parameters(place).items():
            odd = [
                player.rank for player in players if not _same_bits(player.parameters(place).get(name), mine)
            ]
            if odd:
                raise RanksDisagree(
                    f"the rehearsal ended with different parameters: {name} on {name_ranks(odd)} is not what "
                    "it is on rank 0. Let every rank make the same optimizer steps with the same settings, "
                    "and let no rank write to its parameters alone."
                )


def _same_bits(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Compare two tensors byte by byte: what is not a number equals itself, and -0 is not 0."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


# ---- arguments -----------------------------------------------------------------------------------


def _caller_of(step_fn: Any) -> Callable[[World], Any]:
    """Return how to call the step function with a world that it may not want."""
    if not callable(step_fn) or isinstance(step_fn, torch.nn.Module):
        raise TypeError(
            f"rehearse() takes the function that runs a training step, got {type(step_fn).__name__}"
        )
    if inspect.iscoroutinefunction(step_fn) or inspect.isgeneratorfunction(step_fn):
        raise TypeError(
            "rehearse() takes a plain function: calling this one only makes a coroutine or a generator"
        )
    try:
        parameters = inspect.signature(step_fn).parameters.values()
    except ValueError:  # built in, and nobody knows
        return lambda world: step_fn(world)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1 or (needed and needed[0].kind is inspect.Parameter.KEYWORD_ONLY):
        names = ", ".join(p.name for p in needed)
        raise TypeError(
            f"the step function takes the world, or nothing, but this one needs {names}; use a lambda or "
            "functools.partial() for the rest"
        )
    if needed or any(p.name == "world" for p in positional[:1]):
        return lambda world: step_fn(world)
    return lambda _world: step_fn()


def _check_numbers(ranks: Any, timeout_seconds: Any) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"rehearse() takes a whole number of ranks, got {ranks!r}")
    if ranks < 1:
        raise ValueError(f"rehearse() needs at least one rank, got {ranks}")
    if not isinstance(timeout_seconds, int | float) or isinstance(timeout_seconds, bool):
        raise TypeError(f"timeout_seconds has to be a number, got {timeout_seconds!r}")
    if not 0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds has to be above 0 and finite, got {timeout_seconds!r}")
