"""The audit: now and then the ranks compare fingerprints of what has to be the same on all of them.

opening    8 bytes that stand for all parameters and their optimizer state; on a GPU those of an earlier
           step, so that nobody waits
opened     the same everywhere: nothing more. Else the ranks tell each other every tensor's fingerprint,
           and all raise; or the step is dropped, and
handed_out what differs is sent again by the majority (``heal=True``)
"""

import functools
import hashlib
import json
import logging
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.buffers import finish_broadcast, start_broadcast
from paceline.errors import RanksDisagree, name_ranks, name_some
from paceline.fingerprint import Prints, read_each
from paceline.hooks import Hook, may_join, name_of, way_of
from paceline.reducer import Reducer
from paceline.riders import Rider
from paceline.torch_private import local_of

DIGEST_NBYTES = 8
STEP = struct.Struct("!Q")

Number = int | float
Held = dict[str, torch.Tensor | Number]  # by names that a message can show
Seen = dict[str, tuple[str, str]]  # by name: what kind of thing it is, and what stands for its contents
Named = Iterable[tuple[str, torch.Tensor]]

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class Schedule:
    """How often the ranks compare what they hold, and whether they mend it."""

    every: int = 50
    heal: bool = False

    def __str__(self) -> str:
        return f"audit(every={self.every}, heal={self.heal})"


def read_schedule(every: Any, heal: Any) -> Schedule | None:
    """Read what users ask for; None is off."""
    if every is None or (every == 0 and not isinstance(every, bool)):
        return None
    if not isinstance(every, int) or isinstance(every, bool):
        raise TypeError(
            f"audit() compares in every n-th reduced step, for a whole number n, got {type(every).__name__}"
        )
    if every < 0:
        raise ValueError(
            f"audit() compares in every n-th reduced step, for n of 1 or more (0 is off), got {every}"
        )
    if not isinstance(heal, bool):
        raise TypeError(f"heal has to be True or False, got {type(heal).__name__}")
    return Schedule(every, heal)


def refuse_hook(hook: Hook) -> None:
    """Refuse a hook that lets the ranks' weights differ."""
    if not may_join(hook) or way_of(hook) == "own":
        raise ValueError(
            f"audit() compares the ranks' weights, and the hook {name_of(hook)} lets them differ by design. "
            "Switch the audit off with every=0, or use another hook"
        )


def refuse_beside_optimizer(schedule: Schedule | None) -> None:
    """Refuse to heal where a step cannot be dropped."""
    if schedule is not None and schedule.heal:
        raise ValueError(
            "audit(heal=True) and an optimizer inside backward exclude each other: the step in which ranks "
            "are found to differ has to be dropped, but its buckets are stepped at once. Take heal=False, or "
            "step after backward()"
        )


# ---- what is compared -----------------------------------------------------------------------------------


def held_by(named: Named, optimizers: Iterable[Any]) -> Held:
    """Return the parameters, and behind them the optimizers' state that belongs to them, by names to show."""
    parameters = list(named)
    held: Held = {name: local_of(parameter) for name, parameter in parameters}
    whole = _that_hold_all(optimizers)
    for name, parameter in parameters:
        # Sorted: two ranks may have made the first steps of two optimizers in different orders.
        state = {what: value for each in whole for what, value in _state(each, name, parameter)}
        held.update(sorted(state.items()))
    return held


def _that_hold_all(optimizers: Iterable[Any]) -> list[Any]:
    """Leave out what holds a share of the state on each rank, with the optimizer that it has inside."""
    known = list(optimizers)
    sharded = [each for each in known if _is_sharded(each)]
    inside = {id(each) for each in sharded} | {id(getattr(each, "optim", None)) for each in sharded}
    return [each for each in known if id(each) not in inside]


def _is_sharded(optimizer: Any) -> bool:
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def _state(optimizer: Any, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | Number]]:
    kind = type(optimizer).__name__
    state = optimizer.state.get(parameter) if isinstance(optimizer.state, Mapping) else None
    for key, value in _leaves("", state):
        yield f"{key} of {name} ({kind})", value


