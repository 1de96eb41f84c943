"""Ranks that keep others waiting: who is told what, when it is given up, and deadlocks that are found."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline import abandoned
from paceline.comm import GroupComm, comm_over
from paceline.control import GroupControl
from paceline.control.deadlock import Canary, deadlock, describe, is_sound
from paceline.errors import PeerLost, PeerTimeout, RanksDisagree
from paceline.reporter import Desk, reporter
from paceline.reports import Page, Report, SharedReports, Wait
from paceline.testing import ranks
from paceline.waiting import Patience, View, Waiting
from tests.listening import listening

SHORT = {"stall_seconds": 0.3}


def ones(rank: int) -> torch.Tensor:
    return torch.full((1, 4), rank + 1.0)


def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Told:
    """Files by which ranks of a test tell each other that something has happened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tell(self, what: str) -> None:
        (self._folder / what).touch()

    def wait(self, what: str) -> None:
        until((self._folder / what).exists)


def hear_of_a_slow_rank(
    rank: int, tmp_path: Path, slow: Callable[[nn.Module, Callable[[], None]], None], words: str
) -> list[str]:
    """Keep rank 0 waiting while rank 1 does something slow, until rank 0 has said so; return its lines."""
    model, told = paceline.replicate(nn.Linear(4, 4), **SHORT), Told(tmp_path)
    with listening() as lines:
        if rank == 1:
            slow(model, lambda: told.wait("said"))
        else:
            # Rank 1 may be on its way to the slow thing when the first line comes.
            tell_when_said(words, lines, told)
        model(ones(rank)).sum().backward()
    assert (model.weight.grad == 1.5).all()
    return lines


def tell_when_said(words: str, lines: list[str], told: Told) -> None:
    def watch() -> None:
        until(lambda: any(words in line for line in lines))
        told.tell("said")

    threading.Thread(target=watch, daemon=True).start()


@ranks(2)
def test_a_slow_loader_is_named_with_its_line(rank: int, tmp_path: Path) -> None:
    def slow(_model: nn.Module, wait: Callable[[], None]) -> None:
        def collate(batch: list[int]) -> list[int]:
            wait()
            return batch

        next(iter(DataLoader([1, 2], collate_fn=collate)))

    lines = hear_of_a_slow_rank(rank, tmp_path, slow, "loading data, test_stalls.py:")

    if rank == 0:
        assert lines[-1].startswith("paceline: rank 0 has waited ")
        assert "in step 0 of Linear #1 for bucket 1 of 1 (bias, weight): rank 0 is here" in lines[-1]
        assert "rank 1 is missing: loading data, test_stalls.py:" in lines[-1]
        assert " in until (0." in lines[-1]
    else:
        assert lines == []


class Slow(nn.Module):
    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._wait()
        return x


@ranks(2)
@pytest.mark.parametrize("training", [True, False], ids=["forward", "evaluating"])
def test_a_slow_forward_is_told_from_an_evaluation(rank: int, tmp_path: Path, training: bool) -> None:
    def slow(_model: nn.Module, wait: Callable[[], None]) -> None:
        nn.Sequential(Slow(wait)).train(training)(ones(rank))

    phase = "forward" if training else "evaluating"
    lines = hear_of_a_slow_rank(rank, tmp_path, slow, f"{phase}, test_stalls.py:")

    assert rank == 1 or f"rank 1 is missing: {phase}, test_stalls.py:" in lines[-1]


@ranks(2)
def test_a_slow_compilation_is_named(rank: int, tmp_path: Path) -> None:
    def slow(_model: nn.Module, wait: Callable[[], None]) -> None:
        def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
            wait()
            return graph.forward

        torch.compile(lambda x: x + 1, backend=backend)(ones(rank))

    lines = hear_of_a_slow_rank(rank, tmp_path, slow, "compiling, test_stalls.py:")

    assert rank == 1 or "rank 1 is busy: compiling, test_stalls.py:" in lines[-1]


