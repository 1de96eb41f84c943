"""Run an example as its reader would."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PACELINE = Path(sys.executable).with_name("paceline")
TORCHRUN = Path(sys.executable).with_name("torchrun")


class Starter:
    """Starts an example under one of the launchers and waits for its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, launcher: str, script: str, *args: object) -> list[str]:
        starts: dict[str, Sequence[object]] = {
            "paceline run": (PACELINE, "run", "-n", 2),
            "paceline run -n 4": (PACELINE, "run", "-n", 4),
            "paceline run -n 3": (PACELINE, "run", "-n", 3),
            "torchrun": (TORCHRUN, "--standalone", "--nproc-per-node", 2),
            "python": (sys.executable,),
        }
        return [str(part) for part in (*starts[launcher], EXAMPLES / script, *args)]

    def environment(self) -> dict[str, str]:
        # Ranks of a tiny model are fastest on one thread each, and two cores is all that CI has.
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(self, launcher: str, script: str, *args: object) -> str:
        """Return what the example printed; fail with all of it if the example failed."""
        command = self.command(launcher, script, *args)
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=self.environment(), timeout=100
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Starter:
    return Starter(tmp_path_factory.mktemp("examples"))
