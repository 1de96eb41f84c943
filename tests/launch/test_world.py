"""world() finds its place, joins, and leaves cleanly."""

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from paceline.errors import LaunchError
from paceline.launch.sockets import listen_on_loopback
from paceline.launch.world import World, world
from paceline.testing import ranks
from tests.launch.helpers import environment, python, script, wait_until


@pytest.fixture
def port() -> int:
    """Return a port that nobody uses."""
    with listen_on_loopback() as listener:
        return listener.getsockname()[1]


def be_launched(rank: int, size: int, port: int) -> None:
    """Make this process look like one that somebody started by hand."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def total(number: float) -> float:
    tensor = torch.tensor([number])
    dist.all_reduce(tensor)
    return tensor.item()


# Under plain python


@ranks(1, backend=None)
def test_plain_python_is_a_world_of_one_without_a_group():
    with world() as alone:
        assert alone == World(0, 1, 0, alone.device, None)
        assert not dist.is_initialized()
    alone.close()


@ranks(1, backend=None)
def test_a_timeout_has_to_be_a_time():
    with pytest.raises(ValueError, match="world\\(\\) needs a timeout above 0 seconds, got 0"):
        world(timeout=0)


# Joining


@ranks(2, backend=None)
def test_ranks_join_and_leave_and_may_do_it_again(rank, port):
    be_launched(rank, 2, port)
    for _ in range(2):
        with world(device="cpu") as here:
            assert (here.rank, here.size, here.local_rank, here.backend) == (rank, 2, rank, "gloo")
            assert here.device == torch.device("cpu")
            assert total(rank + 1) == 3
        assert not dist.is_initialized()


@ranks(2, backend=None)
def test_the_plain_call_is_closed_by_hand_once_or_twice(rank, port):
    be_launched(rank, 2, port)
    here = world()
    assert total(1) == 2

    here.close()
    here.close()

    assert not dist.is_initialized()


@ranks(1, backend=None)
def test_a_launched_world_of_one_has_a_group(port):
    be_launched(0, 1, port)
    with world() as here:
        assert (here.size, here.backend is not None) == (1, True)
        assert total(5) == 5


@ranks(2, backend=None)
def test_the_timeout_reaches_the_collectives(rank, port, tmp_path):
    be_launched(rank, 2, port)
    with world(timeout=1.0):
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.barrier()
            (tmp_path / "timed_out").touch()
        else:
            wait_until((tmp_path / "timed_out").exists)


@ranks(2)
def test_an_existing_group_is_adopted_and_left_open(rank):
    with world() as here:
        assert (here.rank, here.size, here.local_rank) == (rank, 2, rank)
        assert (here.device, here.backend) == (torch.device("cpu"), "gloo")

    assert total(1) == 2


@ranks(1, backend=None)
def test_a_group_whose_backend_torch_chose_is_named_by_device(port):
    be_launched(0, 1, port)
    dist.init_process_group()
    with world() as here:
        assert here.backend in ("cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl")
        assert here.device.type == ("cuda" if "nccl" in here.backend else "cpu")
    dist.destroy_process_group()


# Leaving


@ranks(2, backend=None)
def test_the_rank_that_hosts_the_store_leaves_last(rank, port, tmp_path):
    be_launched(rank, 2, port)
    with world():
        if rank == 1:
            time.sleep(0.3)
            (tmp_path / "leaving").touch()

    assert (tmp_path / "leaving").exists()


@ranks(2, backend=None)
def test_an_exception_leaves_at_once_and_passes(rank, port, tmp_path):
    be_launched(rank, 2, port)

    def fail():
        with world():
            if rank == 1:  # stays until rank 0 has left, which would wait for it otherwise
                wait_until((tmp_path / "left").exists, seconds=5)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    (tmp_path / "left").touch()

    assert not dist.is_initialized()


@ranks(2, backend=None)
def test_closing_is_fine_when_the_script_has_destroyed_the_group(rank, port):
    be_launched(rank, 2, port)
    with world():
        dist.destroy_process_group()


# What can go wrong


@ranks(1, backend=None)
def test_a_half_set_environment_is_refused():
    os.environ["RANK"] = "1"
    with pytest.raises(LaunchError, match="WORLD_SIZE is not set, but RANK=1 is"):
        world()


@ranks(1, backend=None)
def test_nobody_at_the_meeting_point(port):
    be_launched(1, 2, port)
    words = (
        f"rank 1 of 2 found nobody in 0.5 s at 127.0.0.1:{port} .*refused. See that rank 0 is running there"
    )
    with pytest.raises(LaunchError, match=words):
        world(timeout=0.5)


@ranks(1, backend=None)
def test_a_rank_that_never_comes_is_named(port):
    be_launched(0, 3, port)
    with pytest.raises(LaunchError, match=r"rank 0 of 3 waited 0.5 s at .*, and ranks 1, 2 did not come"):
        world(timeout=0.5)


@ranks(1, backend=None)
def test_a_port_in_use_is_named():
    with listen_on_loopback() as other:
        port = other.getsockname()[1]
        be_launched(0, 2, port)
        words = f"rank 0 of 2 cannot listen on 127.0.0.1:{port} .*Another run may use this port"
        with pytest.raises(LaunchError, match=words):
            world(timeout=0.5)


# Started by others

SHOW = """
    import os
    import torch, torch.distributed as dist
    import paceline
    with paceline.world() as world:
        total = torch.ones(1)
        dist.all_reduce(total)
        line = f"rank {world.rank} of {world.size}, local {world.local_rank}: {total.item():g}\\n"
        os.write(1, line.encode())  # in one piece, as nobody sorts the lines of two ranks under torchrun
"""
SHOWN = ["rank 0 of 2, local 0: 2", "rank 1 of 2, local 1: 2"]


def test_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    result = subprocess.run(
        [*torchrun, script(tmp_path, SHOW)], capture_output=True, text=True, timeout=90, env=environment()
    )

    assert sorted(result.stdout.splitlines()) == SHOWN, result.stderr
    assert result.returncode == 0


def test_slurm(tmp_path):
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": socket.gethostname(),
    }
    path = script(tmp_path, SHOW)

    tasks = [python(path, SLURM_PROCID=str(task), SLURM_LOCALID=str(task), **job) for task in range(2)]
    outputs = [task.communicate(timeout=90) for task in tasks]

    assert [out.strip() for out, _ in outputs] == SHOWN, outputs
    assert [task.returncode for task in tasks] == [0, 0]
