"""X: a peer never arrives. A line says who, and what it does; then an exception within the time budget."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks


@ranks(2)
def test_a_peer_that_never_arrives_is_named_and_then_given_up(rank: int, tmp_path: Path) -> None:
    model = paceline.replicate(nn.Linear(4, 4), stall_seconds=0.6, timeout_seconds=2)
    over = tmp_path / "over"
    if rank == 1:
        while not over.exists():
            time.sleep(0.01)
        return
    lines: list[str] = []
    logging.getLogger("paceline").addFilter(lambda record: lines.append(record.getMessage()) is not None)
    steps = []
    with pytest.raises(paceline.PeerTimeout) as caught:
        try:
            model(torch.ones(1, 4)).sum().backward()
        finally:
            steps.append("finally")
    over.touch()

    assert steps == ["finally"]
    place = "in step 0 of Linear #1 for bucket 1 of 1 (bias, weight): rank 0 is here; rank 1 is missing: "
    # After the line of the stall there may be another one, if what rank 1 is seen to do has changed.
    assert 1 <= len(lines) <= 3
    assert lines[0].startswith("paceline: rank 0 has waited ")
    for text in (lines[0], str(caught.value)):
        assert place in text
        assert "test_x_missing_peer.py:" in text
    assert caught.value.rank == 1
    assert isinstance(caught.value, paceline.PeerLost)


def test_the_line_is_shown_by_a_plain_script() -> None:
    # Without any handler, logging writes warnings to stderr: nothing has to be set up to see it.
    code = "from paceline.waiting import logger; logger.warning('paceline: %s', 'rank 0 has waited')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr == "paceline: rank 0 has waited\n"


SCRIPT = """
import gc, os, signal, sys, torch, torch.distributed as dist, paceline
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
paceline.replicate(model, bucket_mb=1e-5, first_bucket_mb=1e-5, stall_seconds=0.5, timeout_seconds=2)
if rank == 1:
    model[0].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
try:
    model(torch.ones(1, 4)).sum().backward()
except paceline.PeerTimeout as error:
    print(error)
finally:
    print("finally")
# So that nobody holds the group at exit: it is taken down, and Gloo waits for what is under way.
paceline.replica(model).detach()
del model
gc.collect()
dist.destroy_process_group()
gc.collect()
"""


def test_a_process_whose_time_is_over_ends_although_its_peer_has_stopped(tmp_path: Path) -> None:
    # Rank 0 has sent buckets that the stopped rank 1 does not take; Gloo would wait half an hour for them.
    start = [sys.executable, "-c", SCRIPT]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    stopped = subprocess.Popen([*start, "1", str(tmp_path)], env=environment)
    try:
        done = subprocess.run(
            [*start, "0", str(tmp_path)], capture_output=True, text=True, timeout=90, env=environment
        )
    finally:
        stopped.kill()
        stopped.wait()

    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "for the end of backward, with 4 of 4 buckets sent: rank 0 is here; rank 1 is missing" in first
    assert last == "finally"
    assert done.stderr.startswith("paceline: rank 0 has waited 0.5 s in step 0 of Sequential #1 for ")