class Unhurried:
    """Takes its time to be saved."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        self._wait = wait

    def __getstate__(self) -> dict[str, object]:
        assert self._wait is not None
        self._wait()
        return {"_wait": None}


@ranks(2)
def test_slow_saving_is_named(rank: int, tmp_path: Path) -> None:
    def slow(_model: nn.Module, wait: Callable[[], None]) -> None:
        torch.save(Unhurried(wait), tmp_path / "saved")

    lines = hear_of_a_slow_rank(rank, tmp_path, slow, "saving, test_stalls.py:")

    assert rank == 1 or "rank 1 is missing: saving, test_stalls.py:" in lines[-1]


@ranks(2)
def test_a_slow_optimizer_is_named(rank: int, tmp_path: Path) -> None:
    def slow(_model: nn.Module, wait: Callable[[], None]) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        optimizer.register_step_pre_hook(lambda *_: wait())
        optimizer.step()

    lines = hear_of_a_slow_rank(rank, tmp_path, slow, "optimizer, test_stalls.py:")

    assert rank == 1 or "rank 1 is missing: optimizer, test_stalls.py:" in lines[-1]


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.wait()
        return gradient, None


@ranks(2)
def test_a_backward_that_is_half_way_says_so(rank: int, tmp_path: Path) -> None:
    told = Told(tmp_path)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    model = paceline.replicate(nn.Sequential(first, second), bucket_mb=1e-5, first_bucket_mb=1e-5, **SHORT)
    with listening() as lines:
        hidden = first(ones(rank))
        if rank == 1:
            hidden = SlowBackward.apply(hidden, lambda: told.wait("said"))
        else:
            tell_when_said("backward bucket", lines, told)
        second(hidden).sum().backward()

    assert model[0].weight.grad is not None
    if rank == 0:
        assert "for the end of backward, with 4 of 4 buckets sent" in lines[-1]
        assert "rank 1 is missing: backward bucket 3 of 4, test_stalls.py:" in lines[-1]


@ranks(3)
def test_those_who_are_here_are_told_from_those_who_are_not(rank: int, tmp_path: Path) -> None:
    model, told = paceline.replicate(nn.Linear(4, 4), **SHORT), Told(tmp_path)
    with listening() as lines:
        if rank == 2:
            told.wait("said0")
            told.wait("said1")
        else:
            heard = lambda: until(lambda: "ranks 0, 1 are here; rank 2 is missing" in "".join(lines))  # noqa: E731
            threading.Thread(target=lambda: (heard(), told.tell(f"said{rank}"))).start()
        model(ones(rank)).sum().backward()

    assert (model.weight.grad == 2).all()
    assert all(line.startswith(f"paceline: rank {rank} has waited") for line in lines)


@ranks(2)
def test_nothing_is_said_within_the_threshold(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 4), stall_seconds=30)
    with listening() as lines:
        if rank == 1:
            time.sleep(1.2)
        model(ones(rank)).sum().backward()

    assert lines == []


@ranks(2)
def test_over_several_machines_reports_come_through_the_store(rank: int, tmp_path: Path) -> None:
    control, told = GroupControl(GroupComm(dist.group.WORLD)), Told(tmp_path)
    reporter.add(control.desk)
    with listening() as lines, reporter.busy("making tea" if rank else "waiting for tea"):
        if rank == 1:
            told.wait("said")
        else:
            tell_when_said("rank 1 is busy: making tea, test_stalls.py:", lines, told)
        control.post(b"t", b"frame")
        control.collect(b"t", 60, Brief())

    assert rank == 1 or lines[-1].startswith("paceline: rank 0 has waited ")


class Brief:
    """Waits, but not for long without a word."""

    stall_seconds = 0.3

    def waits_for(self, topic: bytes) -> str:
        return f"for {topic!r}"


@ranks(2)
def test_the_time_runs_out_over_several_machines(rank: int, tmp_path: Path) -> None:
    control = GroupControl(GroupComm(dist.group.WORLD))

    def step() -> None:
        control.post(b"t", b"frame")
        control.collect(b"t", 0.5)

    ran = run_out(rank, tmp_path, step)

    if rank == 0:
        assert ran[1].startswith("rank 0 has waited 0.")


# ---- ranks that are stopped or killed ---------------------------------------------------------------


@ranks(2)
def test_a_stopped_rank_is_said_not_to_answer_and_goes_on(rank: int, tmp_path: Path) -> None:
    model, told = paceline.replicate(nn.Linear(4, 4), **SHORT), Told(tmp_path)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    with listening() as lines:
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)

            def wake() -> None:
                until(lambda: any("stopped answering" in line for line in lines))
                os.kill(pids[1], signal.SIGCONT)
                told.tell("awake")

            threading.Thread(target=wake).start()
        else:
            told.wait("awake")
        model(ones(rank)).sum().backward()

    assert (model.weight.grad == 1.5).all()
    if rank == 0:
        assert "rank 1 is missing: stopped answering " in lines[-1]
        assert "ago, last seen: " in lines[-1]


@ranks(3)
def test_a_killed_rank_is_named_while_another_one_is_waited_for(rank: int, tmp_path: Path) -> None:
    model, told = paceline.replicate(nn.Linear(4, 4), stall_seconds=30), Told(tmp_path)
    if rank == 2:
        for link in paceline.replica(model).reducer.wiring.control._links.values():
            link.close()
        told.tell("dead")
        told.wait("seen")
        return
    if rank == 1:
        told.wait("seen")
        return
    told.wait("dead")
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        model(ones(rank)).sum().backward()
    told.tell("seen")


# ---- the time is over -------------------------------------------------------------------------------


def run_out(rank: int, tmp_path: Path, step: Callable[[], None]) -> list[str]:
    """Let rank 0's time run out in a step that rank 1 does not take part in; return what was run."""
    told, ran = Told(tmp_path), []
    if rank == 1:
        told.wait("over")
        return []
    try:
        with pytest.raises(PeerTimeout) as caught:
            try:
                step()
            finally:
                ran.append("finally")
        assert caught.value.rank in (1, -1)
        ran.append(str(caught.value))
    finally:
        told.tell("over")
    return ran


