"""E: every exit of a run that trained is clean. PACELINE_EXITS=100 checks it a hundred times."""

import os

import pytest

from tests.launch.helpers import launch, script

EXITS = int(os.environ.get("PACELINE_EXITS", "4"))

# A worker of torch that puts away the last collective needs the interpreter's lock. Hardly ever handing it
# over makes a process that ends too early abort in one of five exits, instead of one of fifty.
TRAIN = """
import sys
import torch
import paceline

sys.setswitchinterval(20)
world = paceline.world()
model = paceline.replicate(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
"""
ENDINGS = {"closed": "world.close()", "left open": ""}


@pytest.mark.timeout(60 + 30 * EXITS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_run_that_trained_a_step_exits_with_0_and_says_nothing(tmp_path, ending):
    path = script(tmp_path, TRAIN + ENDINGS[ending])

    results = [launch("-n", "2", path) for _ in range(max(1, EXITS // 2))]

    unclean = [r for r in results if r.returncode or r.stdout or "\n" in r.stderr.strip()]
    assert not unclean, unclean[0].stdout + unclean[0].stderr
