"""Ranks on two hosts: two network namespaces, where no environment variable says which interface to take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.link import two_hosts, why_not
from paceline import hosts
from paceline.hosts import interface_for_peers

SCRIPT = """
import torch, paceline
from torch import nn
with paceline.world() as world:
    torch.manual_seed(world.rank)
    model = paceline.replicate(nn.Linear(4, 2))
    for step in range(3):
        model(torch.full((2, 4), float(world.rank + step))).sum().backward()
    print(type(paceline.replica(model).reducer.wiring.control).__name__, model.weight.grad.tolist())
"""


@pytest.mark.skipif(bool(why_not()), reason=f"cannot make two hosts here: {why_not()}")
def test_ranks_on_two_hosts_find_each_other_though_their_name_stands_for_loopback(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    hidden = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    with two_hosts(None) as pair:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, sys.executable, str(script)],
                env=inherited
                | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
                | {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, host in enumerate(pair)
        ]
        try:
            told = [process.communicate(timeout=90)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()

    assert [process.returncode for process in ranks] == [0, 0], told
    # Three steps, accumulated: the mean over the ranks of 2 * (rank + step), as every rank has it.
    assert [text.splitlines()[-1] for text in told] == [f"TcpControl {[[9.0] * 4] * 2}"] * 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Make up a machine: what its own name stands for, and its way to the meeting point."""
    stands_for: dict[str, list[str]] = {"own": ["127.0.1.1"], "way": ["10.0.0.3"]}
    interfaces = {"lo": ["127.0.0.1"], "eth0": ["192.168.7.3"], "ib0": ["10.0.0.3", "fd00::3"]}
    monkeypatch.setattr(hosts, "_all_interfaces", lambda: interfaces)
    monkeypatch.setattr(hosts, "_look_up", lambda _: [(0, 0, 0, "", (a, 0)) for a in stands_for["own"]])
    monkeypatch.setattr(hosts, "_routes_and_names", lambda _: stands_for["way"])
    return stands_for


def test_a_host_name_that_leads_to_this_machine_is_left_to_gloo(machine: dict[str, list[str]]) -> None:
    machine["own"] = ["192.168.7.3"]

    assert interface_for_peers("head") is None


@pytest.mark.parametrize("own", [["127.0.1.1"], ["172.17.0.9"], []], ids=["loopback", "not ours", "unknown"])
@pytest.mark.parametrize("way", ["10.0.0.3", "fd00::3"])
def test_else_it_is_the_interface_on_the_way_to_the_others(
    machine: dict[str, list[str]], own: list[str], way: str
) -> None:
    machine["own"], machine["way"] = own, [way]

    assert interface_for_peers("head") == "ib0"


@pytest.mark.parametrize("way", [[], ["127.0.0.1"], ["203.0.113.5"]])
def test_where_no_way_is_known_nothing_is_chosen(machine: dict[str, list[str]], way: list[str]) -> None:
    machine["way"] = way

    assert interface_for_peers("head") is None
