"""Run a scenario on forked ranks from any process, and bring back what they saw, even of ranks that crash."""

import tempfile
from pathlib import Path

import torch.distributed as dist

from paceline.testing import RankFailure, ranks
from tests.promises.libraries import Library
from tests.promises.scenarios import row


def observe(id: str, library: Library) -> str:
    """Say what the ranks saw in a row of the matrix."""
    with tempfile.TemporaryDirectory() as folder:
        end = ""
        try:
            _run(id=id, library=library, folder=folder)
        except RankFailure as failure:
            ends = sorted(failure.texts.items())
            end = "; ".join(f"rank {rank} {text.splitlines()[0]}" for rank, text in ends)
        told = [file.read_text() for file in sorted(Path(folder).iterdir())]
    seen = " / ".join(dict.fromkeys(told))
    return "; then ".join(part for part in (seen, end) if part)


@ranks(2, timeout=40, warnings="ignore")
def _run(id: str, library: Library, folder: str) -> None:
    Path(folder, str(dist.get_rank())).write_text(row(id).run(library))
