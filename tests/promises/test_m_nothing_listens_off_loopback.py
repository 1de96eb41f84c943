"""M: nothing of a run on one machine listens off loopback."""

import contextlib
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path

from paceline.launch.sockets import listen_on_loopback
from tests.launch.helpers import WRITE_PID, python, script, start, written_pids

JOIN_AND_HOLD = (
    WRITE_PID
    + """
import torch, torch.distributed as dist
import paceline
with paceline.world() as world:
    dist.all_reduce(torch.ones(1))
    write_pid(world.rank)
    time.sleep(1000)
"""
)
LISTEN = "0A"


def listeners(pid: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses that a process listens on."""
    inodes = {match[1] for link in open_files(pid) if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return {address(row[1].split(":")[0]) for row in rows if row[3] == LISTEN and row[9] in inodes}


def open_files(pid: int) -> list[str]:
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address as /proc/net writes it: words of 32 bits in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def off_loopback(found):
    return {one for one in found if not (getattr(one, "ipv4_mapped", None) or one).is_loopback}


def test_the_ranks_and_the_launcher_of_a_run_listen_on_loopback_only(tmp_path):
    run = start("-n", "2", script(tmp_path, JOIN_AND_HOLD), str(tmp_path))
    try:
        ranks = written_pids(tmp_path, 2)
        everybody = [run.pid, *children_of(run.pid)]
        found = set().union(*map(listeners, everybody))
    finally:
        run.terminate()
        run.communicate(timeout=60)

    assert set(ranks) < set(everybody)
    assert found
    assert off_loopback(found) == set()


def test_ranks_started_by_hand_with_a_loopback_master_listen_on_loopback_only(tmp_path):
    path = script(tmp_path, JOIN_AND_HOLD.replace("sys.argv[1]", repr(str(tmp_path))))
    with listen_on_loopback() as listener:
        port = str(listener.getsockname()[1])
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [python(path, RANK=str(rank), **meeting) for rank in range(2)]
    try:
        written_pids(tmp_path, 2)
        found = set().union(*(listeners(rank.pid) for rank in ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()

    assert found
    assert off_loopback(found) == set()


def test_the_check_sees_a_listener_on_all_interfaces():
    with socket.create_server(("0.0.0.0", 0)):
        assert off_loopback(listeners(os.getpid())) == {ipaddress.ip_address("0.0.0.0")}


def test_plain_python_listens_on_nothing(tmp_path):
    path = script(
        tmp_path,
        WRITE_PID.replace("sys.argv[1]", repr(str(tmp_path)))
        + "import paceline\nwith paceline.world(): write_pid('alone'); time.sleep(1000)",
    )
    alone = python(path)
    try:
        written_pids(tmp_path, 1)
        found = listeners(alone.pid)
    finally:
        alone.kill()
        alone.communicate()

    assert found == set()