def _leaves(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor | Number]]:
    """Yield the tensors and numbers inside of something."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield key, local_of(value)
    elif isinstance(value, int | float):
        yield key, value
    elif isinstance(value, Mapping):
        for inner in sorted(value, key=str):
            yield from _leaves(f"{key}.{inner}".lstrip("."), value[inner])
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _leaves(f"{key}[{place}]", inner)


def _kind_of(value: torch.Tensor | Number) -> str:
    return _kind(value.dtype, value.shape) if isinstance(value, torch.Tensor) else "a number"


@functools.lru_cache(maxsize=4096)
def _kind(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


class Snapshot:
    """What is held at one step, in 8 bytes. The fingerprints may still be on their way."""

    def __init__(self, held: Held) -> None:
        tensors = [value for value in held.values() if isinstance(value, torch.Tensor)]
        self._prints = Prints([tensor for tensor in tensors if tensor.numel()])
        numbers = [value for value in held.values() if not isinstance(value, torch.Tensor)]
        self._words = "|".join([*held, *map(_kind_of, held.values()), *map(repr, numbers)])

    @property
    def is_here(self) -> bool:
        """Whether the digest can be had without waiting."""
        return self._prints.is_here

    def digest(self) -> bytes:
        """Return the 8 bytes."""
        numbers = self._prints.read()
        digest = hashlib.blake2b(self._words.encode(), digest_size=DIGEST_NBYTES)
        digest.update(struct.pack(f"!{len(numbers)}q", *numbers))
        return digest.digest()


def look_at_each(held: Held) -> Seen:
    """Return what stands for each tensor and number. Waits for the device."""
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    prints = dict(zip(tensors, read_each(list(tensors.values())), strict=True))
    return {name: (_kind_of(value), str(prints.get(name, value))) for name, value in held.items()}


# ---- what differs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Something that the ranks do not have in common. None: it is not there at all."""

    name: str
    seen: Mapping[int, tuple[str, str] | None]

    @property
    def majority(self) -> Sequence[int]:
        """The ranks that have the same, if they are more than half."""
        value, count = Counter(self.seen.values()).most_common(1)[0]
        return (
            [rank for rank, each in self.seen.items() if each == value] if 2 * count > len(self.seen) else []
        )

    @property
    def odd(self) -> Sequence[int]:
        """The ranks that are not of the majority; all of them, if there is none."""
        return [rank for rank in self.seen if rank not in self.majority]

    @property
    def is_curable(self) -> bool:
        """Whether the majority's numbers can be written over the others'."""
        kinds = {None if each is None else each[0] for each in self.seen.values()}
        return bool(self.majority) and len(kinds) == 1 and kinds.isdisjoint({None, "a number"})

    def __str__(self) -> str:
        missing = [rank for rank, each in self.seen.items() if each is None]
        if missing:
            there = [rank for rank in self.seen if rank not in missing]
            return f"{self.name} is there on {name_ranks(there)} only"
        if self.majority:
            return f"{self.name} on {name_ranks(self.odd)} is not what {name_ranks(self.majority)} hold"
        few = "two ranks have no majority" if len(self.seen) == 2 else "no majority of them agrees"
        everyone = name_ranks(list(self.seen))
        return f"{self.name} is not the same on {everyone} ({few}, so none is sure to be right)"


def differences(seen: Mapping[int, Seen]) -> list[Difference]:
    """Find what some ranks, by their numbers, do not have in common; in the order of the first of them."""
    names = dict.fromkeys(name for each in seen.values() for name in each)
    pairs = ((name, {rank: each.get(name) for rank, each in seen.items()}) for name in names)
    return [Difference(name, values) for name, values in pairs if len(set(values.values())) > 1]


def disagreement(step: int, found: Sequence[Difference], schedule: Schedule) -> RanksDisagree:
    """Say which tensor is not the same everywhere, and which rank is odd."""
    first = found[0]
    more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
    advice = ", or let audit(heal=True) send the majority's again"
    if schedule.heal or not all(each.is_curable for each in found):
        advice = "; heal=True cannot mend this" if schedule.heal else ""
    return RanksDisagree(
        f"step {step}: the ranks do not hold the same weights and optimizer state: {first}{more}. Some ranks "
        f"have written to it and others have not, or a memory has failed. Load the last checkpoint on every "
        f"rank{advice}. The gradients were dropped on every rank.",
        tensors=[each.name for each in found],
        ranks=first.odd,
    )