@ranks(2)
def test_the_time_runs_out_in_the_opening(rank: int, tmp_path: Path) -> None:
    model = paceline.replicate(nn.Linear(4, 4), timeout_seconds=1.5)

    ran = run_out(rank, tmp_path, lambda: model(ones(rank)).sum().backward())

    if rank == 0:
        assert ran[0] == "finally"
        assert "in step 0 of Linear #1 for bucket 1 of 1 (bias, weight): rank 0 is here" in ran[1]
        assert "rank 1 is missing: its own code, test_stalls.py:" in ran[1]
        assert model.weight.grad is None
        with pytest.raises(PeerLost, match="no reduction is possible any more: rank 0 has waited"):
            model(ones(rank)).sum().backward()


@ranks(2)
def test_the_time_runs_out_in_the_closing(rank: int, tmp_path: Path) -> None:
    model, told = paceline.replicate(nn.Linear(4, 4), timeout_seconds=0.5), Told(tmp_path)
    if rank == 1:
        hidden = SlowBackward.apply(ones(rank).requires_grad_(), lambda: told.wait("over"))
        with pytest.raises(PeerLost):
            (model(ones(rank)).sum() * hidden.sum()).backward()
            model(ones(rank)).sum().backward()
        return

    with pytest.raises(PeerTimeout, match="for the end of backward, with 1 of 1 buckets sent"):
        model(ones(rank)).sum().backward()
    told.tell("over")
    for link in paceline.replica(model).reducer.wiring.control._links.values():
        link.close()


@ranks(2)
def test_the_time_runs_out_inside_gloo(rank: int, tmp_path: Path) -> None:
    paceline.replicate(nn.Linear(4, 4))
    comm = comm_over(None)
    comm.set_patience(0.5, 30)

    ran = run_out(rank, tmp_path, lambda: comm.total(torch.ones(8)).wait())

    if rank == 0:
        assert ran[0] == "finally"
        assert "for a collective with the other ranks" in ran[1]


