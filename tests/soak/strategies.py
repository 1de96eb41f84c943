"""How programs are drawn, simple ones first, so that what fails shrinks to something short."""

from dataclasses import replace

from hypothesis import strategies as st

from tests.soak.program import Change, Fault, Micro, Program, Reduction, Setup, Share, Step, tidy

MOST_STEPS = 5

micros = st.builds(
    Micro,
    rows=st.integers(1, 3),
    layers=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    checkpoint=st.sampled_from(["", "", "plain", "reentrant"]),
    backwards=st.sampled_from([1, 1, 1, 2]),
    weight=st.sampled_from([1, 2, 0, 3.5]),
    nan=st.sampled_from([False] * 7 + [True]),
)

setups = st.builds(
    Setup,
    models=st.sampled_from([1, 1, 2]),
    door=st.sampled_from(["replicate", "replicate", "ddp"]),
    bucket_mb=st.sampled_from([25.0, 1e-5, 6e-5]),
    hook=st.sampled_from(["average", "average", "float64"]),
    deterministic=st.sampled_from([False, False, True]),
    check_finite=st.sampled_from(["", "", "raise", "skip"]),
    audit=st.sampled_from([0, 0, 1, 2]),
    buffers=st.sampled_from([False, False, True]),
    optimizer=st.sampled_from(["sgd", "momentum", "adam"]),
)

faults = st.builds(
    Fault, where=st.sampled_from(["forward", "early", "late", "loop"]), micro=st.integers(0, 2)
)

shares = st.builds(
    Share,
    way=st.sampled_from(["plain", "plain", "accumulate", "skip"]),
    micros=st.one_of(st.lists(micros, min_size=1, max_size=1), st.lists(micros, max_size=3)).map(tuple),
    room=st.integers(0, 2),
    reverse=st.booleans(),
)

changes = st.builds(
    Change,
    what=st.sampled_from(["freeze", "freeze", "unfreeze", "unfreeze", "add", "remove"]),
    model=st.integers(0, 1),
    layer=st.integers(0, 4),
)


@st.composite
def reductions(draw: st.DrawFn, most_ranks: int) -> Reduction:
    """Draw one meeting. In one of eight or so, some ranks raise."""
    drawn = draw(st.lists(shares, min_size=most_ranks, max_size=most_ranks))
    if draw(st.sampled_from([False] * 7 + [True])):
        failing = draw(st.sets(st.integers(0, most_ranks - 1), min_size=1, max_size=2))
        for rank in sorted(failing):
            drawn[rank] = replace(drawn[rank], fault=draw(faults))
    return Reduction(
        tuple(drawn),
        model=draw(st.integers(0, 1)),
        weighted=draw(st.sampled_from([False, False, True])),
        batch=draw(st.booleans()),
        again=draw(st.sampled_from([False] * 4 + [True])),
    )


def steps(most_ranks: int) -> st.SearchStrategy[Step]:
    """Draw one step."""
    return st.builds(
        Step,
        reductions=st.lists(reductions(most_ranks), min_size=1, max_size=3).map(tuple),
        changes=st.one_of(st.just(()), st.lists(changes, max_size=2).map(tuple)),
        zero=st.sampled_from(["none", "none", "zeros", "keep"]),
        forwards_first=st.booleans(),
        clip=st.sampled_from([0.0, 0.0, 0.3]),
        clip_by=st.sampled_from(["paceline", "torch"]),
    )


WRONGS = [
    "does not step",
    "alone has weights",
    "steps on unsynced",
    "other order",
    "changed alone",
    "one more",
    "astray",
]


@st.composite
def programs(draw: st.DrawFn, most_ranks: int = 4) -> Program:
    """Draw a program for 2 ranks or more. Every fourth or so goes wrong at its end."""
    # Always drawn for the most ranks, so that taking ranks away leaves the others as they are.
    return tidy(
        Program(
            draw(st.integers(2, most_ranks)),
            draw(setups),
            tuple(draw(st.lists(steps(most_ranks), min_size=1, max_size=MOST_STEPS))),
            wrong=draw(st.sampled_from([None] * 20 + WRONGS)),
            culprit=draw(st.integers(0, most_ranks - 1)),
            seed=draw(st.integers(0, 99)),
        )
    )
