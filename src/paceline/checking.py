"""``check()``: would the ranks of a large world run the same collectives? Without the world.

    rank 0    step_fn on tensors without values ──── its collectives ─┐
    rank 1    step_fn ...                       ──── its collectives ─┼─ the first place where two differ
    rank 63   step_fn ...                       ──── its collectives ─┘

One rank after the other, in this process. No rank waits for another one, so nothing can hang.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.collective_log import (
    Collective,
    Difference,
    first_difference,
    first_unmatched,
    frames_before,
    table,
)
from paceline.errors import PacelineError, RanksDisagree, name_ranks
from paceline.fake_world import MACHINE_RANKS, Said, seated
from paceline.launch.world import world
from paceline.places import here

MOST_PASSES = 8  # each knows more of what the ranks tell each other


@dataclass(frozen=True)
class Report:
    """What the ranks of a check have communicated. All agree: otherwise there is an exception."""

    size: int
    ranks: tuple[int, ...]  # that were run
    collectives: Mapping[int, tuple[Collective, ...]]  # by rank
    agrees: bool = True
    results: Mapping[int, Any] = field(default_factory=dict, repr=False)  # what the step function returned

    def __str__(self) -> str:
        first = self.ranks[0]
        head = f"{self.size} ranks, of which {len(self.ranks)} were run: {', '.join(map(str, self.ranks))}"
        return "\n".join([f"{head}. They agree.", f"rank {first}:", *table(self.collectives[first])])


def check(
    step_fn: Callable[..., Any], ranks: int = 64, only: Iterable[int] | Literal["all"] | None = None
) -> Report:
    """Run a step for some ranks of a large world, without that world, and compare their collectives.

    ``step_fn`` builds its own model, as each process of a real run does; it takes nothing, this rank's number
    (if its parameter is called ``rank``), or its world. Tensors have no values, and all are on the CPU. By
    default some ranks are run that stand for the others; ``only`` chooses. Raises RanksDisagree at the first
    place where two of them differ, with the user's line on each side.
    """
    call = _caller_of(step_fn)
    _check_size(ranks)
    _check_process()
    chosen = _chosen(ranks, only)
    runs = _Runs(call, ranks)
    runs.run(chosen)
    if only is None:
        runs.run(_companions(runs.logs))
    difference = runs.first_difference()
    if difference is not None:
        raise _disagreement(difference)
    unmatched = first_unmatched(runs.logs)
    if unmatched:
        raise RanksDisagree(
            f"a message between two ranks has no counterpart: {unmatched}. Give each send one recv of the "
            "same size and dtype."
        )
    return runs.report()


class _Runs:
    """The ranks that were run, and what they have done."""

    def __init__(self, call: Callable[[int], Any], size: int) -> None:
        self._call = call
        self._size = size
        self._told: dict[tuple[bytes, int], dict[int, bytes]] = {}
        self.logs: dict[int, tuple[Collective, ...]] = {}
        self._says: dict[int, Said] = {}
        self._results: dict[int, Any] = {}

    def run(self, ranks: Iterable[int]) -> None:
        """Run ranks, one after the other."""
        for rank in ranks:
            with seated(rank, self._size, self._told) as seat:
                try:
                    self._results[rank] = self._call(rank)
                except Exception as error:
                    error.add_note(self._words(rank))
                    raise
            self.logs[rank], self._says[rank] = tuple(seat.log), seat.says

    def first_difference(self) -> Difference | None:
        """Return the first place where two ranks differ.

        What ranks tell each other decides what they do next (which gradients some of them lack, and so on).
        At first each takes itself for all. If a difference could come from that, they are run again, and hear
        what the others have said.
        """
        found = first_difference(self.logs)
        for _ in range(MOST_PASSES):
            if found is None or found.is_sure:
                break
            self._tell(frames_before(self.logs, found))
            try:
                self.run(list(self.logs))
            except PacelineError:
                break  # they find out themselves that they differ; where, is known already
            found = first_difference(self.logs)
        return found

    def _tell(self, counts: Mapping[object, int]) -> None:
        """Let all ranks know what each has said, as far as they have been alike."""
        self._told = {}
        for rank, says in self._says.items():
            for (topic, number), frame in says.items():
                if number < counts.get(topic, 0):
                    self._told.setdefault((topic, number), {})[rank] = frame

    def report(self) -> Report:
        ranks = tuple(sorted(self.logs))
        return Report(self._size, ranks, {rank: self.logs[rank] for rank in ranks}, True, self._results)

    def _words(self, rank: int) -> str:
        done = f"; {name_ranks(sorted(self.logs))} had ended well" if self.logs else ""
        return f"in check(), on rank {rank} of {self._size}, with tensors that are all on the CPU{done}"


def _disagreement(difference: Difference) -> Exception:
    sides = [side for side in (difference.mine, difference.theirs) if side is not None]
    if sum("JOINED" in side.terms for side in sides) == 1:
        return RuntimeError(
            "check() cannot follow join() where the ranks have different numbers of batches: who has run out "
            "waits for what the others tell. Give every rank the same number, or use paceline.rehearse()"
        )
    return RanksDisagree(
        f"the ranks do not do the same, and would wait for each other: {difference}. Make every rank do the "
        "same things in the same order, with the same model and settings.",
        ranks=difference.ranks,
    )


# ---- which ranks ---------------------------------------------------------------------------------


def _chosen(size: int, only: Any) -> list[int]:
    if only is None:
        # The first ones, the first of the second machine, one in the middle, the last.
        some = {0, 1, 2, MACHINE_RANKS, size // 2, size - 1}
        return sorted(rank for rank in some if rank < size)
    if isinstance(only, str):
        if only != "all":
            raise ValueError(f'only has to be "all" or a list of ranks, got {only!r}')
        return list(range(size))
    ranks = sorted({_read_rank(rank, size) for rank in _listed(only)})
    if not ranks:
        raise ValueError("only has to name at least one rank, got none")
    return ranks


def _listed(only: Any) -> Iterable[Any]:
    if not isinstance(only, Iterable):
        raise TypeError(f'only has to be "all" or a list of ranks, got {only!r}')
    return only


def _read_rank(rank: Any, size: int) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"only has to hold whole numbers, got {rank!r}")
    if not 0 <= rank < size:
        raise ValueError(f"only names rank {rank}, but there are ranks 0 to {size - 1}")
    return rank


def _companions(logs: Mapping[int, Sequence[Collective]]) -> list[int]:
    """Return one more rank for each group of which only one has been run."""
    groups = {each.group: None for log in logs.values() for each in log}
    found: dict[int, None] = {}
    for group in groups:
        there = [rank for rank in group.ranks if rank in logs or rank in found]
        others = [rank for rank in group.ranks if rank not in there]
        if len(there) == 1 and others:
            found[min(others)] = None
    return sorted(found)


# ---- arguments -----------------------------------------------------------------------------------


def _caller_of(step_fn: Any) -> Callable[[int], Any]:
    """Return how to call the step function with a rank or a world that it may not want."""
    if not callable(step_fn) or isinstance(step_fn, torch.nn.Module):
        raise TypeError(f"check() takes the function that runs a training step, got {type(step_fn).__name__}")
    if inspect.iscoroutinefunction(step_fn) or inspect.isgeneratorfunction(step_fn):
        raise TypeError(
            "check() takes a plain function: calling this one only makes a coroutine or a generator"
        )
    try:
        parameters = list(inspect.signature(step_fn).parameters.values())
    except ValueError:  # built in, and nobody knows
        parameters = []
    needed = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(needed) > 1 or (needed and needed[0].kind is inspect.Parameter.KEYWORD_ONLY):
        names = ", ".join(p.name for p in needed)
        raise TypeError(
            f"the step function takes the rank, the world, or nothing, but this one needs {names}; use a "
            "lambda or functools.partial() for the rest"
        )
    first = parameters[0].name if parameters else ""
    if first == "rank":
        return lambda rank: step_fn(rank)
    if needed or first == "world":
        return lambda _rank: step_fn(world())
    return lambda _rank: step_fn()


def _check_size(ranks: Any) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"check() takes a whole number of ranks, got {ranks!r}")
    if ranks < 1:
        raise ValueError(f"check() needs at least one rank, got {ranks}")


def _check_process() -> None:
    """Refuse to start where this process is a rank already, of whatever."""
    if here().comm is not None or here().is_pretended:
        raise RuntimeError("check() inside check() or rehearse(): a rank there cannot have ranks of its own")
    if not dist.is_available():
        raise RuntimeError("check() needs torch.distributed, which this build of torch lacks")
    if dist.is_initialized():
        raise RuntimeError(
            "check() needs a process without a process group, but there is one. Call it before "
            "init_process_group() and world(), or in a process of its own"
        )
