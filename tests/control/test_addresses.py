"""Which address of a machine the ranks on others call."""

import os
import socket

import pytest

from paceline.control.switchboard import address_of, open_door_at
from paceline.hosts import address_for_peers, best_address, chosen_address, this_host

INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.3"], "ib0": ["fd00::3"]}


def test_the_interface_that_gloo_is_told_is_taken() -> None:
    assert chosen_address({"GLOO_SOCKET_IFNAME": "eth0"}, INTERFACES) == "10.0.0.3"
    assert chosen_address({"GLOO_SOCKET_IFNAME": "ib0"}, INTERFACES) == "fd00::3"
    assert chosen_address({"GLOO_SOCKET_IFNAME": "lo"}, INTERFACES) == "127.0.0.1"
    assert chosen_address({"GLOO_SOCKET_IFNAME": "gone, eth0"}, INTERFACES) == "10.0.0.3"


def test_the_interface_that_nccl_is_told_comes_second_and_only_by_its_name() -> None:
    both = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"}
    assert chosen_address(both, INTERFACES) == "fd00::3"
    assert chosen_address({"NCCL_SOCKET_IFNAME": "eth0"}, INTERFACES) == "10.0.0.3"
    for pattern in ("eth", "^docker0", "=eth0", ""):
        assert chosen_address({"NCCL_SOCKET_IFNAME": pattern}, INTERFACES) is None


def test_an_address_that_leaves_the_machine_goes_before_one_that_does_not() -> None:
    assert best_address(["127.0.1.1", "10.0.0.3", "10.0.0.4"]) == "10.0.0.3"
    assert best_address(["127.0.1.1", "::1"]) == "127.0.1.1"
    assert best_address(["::1", "fd00::3"]) == "fd00::3"


def test_no_wildcard_and_nothing_that_depends_on_an_interface_is_taken() -> None:
    assert best_address(["0.0.0.0", "::", "fe80::1%eth0", "fe80::1", "224.0.0.1", "nonsense"]) is None
    assert best_address(["0.0.0.0", "10.0.0.3"]) == "10.0.0.3"


def test_the_way_to_the_meeting_point_names_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(choice, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")

    assert address_for_peers("127.0.0.1") == "127.0.0.1"
    assert address_for_peers("no such host.invalid") == "127.0.1.1"
    assert address_for_peers(None) == "127.0.1.1"


def test_a_door_is_open_at_one_address_only() -> None:
    with open_door_at("127.0.0.1") as door:
        host, port = address_of(door)

        assert host == "127.0.0.1"
        assert int(port) > 0


def test_who_somebody_is_does_not_make_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = this_host()
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    assert this_host() == before
