"""A random training program, as a value: what every rank does, step by step.

    Program   how many ranks, how the models are set up, and its steps; perhaps a last deed that is wrong
    Step      changes of the model, zero_grad(), reductions, clipping, optimizer.step()
    Reduction one meeting of all ranks over one model; each rank comes to it in its own way
    Share     one rank's way: backwards, inside accumulate() or no_sync(); skip(); an exception
    Micro     one forward, and one or two backwards through it

``str()`` of a program is a listing to read, ``repr()`` is Python to run it again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

Where = Literal["forward", "early", "late", "loop"]
Wrong = Literal[
    "does not step",
    "alone has weights",
    "steps on unsynced",
    "other order",
    "changed alone",
    "one more",
    "astray",
]


class _Brief:
    """Shows only what is not as usual."""

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True, repr=False)
class Micro(_Brief):
    """One forward. ``layers`` are taken one after the other, each as often as it is named."""

    rows: int = 1
    layers: tuple[int, ...] = ()
    checkpoint: Literal["", "reentrant", "plain"] = ""
    backwards: int = 1  # through this one forward
    weight: float = 1  # where the reduction is weighted
    nan: bool = False

    def __str__(self) -> str:
        layers = "".join(f" > {layer}" for layer in self.layers)
        kind = f", {self.checkpoint} checkpoints" if self.checkpoint else ""
        twice = ", backward twice" if self.backwards > 1 else ""
        nan = " of NaN" if self.nan else ""
        return f"{self.rows} row{'s' if self.rows > 1 else ''}{nan} through trunk{layers} > head{kind}{twice}"


@dataclass(frozen=True, repr=False)
class Fault(_Brief):
    """An exception on one rank, at its n-th micro-batch.

    ``early`` is before the first gradient of that backward, ``late`` after some.
    """

    where: Where = "forward"
    micro: int = 0


@dataclass(frozen=True, repr=False)
class Share(_Brief):
    """One rank's way to a reduction.

    ``plain``: all backwards but the last inside no_sync(). ``accumulate``: with ``room`` for more
    micro-batches than there are. ``skip``: none at all; what is in ``micros`` stays out.
    """

    way: Literal["plain", "accumulate", "skip"] = "plain"
    micros: tuple[Micro, ...] = (Micro(),)
    room: int = 0
    fault: Fault | None = None
    reverse: bool = False  # backwards in the opposite order, where all forwards come first

    @property
    def run(self) -> tuple[Micro, ...]:
        """The micro-batches that are computed."""
        return () if self.way == "skip" else self.micros

    @property
    def count(self) -> int:
        """How many backwards there are."""
        return sum(micro.backwards for micro in self.run)

    @property
    def is_single(self) -> bool:
        """Whether there is no backward but the reduced one."""
        return self.count == 0 or (self.count == 1 and not (self.way == "accumulate" and self.room))


@dataclass(frozen=True, repr=False)
class Reduction(_Brief):
    """One meeting of all ranks over one model. ``again``: and a second one, through the last graphs."""

    shares: tuple[Share, ...]
    model: int = 0
    weighted: bool = False
    batch: bool = False  # inside paceline.batch()
    again: bool = False

    @property
    def faults(self) -> dict[int, Fault]:
        return {rank: share.fault for rank, share in enumerate(self.shares) if share.fault is not None}


@dataclass(frozen=True, repr=False)
class Change(_Brief):
    """What happens to a layer of a model, on all ranks alike. ``add`` has no use for the layer's number.

    A layer that is added has other values on each rank, unless it is ``alike``: paceline takes rank 0's.
    """

    what: Literal["freeze", "unfreeze", "add", "remove"]
    model: int = 0
    layer: int = 0
    alike: bool = False

    def __str__(self) -> str:
        layer = f"{'the same' if self.alike else 'a'} layer" if self.what == "add" else f"layer {self.layer}"
        return f"{self.what} {layer} of model {self.model}"


@dataclass(frozen=True, repr=False)
class Step(_Brief):
    """Everything up to an optimizer step."""

    reductions: tuple[Reduction, ...]
    changes: tuple[Change, ...] = ()
    zero: Literal["none", "zeros", "keep"] = "none"
    forwards_first: bool = False
    clip: float = 0.0
    clip_by: Literal["paceline", "torch"] = "paceline"


@dataclass(frozen=True, repr=False)
class Setup(_Brief):
    """How the models are replicated and stepped."""

    models: int = 1
    door: Literal["replicate", "ddp"] = "replicate"
    bucket_mb: float = 25.0
    hook: Literal["average", "float64"] = "average"
    deterministic: bool = False
    check_finite: Literal["", "raise", "skip"] = ""
    audit: int = 0
    buffers: bool = False
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"


@dataclass(frozen=True, repr=False)
class Program(_Brief):
    """A training loop on several ranks, and at its end perhaps something ``wrong`` that one rank does."""

    ranks: int
    setup: Setup
    steps: tuple[Step, ...]
    wrong: Wrong | None = None
    culprit: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return "\n".join(listing(self))


# ---- rules ------------------------------------------------------------------------------------------------


def tidy(program: Program) -> Program:
    """Turn a program that was drawn freely into one of which paceline says what comes of it."""
    setup = program.setup
    if setup.door == "ddp":
        setup = replace(setup, deterministic=False, buffers=False)
    steps = tuple(_tidy_step(step, setup, program.ranks) for step in program.steps)
    steps = tuple(_tidy_changes(steps[number:]) for number in range(len(steps)))
    if setup.models > 1 and any(not c.what.endswith("freeze") for step in steps for c in step.changes):
        # Other parameters are noticed in a forward, in which the ranks wait for each other: model by model.
        steps = tuple(replace(step, forwards_first=False) for step in steps)
    wrong = program.wrong
    if (wrong == "other order" and setup.models < 2) or (wrong == "astray" and not setup.audit):
        wrong = None
    if wrong == "astray":
        setup = replace(setup, audit=1)
    return replace(program, setup=setup, steps=steps, wrong=wrong, culprit=program.culprit % program.ranks)


def _tidy_step(step: Step, setup: Setup, ranks: int) -> Step:
    met: set[int] = set()
    reductions = []
    for reduction in step.reductions:
        shares = reduction.shares[:ranks]
        reduction = replace(reduction, model=reduction.model % setup.models, shares=shares)
        is_clean = step.zero != "keep" and reduction.model not in met
        met.add(reduction.model)
        reductions.append(_tidy_reduction(reduction, setup, is_clean=is_clean))
    faults = [fault for reduction in reductions for fault in reduction.faults.values()]
    # A forward that raises before other models' backwards would be heard of in the wrong place.
    first = step.forwards_first and not any(fault.where in ("forward", "loop") for fault in faults)
    changes = tuple(replace(change, model=change.model % setup.models) for change in step.changes)
    return replace(step, reductions=tuple(reductions), forwards_first=first, changes=changes)


def _tidy_changes(steps: tuple[Step, ...]) -> Step:
    """Let the first of some steps add layers that are alike, if a backward may come before it is noticed."""
    reductions = [reduction for step in steps for reduction in step.reductions]
    local = {r.model for r in reductions if not all(share.is_single for share in r.shares)}
    changes = (replace(change, alike=change.model in local) for change in steps[0].changes)
    return replace(steps[0], changes=tuple(changes))


def _tidy_reduction(reduction: Reduction, setup: Setup, *, is_clean: bool) -> Reduction:
    shares = [_tidy_share(share) for share in reduction.shares]
    # Several weighted backwards on top of gradients that are reduced already are refused.
    weighted = reduction.weighted and (is_clean or all(share.is_single for share in shares))
    allows_nan = bool(setup.check_finite)
    shares = [_without_nan(share, weighted=weighted, allows=allows_nan) for share in shares]
    told_anyway = all(_is_told(share) for share in shares)
    return replace(
        reduction, shares=tuple(shares), weighted=weighted, batch=reduction.batch or not told_anyway
    )


def _tidy_share(share: Share) -> Share:
    if share.way == "plain" and not share.micros:
        share = replace(share, micros=(Micro(),))
    if share.fault is None:
        return share
    if not share.run:
        return replace(share, fault=Fault("loop", 0))
    return replace(share, fault=replace(share.fault, micro=share.fault.micro % len(share.run)))


def _without_nan(share: Share, *, weighted: bool, allows: bool) -> Share:
    micros = tuple(
        replace(micro, nan=micro.nan and (allows or (weighted and not micro.weight)))
        for micro in share.micros
    )
    return replace(share, micros=micros)


def _is_told(share: Share) -> bool:
    """Tell whether the others hear of a rank's exception without batch()."""
    fault = share.fault
    if fault is None or share.way == "accumulate":
        return True
    is_last = fault.micro == len(share.run) - 1 and share.run[-1].backwards == 1
    return is_last and fault.where != "loop" and not (share.reverse and len(share.run) > 1)


