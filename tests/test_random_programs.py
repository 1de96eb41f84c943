"""Random training programs on ranks that are threads, against one process. ``make soak`` runs many more."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.soak import program as program_module
from tests.soak.interpreter import Entry
from tests.soak.on_processes import Pool
from tests.soak.on_threads import run_on_threads
from tests.soak.program import Change, Fault, Micro, Program, Reduction, Setup, Share, Step, tidy
from tests.soak.reference import WRONG, Figures, Mismatch, judge
from tests.soak.strategies import programs

BRIEFLY = settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # on a failure, `make soak` makes it shorter
    suppress_health_check=list(HealthCheck),
)
TWICE = Step((Reduction((Share(), Share())),))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(400)
@BRIEFLY
@given(programs())
def test_random_programs_train_as_one_process_or_raise_everywhere(program: Program) -> None:
    seen = run_on_threads(program)
    try:
        judge(program, seen)
    except Mismatch as error:
        pytest.fail(f"{program}\n\n{program!r}\n\n{error}")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_one_rank_does_wrong_is_raised_on_every_rank(wrong: str, size: int) -> None:
    step = Step((Reduction((Share(),) * size),))
    for culprit in range(size):
        program = tidy(Program(size, Setup(models=2, audit=1), (step, step), wrong, culprit))
        assert program.wrong == wrong
        judge(program, run_on_threads(program))


# What the soak has found.
ADD = Change("add")
LOCAL = Share(micros=(Micro(), Micro()))
ALL = Share(micros=(Micro(layers=(2, 1, 0)),))
LATE = Share(micros=(Micro(layers=(0, 1, 2, 0), checkpoint="reentrant"),))
START = Step((Reduction((ALL, ALL)),))
FOUND = {
    "a layer is added, and a rank skips": [Step((Reduction((Share(), Share("skip"))),), (ADD,))],
    "a layer is added, and a rank has no micro-batch": [
        Step((Reduction((Share(), Share("accumulate", ()))),), (ADD,))
    ],
    "a layer is added while a rank raises": [
        Step((Reduction((Share(), Share(fault=Fault("loop"))), batch=True),), (ADD,)),
        TWICE,
    ],
    "a layer is added, then a local backward raises inside batch()": [
        Step(
            (Reduction((Share(micros=(Micro(backwards=2),), fault=Fault("early")), Share()), batch=True),),
            (ADD,),
        ),
        TWICE,
    ],
    "a layer of one model is added, and a rank skips the other": [
        Step((Reduction((Share(), Share("skip")), 1), Reduction((Share(), Share()))), (ADD,))
    ],
    "a layer is added in the middle of weighted micro-batches": [
        Step((Reduction((Share(), LOCAL), weighted=True),), (replace(ADD, alike=True),))
    ],
    "gradients come late": [Step((Reduction((LATE, LATE)),))],
}


def with_a_third_rank(step: Step) -> Step:
    reductions = (replace(r, shares=(*r.shares, Share())) for r in step.reductions)
    return replace(step, reductions=tuple(reductions))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_right_now(name: str, deterministic: bool) -> None:
    setup = Setup(models=2, bucket_mb=1e-5, deterministic=deterministic)
    steps = (START, START, *FOUND[name], TWICE)
    program = tidy(Program(3, setup, tuple(with_a_third_rank(step) for step in steps)))
    judge(program, run_on_threads(program))


def test_programs_run_on_processes_too() -> None:
    boom = Reduction((Share(), Share(fault=Fault("late"))))
    steps = (TWICE, Step((boom,)), TWICE)
    figures = Figures()
    with Pool(2) as pool:
        for program in (Program(2, Setup(), steps), Program(2, Setup(models=2), steps, "other order", 1)):
            judge(program, pool.run(program), figures)
        assert pool.starts == 1
    assert str(figures) == "2 programs, 7 steps, 3 raised as promised"


# ---- the proof itself has to be able to fail ---------------------------------------------------------------


def changed(seen: list[list[Entry]], rank: int, what: str) -> list[list[Entry]]:
    tensors = getattr(seen[rank][0], what)
    name = next(name for name, tensor in tensors.items() if tensor is not None)
    tensors[name] = tensors[name] + 1e-3
    return seen


@pytest.mark.parametrize(
    ("what", "ranks", "words"),
    [
        ("gradients", [1], "gradient 0.trunk.weight is not the same on ranks 0 and 1"),
        ("weights", [1], "weight 0.trunk.weight is not the same on ranks 0 and 1"),
        ("gradients", [0, 1], "but in one process"),
        ("weights", [0, 1], "is not what it is in one process"),
    ],
)
def test_gradients_and_weights_that_are_off_are_found(what: str, ranks: list[int], words: str) -> None:
    program = Program(2, Setup(), (TWICE,))
    seen = run_on_threads(program)
    for rank in ranks:
        changed(seen, rank, what)
    with pytest.raises(Mismatch, match=words):
        judge(program, seen)


def test_an_exception_that_stays_on_one_rank_is_found() -> None:
    program = Program(2, Setup(), (Step((Reduction((Share(), Share(fault=Fault()))),)),))
    seen = run_on_threads(program)
    judge(program, seen)
    seen[0][0] = run_on_threads(Program(2, Setup(), (TWICE,)))[0][0]
    with pytest.raises(Mismatch, match="PeerFailed .* was to be raised"):
        judge(program, seen)


@settings(BRIEFLY, max_examples=40)
@given(programs())
def test_a_program_that_is_printed_can_be_run_again(program: Program) -> None:
    assert eval(repr(program), vars(program_module)) == program
    assert str(program).startswith(f"{program.ranks} ranks, {program.setup.door}")
    assert tidy(program) == program
