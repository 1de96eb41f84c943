"""What the others hear when one rank raises outside of a backward, or ends early."""

import atexit
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing import ranks
from tests.promises.libraries import Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, small_model


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            raise ValueError("boom in the forward")
        return self.inner(x)


def assert_trains(wrapped: nn.Module, bare: nn.Module) -> None:
    expected = reference(bare, lambda m: loss_of(m, batch()).backward())
    wrapped.zero_grad()
    loss_of(wrapped, share(batch())).backward()
    assert verdict(wrapped, expected) == EQUAL


@on_both
@pytest.mark.parametrize("failing", [0, 1])
@ranks(3)
def test_an_exception_in_forward_reaches_the_others_and_training_goes_on(
    library: Library, failing: int, rank: int
) -> None:
    model = Fragile()
    wrapped = library.wrap(model)
    assert_trains(wrapped, model)
    model.breaks = rank == failing
    with pytest.raises(
        ValueError if rank == failing else paceline.PeerFailed, match="boom in the forward"
    ) as own:
        loss_of(wrapped, share(batch())).backward()
    model.breaks = False
    if rank != failing:
        assert (own.value.rank, own.value.type) == (failing, "ValueError")
        assert own.value.text == "ValueError: boom in the forward"
        assert f"step 1: rank {failing} raised in its forward: ValueError: boom" in str(own.value)
    assert_trains(wrapped, model)


@ranks(2)
def test_all_ranks_may_fail_in_forward_at_once(rank: int) -> None:
    model = paceline.replicate(Fragile())
    model.breaks = True
    with pytest.raises(ValueError, match="boom in the forward"):
        model(batch())
    model.breaks = False
    assert_trains(model, model)


@pytest.mark.parametrize("how", ["eval", "no_grad", "no_sync"])
@ranks(2)
def test_a_forward_that_no_backward_follows_may_fail_on_one_rank_alone(how: str, rank: int) -> None:
    model = paceline.replicate(Fragile())
    if rank:
        model.breaks = True
        model.train(how != "eval")
        with torch.set_grad_enabled(how != "no_grad"), paceline.no_sync(model, how == "no_sync"):
            with pytest.raises(ValueError, match="boom"):
                model(batch())
        model.breaks = False
        model.train()
    assert_trains(model, model)


@ranks(2)
def test_a_forward_that_is_run_while_an_exception_is_handled_has_not_failed(rank: int) -> None:
    model = paceline.replicate(Fragile())
    try:
        raise KeyError("handled")
    except KeyError:
        loss = loss_of(model, share(batch()))
    loss.backward()
    assert paceline.replica(model).step == 1


@ranks(2)
def test_batch_tells_the_others_of_an_exception_in_the_loop(rank: int) -> None:
    model = paceline.replicate(small_model())
    with pytest.raises(OSError if rank else paceline.PeerFailed, match="disk is gone") as caught:
        with paceline.batch(model):
            if rank:
                raise OSError("the disk is gone")
            loss_of(model, share(batch())).backward()
    if not rank:
        assert "step 0: rank 1 raised in its loop: OSError: the disk is gone" in str(caught.value)
    assert_trains(model, model)


@ranks(2)
def test_batch_does_not_end_without_a_reduced_backward(rank: int) -> None:
    model = paceline.replicate(small_model())
    with pytest.raises(RuntimeError if rank else paceline.PeerFailed, match="batch.. has ended without"):
        with paceline.batch(model):
            if not rank:
                loss_of(model, share(batch())).backward()
    with paceline.batch(model):
        if rank:
            paceline.skip(model)
        else:
            loss_of(model, share(batch())).backward()
    with paceline.no_sync(model), paceline.batch(model):
        pass


@ranks(2)
def test_an_exception_after_the_backward_is_this_ranks_own(rank: int) -> None:
    model = paceline.replicate(small_model())
    try:
        with paceline.batch(model):
            loss_of(model, share(batch())).backward()
            if rank:
                raise ValueError("after the backward")
    except ValueError:
        pass
    assert_trains(model, model)


@ranks(2)
def test_a_rank_that_ends_early_is_named_with_its_steps(rank: int) -> None:
    model = paceline.replicate(small_model())
    for _ in range(3 - rank):
        if rank == 0 and paceline.replica(model).step == 2:
            with pytest.raises(paceline.RanksDisagree, match="rank 1 ended after 2"):
                loss_of(model, share(batch())).backward()
        else:
            loss_of(model, share(batch())).backward()
    if rank:
        from paceline.farewell import say_goodbye

        say_goodbye()
    dist.barrier()