# ---- the rider ------------------------------------------------------------------------------------------


class Audit(Rider):
    """Compares what the ranks hold in every n-th reduced step, and mends it if it is asked to."""

    def __init__(self, schedule: Schedule, reducer: Reducer) -> None:
        self.label = str(schedule)
        self._schedule = schedule
        self._reducer = reducer
        self._snapshot: Snapshot | None = None  # not compared yet
        self._taken = -1  # the step that it is of
        self._is_put_off = False  # to the next step
        self._to_heal: list[Difference] = []

    def opens(self, step: int) -> bytes:
        if self._snapshot is None and (self._is_put_off or self._is_due(step)):
            self._take(step)
        if self._snapshot is None:
            return b""
        return STEP.pack(self._taken) + (self._snapshot.digest() if self._snapshot.is_here else b"")

    def _held(self) -> Held:
        return held_by(self._reducer.named(), self._reducer.steps.optimizers)

    def _is_due(self, step: int) -> bool:
        return step % self._schedule.every == 0

    def _take(self, step: int) -> None:
        self._snapshot, self._taken, self._is_put_off = Snapshot(self._held()), step, False

    def opened(self, step: int, told: Sequence[bytes], present: Sequence[int]) -> None:
        """See Rider. Every rank decides by what all have told, so all do the same."""
        if not present:  # parameters were replaced, or nobody has a batch: what was seen is not comparable
            self._snapshot, self._is_put_off = None, True
            return
        here = [told[rank] for rank in present]
        taken = {each[: STEP.size] for each in here}
        if taken <= {b""}:
            return
        if len(taken) > 1:  # a rank has lost its snapshot in a step that failed
            self._snapshot, self._is_put_off = None, True
            return
        if any(len(each) == STEP.size for each in here):
            return  # it is still on its way from a device
        self._snapshot = None
        if len(set(here)) > 1:
            self._find_out(step, present)
        elif self._is_due(step) and self._taken < step:
            self._take(step)

    def _find_out(self, step: int, present: Sequence[int]) -> None:
        """Compare tensor by tensor: as they are now, since a device may have gone on since the snapshot."""
        frames = self._reducer.exchange(b"audit", json.dumps(look_at_each(self._held())).encode())
        found = differences({rank: _read(frames[rank]) for rank in present})
        if not found:
            logger.warning(
                "paceline: step %d: the ranks did not hold the same weights and optimizer state at step %d, "
                "and do so again",
                step,
                self._taken,
            )
        elif self._schedule.heal and len(present) < self._reducer.wiring.comm.size:
            self._is_put_off = True  # until the majority is that of all ranks
        elif self._schedule.heal and all(each.is_curable for each in found):
            self._to_heal = found
        else:
            raise disagreement(step, found, self._schedule)

    def closed(self, step: int, told: Sequence[bytes]) -> bool:
        # Some gradients are those of wrong weights.
        return bool(self._to_heal)

    def handed_out(self, step: int) -> None:
        if self._to_heal:
            found, self._to_heal = self._to_heal, []
            self._heal(found)
            logger.warning(
                "paceline: step %d was dropped on every rank, and the majority's numbers were sent again: %s",
                step,
                name_some([f"{each.name} on {name_ranks(each.odd)}" for each in found]),
            )

    def _heal(self, found: Sequence[Difference]) -> None:
        """Take the majority's numbers, each from the lowest of its ranks. A collective."""
        held = self._held()
        for source in sorted({each.majority[0] for each in found}):
            values = [held[each.name] for each in found if each.majority[0] == source]
            tensors = [value.detach() for value in values if isinstance(value, torch.Tensor)]
            finish_broadcast(start_broadcast(tensors, self._reducer.wiring.comm, source))

    def dropped(self) -> None:
        # All ranks come here, also those that could not open this step.
        self._snapshot, self._is_put_off, self._to_heal = None, True, []


def _read(frame: bytes) -> Seen:
    return {name: (kind, contents) for name, (kind, contents) in json.loads(frame).items()}
