"""Run a script of scripts/ on two ranks under --drop-in, and compare what the ranks found."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.helpers import environment, launch

SCRIPTS = Path(__file__).parent / "scripts"
OURS = ("paceline.ddp.DistributedDataParallel", True)

Found = list[dict[str, Any]]  # by rank


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a file where its package is not installed; `make test` installs it."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install paceline[frameworks]")


def run(script: str, folder: Path) -> Found:
    """Run a script to its end, and return what each rank told."""
    # CPU on every machine, and no look at the network or at the user's settings.
    alone = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    path = str(SCRIPTS / script)
    result = launch("-n", "2", "--drop-in", path, str(folder), env=environment(**alone), cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def assert_wrapped_by_us(found: Found, run: str) -> None:
    assert [facts[run]["wrapper"] for facts in found] == [OURS, OURS]


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_ranks_agree(found: Found, run: str) -> None:
    assert_same_bits(found[0][run]["weights"], found[1][run]["weights"])


def assert_as_one_process(found: Found, run: str, **tolerance: float) -> None:
    torch.testing.assert_close(found[0][run]["weights"], found[0][run]["alone"], **tolerance)
