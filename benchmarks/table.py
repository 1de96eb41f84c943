"""What was measured against what was wanted, for the terminal and as JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.cycles import Estimate


@dataclass(frozen=True)
class Row:
    """One measurement of one bar; bar 0 is what no bar asks for. ``goal``, if any, is written ``<= 1.03``."""

    bar: int
    what: str
    measured: Estimate
    goal: str
    note: str = ""
    raw: dict[str, Any] = field(default_factory=dict)
    is_quiet: bool = True  # False: a time from a machine that others were using

    @property
    def met(self) -> str:
        """Say whether the goal is met. A miss that lies within the noise is unclear."""
        if not self.goal:
            return ""
        if not self.is_quiet:
            return "noisy"
        sign, number = self.goal.split()
        goal, sides = float(number), (self.measured.median, self.measured.low, self.measured.high)
        passed = [side <= goal if sign == "<=" else side >= goal for side in sides]
        return "yes" if passed[0] else "unclear" if any(passed) else "no"


def as_markdown(rows: Sequence[Row]) -> str:
    """Draw the table, readable in a terminal and in a Markdown page."""
    cells = [["bar", "what", "measured (95 %)", "goal", "met", "note"]]
    cells += [
        [str(row.bar or "-"), row.what, str(row.measured), row.goal, row.met, row.note]
        for row in sorted(rows, key=lambda row: row.bar)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def write_json(rows: Sequence[Row], path: Path, **extra: Any) -> None:
    """Write the rows, and what they were measured with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.platform(),
        **extra,
        "rows": [{**asdict(row), "met": row.met} for row in rows],
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