@ranks(2)
def test_optimizer_steps_on_one_rank_only_are_found_out(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, share(batch())).backward()
    if rank:
        optimizer.step()
    with pytest.raises(paceline.RanksDisagree) as caught:
        loss_of(model, share(batch())).backward()
    assert "different numbers of optimizer steps" in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1


SCRIPT = """
import sys, torch, paceline
with paceline.world() as world:
    model = {model}
    for step in range(4):
        if world.rank == 1 and step == 2:
            {fault}
        model(torch.randn(2, 3)).sum().backward()
"""


REPLICA = "paceline.replicate(torch.nn.Linear(3, 3))"
WRAPPED = (
    "paceline.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))"
)


def run_script(folder: Path, fault: str, model: str = REPLICA) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(fault=fault, model=model))
    command = [sys.executable, "-m", "paceline", "run", "-n", "3", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def test_an_exception_that_nobody_catches_reaches_the_others(tmp_path: Path) -> None:
    done = run_script(tmp_path, "raise KeyError('nobody catches this')")
    words = done.stdout + done.stderr
    assert done.returncode != 0
    for rank in (0, 2):
        lines = [line for line in words.splitlines() if f"[{rank}]" in line or f"rank {rank}" in line]
        assert any("PeerFailed" in line for line in lines), words
    assert words.count("step 2: rank 1 raised in its loop: KeyError: 'nobody catches this'") >= 2


@pytest.mark.parametrize("model", [REPLICA, WRAPPED], ids=["plain", "buffers before forward"])
def test_a_rank_that_leaves_its_loop_is_named(tmp_path: Path, model: str) -> None:
    done = run_script(tmp_path, "break", model)
    words = done.stdout + done.stderr
    assert done.returncode != 0
    assert words.count("RanksDisagree") >= 2
    assert "the ranks run different numbers of reduced backwards: rank 1 ended after 2" in words


CHILDREN = """
import multiprocessing, os, sys, torch, paceline
import torch.distributed as dist
import torch.multiprocessing

def work(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = paceline.replicate(torch.nn.Linear(3, 3))
    for step in range(3):
        if rank == 1 and step == 2:
            raise KeyError("in a child")
        try:
            model(torch.randn(2, 3)).sum().backward()
        except paceline.PacelineError as error:
            print("heard", type(error).__name__, error, flush=True)
            os._exit(0)

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(work, (sys.argv[2],), nprocs=2)
    else:
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=work, args=(rank, sys.argv[2])) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
"""


@pytest.mark.parametrize("how", ["process", "spawn"])
def test_an_exception_in_a_child_of_multiprocessing_reaches_the_others(tmp_path: Path, how: str) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    command = [sys.executable, str(script), how, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert "heard PeerFailed step 2: rank 1 raised in its loop: KeyError: 'in a child'" in done.stdout, (
        done.stderr
    )


@ranks(2)
def test_the_same_exception_raised_again_is_told_again(rank: int) -> None:
    model = paceline.replicate(Fragile())
    error = ValueError("one object")
    for _ in range(2):
        if rank:
            model.forward = lambda x: (_ for _ in ()).throw(error)
        with pytest.raises(ValueError if rank else paceline.PeerFailed, match="one object"):
            loss_of(model, share(batch())).backward()
    if rank:
        del model.forward
    assert_trains(model, model)


@ranks(2)
def test_a_fork_that_ends_takes_nothing_with_it(rank: int) -> None:
    model = paceline.replicate(small_model())
    assert_trains(model, model)
    if rank == 0:
        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
    assert_trains(model, model)


@ranks(2, warnings="ignore")
def test_an_optimizer_inside_another_makes_no_steps_of_its_own(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    models = [paceline.replicate(nn.Linear(4, 4, bias=False)) for _ in range(2)]
    optimizer = ZeroRedundancyOptimizer([p for m in models for p in m.parameters()], torch.optim.SGD, lr=0.1)
    for _ in range(3):
        for model in models:
            model(share(batch())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
def test_after_different_numbers_of_steps_the_weights_can_be_made_equal(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, share(batch())).backward()
    if rank:
        optimizer.step()
    with pytest.raises(paceline.RanksDisagree, match=r"call take_state\(\) of the replica"):
        loss_of(model, share(batch())).backward()
    paceline.replica(model).take_state(0)
    assert_trains(model, model)