@ranks(2)
def test_the_time_runs_out_while_buckets_land(rank: int, tmp_path: Path) -> None:
    from paceline.comm import Comm, Pending
    from paceline.hooks import GradBucket, surely

    @surely
    def hook(bucket: GradBucket, comm: Comm) -> Pending:
        return Pending(bucket.flat) if comm.rank == 1 else comm.average(bucket.flat)

    model, told = paceline.replicate(nn.Linear(4, 4), timeout_seconds=1), Told(tmp_path)

    def step() -> None:
        model.zero_grad()
        model(ones(rank)).sum().backward()

    step()
    paceline.replica(model).set_hook(hook)
    if rank == 1:
        step()
    ran = run_out(rank, tmp_path, step)

    told.tell(f"{rank} is through")
    told.wait(f"{1 - rank} is through")
    if rank == 0:
        assert "in step 1 of Linear #1 for 1 buckets that are on their way" in ran[1]
        assert model.weight.grad is None


@ranks(2)
def test_links_are_cut_if_a_collective_was_given_up(rank: int, tmp_path: Path) -> None:
    comm, told = comm_over(None), Told(tmp_path)
    comm.set_patience(0.3, 30)
    if rank == 1:
        told.wait("cut")
        return
    pending = comm.total(torch.ones(8))
    work = pending._work
    with pytest.raises(PeerTimeout):
        pending.wait()
    assert not work.is_completed()

    abandoned.cut_links()

    until(work.is_completed)  # not after the half hour that the group's own timeout is
    told.tell("cut")


# ---- busy -------------------------------------------------------------------------------------------


@ranks(2)
def test_busy_stops_the_clock_for_the_others(rank: int, tmp_path: Path) -> None:
    model = paceline.replicate(nn.Linear(4, 4), timeout_seconds=1, **SHORT)
    told = Told(tmp_path)
    with listening() as lines:
        if rank == 1:
            with paceline.busy(model, "making tea"), paceline.replica(model).busy("evaluating"):
                told.tell("busy")
                time.sleep(2.5)  # longer than the others wait for who is not busy
        else:
            told.wait("busy")
        model(ones(rank)).sum().backward()

    assert (model.weight.grad == 1.5).all()
    if rank == 0:
        assert "rank 1 is busy: evaluating, test_stalls.py:" in lines[0]
        assert lines[0].endswith("; the clock stands still meanwhile")


@ranks(2)
def test_a_compilation_stops_the_clock_for_the_others(rank: int, tmp_path: Path) -> None:
    model = paceline.replicate(nn.Linear(4, 4), timeout_seconds=1, **SHORT)
    told = Told(tmp_path)

    def slow_backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        told.tell("compiling")
        time.sleep(2.5)  # longer than the others wait for who does not compile
        return graph.forward

    forward = torch.compile(model, backend=slow_backend) if rank else model
    with listening() as lines:
        if rank == 0:
            told.wait("compiling")
        forward(ones(rank)).sum().backward()

    assert (model.weight.grad == 1.5).all()
    if rank == 0:
        [line] = [line for line in lines if "rank 1 is busy: compiling, test_stalls.py:" in line]
        assert line.endswith("; the clock stands still meanwhile")


@ranks(2)
def test_an_exception_inside_busy_ends_it(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 4))
    desk = paceline.replica(model).reducer.wiring.control.desk

    with pytest.raises(KeyError), paceline.busy(model, "evaluating"):
        dist.barrier()
        assert desk.reports.read()[1 - rank].busy == "evaluating"
        dist.barrier()
        raise KeyError
    dist.barrier()

    assert desk.reports.read()[1 - rank].busy == ""


@ranks(2)
def test_a_busy_rank_that_dies_is_lost_at_once(rank: int, tmp_path: Path) -> None:
    model, told = paceline.replicate(nn.Linear(4, 4)), Told(tmp_path)
    if rank == 1:
        with paceline.busy(model, "evaluating"):
            for link in paceline.replica(model).reducer.wiring.control._links.values():
                link.close()
            told.wait("seen")
        return
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        model(ones(rank)).sum().backward()
    told.tell("seen")


@pytest.mark.parametrize("what", ["", "  ", None, 3])
def test_busy_wants_words(what: object) -> None:
    model = paceline.replicate(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="busy\\(\\) takes a few words"):
        paceline.busy(model, what)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["stall_seconds", "timeout_seconds"])
