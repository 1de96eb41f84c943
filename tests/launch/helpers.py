"""Start `paceline run` from a test, and look at what is running."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without traces of a launcher, and with more."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    return {name: value for name, value in clean.items() if name not in LAUNCHER_VARIABLES} | more


def script(folder: Path, text: str, name: str = "script.py") -> str:
    """Write a script, and return its path."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "run", *args]


def start(*args: str, **options: object) -> "subprocess.Popen[str]":
    """Start `paceline run` and leave it running."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    return subprocess.Popen(command(*args), **(pipes | options))  # type: ignore[call-overload]


def launch(*args: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run `paceline run` to its end."""
    process = start(*args, **options)
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(path: str, **variables: str) -> "subprocess.Popen[str]":
    """Start a script without any launcher."""
    return subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something that is bound to happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that is dead but not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def written_pids(folder: Path, count: int) -> list[int]:
    """Wait until ``count`` processes have written a file ``<name>.pid`` each, and return the ids in them."""
    wait_until(lambda: len(list(folder.glob("*.pid"))) == count)
    return [int(file.read_text()) for file in folder.glob("*.pid")]


# What a script needs to take part in written_pids.
WRITE_PID = """
import os, pathlib, sys, time
def write_pid(name, pid=None):
    part = pathlib.Path(sys.argv[1]) / f"{name}.part"
    part.write_text(str(pid or os.getpid()))
    part.rename(part.with_suffix(".pid"))
"""
