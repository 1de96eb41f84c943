"""Run a scenario on forked ranks from any process, and bring back what they saw, even of ranks that crash."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import paceline
from paceline.launch.sockets import listen_on_loopback
from paceline.testing import RankFailure, ranks
from tests.promises.libraries import Library, Torch
from tests.promises.measure import gather
from tests.promises.scenarios import row
from tests.promises.test_ab_same_bits import ab_same_bits
from tests.promises.test_m_nothing_listens_off_loopback import listeners, off_loopback


def observe(id: str, library: Library) -> str:
    """Say what two ranks saw in a row of the matrix."""
    return _seen(lambda folder: _run_row(id=id, library=library, folder=folder))


def observe_bits(library: Library) -> str:
    """Say whether four ranks saw the same bits in everything that should not matter."""
    return _seen(lambda folder: _run_bits(library=library, folder=folder))


def observe_listeners(library: Library) -> str:
    """Say where the ranks of a run with MASTER_ADDR=127.0.0.1 listen."""
    with listen_on_loopback() as listener:
        port = listener.getsockname()[1]
    return _seen(lambda folder: _run_world(library=library, port=port, folder=folder))


def _seen(run: Callable[[str], None]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        end = ""
        try:
            run(folder)
        except RankFailure as failure:
            ends = sorted(failure.texts.items())
            end = "; ".join(f"rank {rank} {_ending(text.splitlines())}" for rank, text in ends)
        told = [file.read_text() for file in sorted(Path(folder).iterdir())]
    seen = "; ".join(dict.fromkeys(text for text in told if text))
    return "; then ".join(part for part in (seen, end) if part)


def _ending(lines: list[str]) -> str:
    return f"failed: {lines[-1].strip()}" if lines[0] == "failed" else lines[0]


@ranks(2, timeout=40, warnings="ignore")
def _run_row(rank: int, id: str, library: Library, folder: str) -> None:
    Path(folder, str(rank)).write_text(row(id).run(library))


@ranks(4, timeout=60, warnings="ignore")
def _run_bits(rank: int, library: Library, folder: str) -> None:
    Path(folder, str(rank)).write_text(ab_same_bits(library))


@ranks(2, timeout=40, backend=None, warnings="ignore")
def _run_world(rank: int, size: int, library: Library, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    if isinstance(library, Torch):
        dist.init_process_group("gloo")
    else:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # @ranks has set it; world() has to see to it by itself
        paceline.world()
    exposed = _exposed(rank, size)
    odd = [f"rank {other} listens on {', '.join(found)}" for other, found in enumerate(exposed) if found]
    Path(folder, str(rank)).write_text("; ".join(odd) or "every rank listens on loopback only")


def _exposed(rank: int, size: int) -> list[list[str]]:
    """Return the addresses off loopback that each rank listens on; each is looked at by the next one."""
    pids, exposed = gather(os.getpid()), []
    for other in range(size):
        looks = rank == (other + 1) % size  # the others wait: what is looked at holds still
        found = sorted(map(str, off_loopback(listeners(pids[other])))) if looks else None
        exposed.append(next(seen for seen in gather(found) if seen is not None))
    return exposed