@pytest.mark.parametrize(("seconds", "kind"), [(0, ValueError), (-1, ValueError), ("1", TypeError)])
def test_odd_numbers_of_seconds_are_refused(name: str, seconds: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"{name} has to be "):
        paceline.replicate(nn.Linear(4, 4), **{name: seconds})
    with pytest.raises(kind, match=f"{name} has to be "):
        paceline.DistributedDataParallel(nn.Linear(4, 4), **{name: seconds})


@ranks(2)
def test_the_time_runs_out_for_a_wrapper_too(rank: int, tmp_path: Path) -> None:
    model = paceline.DistributedDataParallel(nn.Linear(4, 4), stall_seconds=0.3, timeout_seconds=1.5)

    with listening() as lines:
        ran = run_out(rank, tmp_path, lambda: model(ones(rank)).sum().backward())

    if rank == 0:
        assert ran[0] == "finally"
        assert "in step 0 of Linear #1 for bucket 1 of 1 (bias, weight): rank 0 is here" in ran[1]
        assert lines[0].startswith("paceline: rank 0 has waited 0.")


# ---- ranks that wait for each other -----------------------------------------------------------------


def goes_on(rank: int, *models: nn.Module) -> None:
    for model in models:
        model.zero_grad()
        model(ones(rank)).sum().backward()
        assert (model.weight.grad == 1.5).all()


@ranks(2)
def test_two_models_in_different_orders_raise_everywhere_and_training_goes_on(rank: int) -> None:
    a, b = (paceline.replicate(nn.Linear(4, 4), timeout_seconds=30) for _ in range(2))
    goes_on(rank, a, b)
    texts: list[str] = ["", ""]
    for _ in range(2):
        for model in (a, b):
            model.zero_grad()
        with pytest.raises(RanksDisagree, match="the ranks wait for each other") as caught:
            (a if rank == 0 else b)(ones(rank)).sum().backward()

        dist.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1]
        assert "rank 0 waits in step " in texts[0]
        assert " of Linear #1 for bucket 1 of 1" in texts[0]
        assert "; rank 1 waits in step " in texts[0]
        assert " of Linear #2 for bucket 1 of 1" in texts[0]
        assert a.weight.grad is None
        assert b.weight.grad is None
        goes_on(rank, a, b)


@ranks(3)
def test_those_who_wait_at_the_same_place_are_named_together(rank: int) -> None:
    a, b = (paceline.replicate(nn.Linear(4, 4), timeout_seconds=30) for _ in range(2))

    with pytest.raises(RanksDisagree, match="rank 0 waits in .* #1 for .*; ranks 1, 2 wait in .* #2 for "):
        (a if rank == 0 else b)(ones(rank)).sum().backward()

    for model in (a, b):
        model(ones(rank)).sum().backward()
        assert (model.weight.grad == 2).all()


@ranks(2)
def test_a_deadlock_inside_join_is_told_to_nobody_twice(rank: int) -> None:
    a, b = (paceline.replicate(nn.Linear(4, 4), timeout_seconds=30) for _ in range(2))

    with pytest.raises(RanksDisagree, match="the ranks wait for each other"), paceline.join(a, b):
        (a if rank == 0 else b)(ones(rank)).sum().backward()

    goes_on(rank, a, b)


@ranks(2)
def test_a_backward_and_a_sync_of_buffers_are_told_apart(rank: int) -> None:
    model = paceline.replicate(nn.BatchNorm1d(4), timeout_seconds=30)
    inputs = torch.randn(3, 4)

    with pytest.raises(RanksDisagree, match="rank 1 waits before step 0 of BatchNorm1d #1 for an exchange"):
        if rank == 0:
            model(inputs).sum().backward()
        else:
            model(inputs)
            paceline.replica(model).sync_buffers()

    model(inputs).sum().backward()
    assert model.weight.grad is not None


def wait_at(topic: str, missing: list[int], posts: int, heard: list[int], **other: object) -> Wait:
    return Wait(1, 0, topic, f"at {topic}", missing, posts, heard, **other)  # type: ignore[arg-type]


