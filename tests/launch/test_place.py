"""A place is read from what torchrun and Slurm set, and half-set environments are named."""

import pytest

from paceline.errors import LaunchError
from paceline.launch.place import SLURM_PORTS, find_local_rank, find_place, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODELIST": "gpu[03-04]",
}


def place_of(environment, **changes):
    merged = {**environment, **changes}
    return find_place({name: value for name, value in merged.items() if value is not None})


def complaint_about(environment, **changes):
    with pytest.raises(LaunchError) as caught:
        place_of(environment, **changes)
    return str(caught.value)


def test_plain_python_has_no_place():
    assert find_place({"PATH": "/bin", "SLURM_JOB_ID": "7", "MASTER_PORT": "1"}) is None


def test_torchrun_says_it_all():
    place = place_of(TORCHRUN)

    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert (place.address, place.port, place.launcher_hosts_store) == ("node0", 29500, True)
    assert not place.on_one_machine


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", "127.0.1.1"])
def test_loopback_means_one_machine_and_needs_no_local_rank(address):
    place = place_of(TORCHRUN, MASTER_ADDR=address, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None)

    assert place.on_one_machine
    assert place.local_rank == 3


def test_all_ranks_being_local_means_one_machine():
    assert place_of(TORCHRUN, LOCAL_WORLD_SIZE="4").on_one_machine


def test_slurm_meets_on_the_first_host_at_a_port_made_from_the_job():
    place = place_of(SLURM)

    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert place.address == "gpu03"
    assert place.port in SLURM_PORTS
    assert place.port != place_of(SLURM, SLURM_JOB_ID="123457").port
    assert place.port != place_of(SLURM, SLURM_STEP_ID="1").port
    assert not place.launcher_hosts_store


def test_a_slurm_step_counts_more_than_the_job_around_it():
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu04", "SLURM_STEP_NUM_NODES": "1"}
    place = place_of(SLURM, **step)

    assert (place.size, place.local_size) == (6, 6)
    assert place.on_one_machine
    assert place.address == "127.0.0.1"


def test_nodes_with_different_task_counts_leave_the_local_size_open():
    assert place_of(SLURM, SLURM_TASKS_PER_NODE="4(x2),3").local_size is None


def test_a_master_chosen_by_hand_is_respected_under_slurm():
    place = place_of(SLURM, MASTER_ADDR="login1", MASTER_PORT="1234")

    assert (place.address, place.port) == ("login1", 1234)


def test_torchrun_inside_slurm_wins():
    assert place_of({**SLURM, **TORCHRUN}).rank == 3


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,11],login", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("rack[1-2]n[05-08]", "rack1n05"),
        ("a[01-02].cluster", "a01.cluster"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_beside_those_that_are_set(missing):
    present = "WORLD_SIZE=4" if missing == "RANK" else "RANK=3"

    message = complaint_about(TORCHRUN, **{missing: None})

    assert message.startswith(f"{missing} is not set, but ")
    assert present in message
    assert "paceline run -n N" in message


@pytest.mark.parametrize("missing", ["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODELIST", "SLURM_JOB_ID"])
def test_a_missing_slurm_variable_is_named(missing):
    message = complaint_about(SLURM, **{missing: None})

    assert message.startswith(f"{missing.replace('JOB_ID', 'JOBID')} is not set, but SLURM_PROCID=5")


@pytest.mark.parametrize("bad", ["one", "-1", "1.0", "²"])
def test_a_number_that_is_none_is_named_with_its_value(bad):
    assert complaint_about(TORCHRUN, RANK=bad).startswith(f"RANK={bad!r} is not a whole number")


def test_a_rank_outside_the_world_is_named_with_both_values():
    assert complaint_about(TORCHRUN, RANK="4").startswith("RANK=4 does not fit WORLD_SIZE=4")
    assert complaint_about(TORCHRUN, WORLD_SIZE="0").startswith("RANK=3 does not fit WORLD_SIZE=0")
    assert complaint_about(SLURM, SLURM_PROCID="8").startswith("SLURM_PROCID=8 does not fit SLURM_NTASKS=8")


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_that_is_none_is_named(port):
    assert complaint_about(TORCHRUN, MASTER_PORT=port).startswith(f"MASTER_PORT={port} is not a port")


def test_the_local_rank_alone():
    assert find_local_rank({}) is None
    assert find_local_rank({"LOCAL_RANK": "2"}) == 2
    assert find_local_rank({"SLURM_LOCALID": "1"}) == 1