# ---- a listing -------------------------------------------------------------------------------------------


def listing(program: Program) -> Iterator[str]:
    """Write a program down, one thing a line."""
    yield f"{program.ranks} ranks, {_words_for(program.setup)}"
    for number, step in enumerate(program.steps):
        yield f"step {number}:"
        for change in step.changes:
            yield f"    {change}"
        zero = {"none": "zero_grad()", "zeros": "zero_grad(set_to_none=False)", "keep": "no zero_grad()"}
        yield f"    {zero[step.zero]}{'; all forwards before all backwards' if step.forwards_first else ''}"
        for reduction in step.reductions:
            yield from (f"    {line}" for line in _lines_of(reduction))
        if step.clip:
            yield f"    {step.clip_by}'s clip_grad_norm_({step.clip})"
        yield "    optimizer.step()"
    if program.wrong:
        yield f"wrong: rank {program.culprit} {program.wrong}"


def _words_for(setup: Setup) -> str:
    shown = [setup.door, f"bucket_mb={setup.bucket_mb:g}", f"hook={setup.hook}", setup.optimizer]
    shown += [f"{setup.models} models"] if setup.models > 1 else []
    shown += ["deterministic"] if setup.deterministic else []
    shown += [f"check_finite={setup.check_finite}"] if setup.check_finite else []
    shown += [f"audit(every={setup.audit})"] if setup.audit else []
    shown += ["buffers"] if setup.buffers else []
    return ", ".join(shown)


def _lines_of(reduction: Reduction) -> Iterator[str]:
    marks = [f"model {reduction.model}"]
    marks += [word for word in ("weighted", "batch") if getattr(reduction, word)]
    marks += ["and its last backward again"] if reduction.again else []
    yield f"reduce {', '.join(marks)}"
    for rank, share in enumerate(reduction.shares):
        way = f"accumulate({share.count + share.room})" if share.way == "accumulate" else share.way
        yield f"    rank {rank}: {way}{', in reverse' if share.reverse else ''}"
        for place, micro in enumerate(share.run):
            weight = f", weight {micro.weight:g}" if reduction.weighted else ""
            yield f"        {micro}{weight}{_fault_at(share, place)}"
        if not share.run and share.fault:
            yield f"       {_fault_at(share, 0)}"


def _fault_at(share: Share, place: int) -> str:
    fault = share.fault
    return f"   <- raises ({fault.where})" if fault is not None and fault.micro == place else ""