def test_ranks_that_have_sent_what_is_waited_for_are_no_deadlock() -> None:
    stuck = [wait_at("a", [1], 3, [3, 2]), wait_at("b", [0], 2, [3, 2])]
    assert deadlock(stuck) == stuck
    assert deadlock([stuck[0], wait_at("b", [0], 2, [2, 2])]) is None  # a frame is on its way to rank 1
    assert deadlock([stuck[0], None]) is None
    assert deadlock([stuck[0], wait_at("b", [], 2, [3, 2])]) is None
    assert deadlock([stuck[0], wait_at("b", [0], 2, [3, 2], is_sure=False)]) is None

    canary = Canary()
    assert [canary.look(stuck, {1: 0.5}), canary.look(stuck, {1: 1.0})] == [False, True]
    assert not canary.look([wait_at("c", [1], 4, [4, 3]), wait_at("b", [0], 3, [4, 3])], {1: 1.5})


def test_an_old_report_makes_no_deadlock() -> None:
    other = wait_at("b", [0], 2, [3, 2, 2])
    stuck, canary = [wait_at("a", [1, 2], 3, [3, 2, 2]), other, other], Canary()

    # Rank 2 may have been interrupted since: it has to say again that it waits, as rank 1 does.
    assert not canary.look(stuck, {1: 0.5, 2: 0.5})
    assert not canary.look(stuck, {1: 1.0, 2: 0.5})
    assert not canary.look(stuck, {1: 1.5, 2: 0.5})
    assert canary.look(stuck, {1: 1.5, 2: 2.0})


def test_ranks_that_have_sent_different_buckets_cannot_go_on() -> None:
    waits = [wait_at("a", [1], 1, [1, 1], trace=5), wait_at("b", [0], 1, [1, 1], trace=6)]

    assert not is_sound(waits)
    assert describe(waits).endswith("nothing can be reduced over this group any more.")
    assert "rank 0 waits at a; rank 1 waits at b." in describe(waits)


# ---- reports ----------------------------------------------------------------------------------------


@ranks(2)
def test_the_thread_that_reports_does_not_outlive_a_fork(rank: int) -> None:
    paceline.replicate(nn.Linear(4, 4))
    assert reporter._thread is not None

    child = os.fork()
    if child == 0:
        os._exit(0 if reporter._thread is None and not reporter._desks else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_thread_that_reports_ends_with_the_last_group() -> None:
    file = os.memfd_create("test")
    desk = Desk(SharedReports(Page(file, 1), {}))
    reporter.add(desk)
    thread = reporter._thread
    assert thread is not None
    assert thread.daemon

    del desk

    until(lambda: not thread.is_alive())
    os.close(file)


def test_a_torn_report_is_not_read() -> None:
    file = os.memfd_create("test")
    mine, theirs = Page(file, 2), Page(file, 2)
    assert theirs.read() is None
    report = Report(1.5, "forward", "train.py:3 in main", "", wait_at("a", [1], 1, [1, 0]))
    mine.write(report.pack())
    assert Report.unpack(theirs.read() or b"") == report

    mine._memory[20] ^= 1

    assert theirs.read() is None
    os.close(file)


def test_a_line_is_said_again_when_somebody_comes_or_after_a_minute() -> None:
    def view(missing: list[int], phase: str) -> View:
        return View(0, 3, "for t", missing, {rank: Report(0.0, phase) for rank in missing}, {})

    waiting = Waiting(Patience(0, 3, 1800.0), "for t", lambda _: [1, 2])

    assert waiting._is_news(view([1, 2], "forward"), 100.0)
    assert not waiting._is_news(view([1, 2], "forward"), 100.5)
    assert not waiting._is_news(view([1, 2], "optimizer"), 101.5)
    assert waiting._is_news(view([2], "forward"), 102.0)
    assert waiting._is_news(view([2], "optimizer"), 112.5)
    assert not waiting._is_news(view([2], "optimizer"), 130.0)
    assert waiting._is_news(view([2], "optimizer"), 172.6)


def test_at_most_five_missing_ranks_are_described() -> None:
    view = View(0, 9, "for t", list(range(1, 9)), {}, {})

    assert view.line(12.3).startswith("rank 0 has waited 12 s for t: rank 0 is here; rank 1 is missing and")
    assert view.line(12.3).endswith("; 3 more are missing")
