"""Write docs/conformance.md from what is seen: ``python -m tests.conformance.report``.

    --only PATTERN        only the tests whose name the regular expression finds; the page is left as it is
    --library paceline    only one side; the other is taken from the last report
    --jobs 2              as many tests at a time (each has two ranks or more)

What each test saw, with its log, goes to results/conformance.json.
"""

import argparse
import dataclasses
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue

import torch

from tests.conformance.deviations import ALLOWED, DEVIATIONS, OUT_OF_REACH
from tests.conformance.torch_suite import LIBRARIES, Library, Outcome, Server

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
RECORD = ROOT / "results" / "conformance.json"

PAGE_TEXT = """# Conformance: torch's own tests on our class

{summary}

This page is written by `make conformance`. It runs every test inside the torch {version} wheel that makes a
`DistributedDataParallel` (`distributed_test`, `ddp_under_dist_autograd_test` and `rpc_test` in
`torch.testing._internal.distributed`): once with torch's class, once with
`paceline.DistributedDataParallel` in its place, as `paceline run --drop-in` puts it there. CPU, Gloo,
2 ranks, more where a test asks for more.

Most of these tests ask for GPUs. Both sides run under the same
[stand-in](../tests/conformance/standin.py), where a CUDA device is the CPU, streams do nothing, and nothing
is skipped, also not what torch itself no longer runs. It changes more than that, for both sides alike:

- `device_ids` and `output_device` are taken away, and the layer itself puts them back into
  `_get_ddp_logging_data()`: what `test_ddp_logging_data_gpu` asserts of these two fields shows nothing.
- SyncBatchNorm, which torch has for GPUs only, gets its five kernels in Python, and torch's refusal of it on
  a CPU is lifted.
- Pictures are cut to 64 pixels each way (`test_ddp_uneven_inputs`), and `torch.load` may load whole objects
  (`test_ddp_hook_pickling_powerSGD`).
- What is particular to a GPU is not shown at all: placement of inputs, streams, overlap.

One test by hand:
`python -m tests.conformance.torch_suite --library paceline test_ddp_inference`.

| test | ranks | torch | ours | reason |
|---|---|---|---|---|
{table}
"""

WORDS = {"pass": "passes", "fail": "**fails**", "skip": "skips"}


@dataclasses.dataclass
class Row:
    """One test: what both libraries did."""

    name: str
    size: int
    switched_off: str
    seen: dict[Library, Outcome]

    def verdict(self, library: Library) -> str:
        """Tell in one word what a library did."""
        return self.seen[library].verdict if library in self.seen else "not run"

    @property
    def standing(self) -> str:
        """Say what the row means for us."""
        theirs, ours = self.verdict("torch"), self.verdict("paceline")
        if "not run" in (theirs, ours):
            return "not run"
        if theirs != "pass":
            return "torch does not pass" if self.name in OUT_OF_REACH else "torch fails"
        if ours == "pass":
            return "both pass"
        expected = DEVIATIONS.get(self.name)
        if expected is None or expected.seen not in self.seen["paceline"].reason:
            return "ours fails"
        return "deviates" if self.name in ALLOWED else "differs otherwise"


def main() -> None:
    """Run what the command line asks for, and write the page if it was everything."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.report", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN")
    parser.add_argument("--library", choices=[*LIBRARIES, "both"], default="both")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    libraries = LIBRARIES if args.library == "both" else (args.library,)
    rows = _remembered()
    for library in libraries:
        _run(library, args.only, args.jobs, rows)
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps([dataclasses.asdict(row) for row in rows.values()], indent=1))
    if args.only:
        rows = {name: row for name, row in rows.items() if re.search(args.only, name)}
    else:
        PAGE.write_text(page(rows.values(), torch.__version__.split("+")[0]))
    print(
        *(f"{count:4} {standing}" for standing, count in Counter(r.standing for r in rows.values()).items()),
        sep="\n",
    )
    sys.exit(any(row.standing in ("ours fails", "torch fails") for row in rows.values()))


def _remembered() -> dict[str, Row]:
    if not RECORD.exists():
        return {}
    rows = {}
    for entry in json.loads(RECORD.read_text()):
        seen = {library: Outcome(**outcome) for library, outcome in entry.pop("seen").items()}
        rows[entry["name"]] = Row(**entry, seen=seen)
    return rows


def _run(library: Library, only: str, jobs: int, rows: dict[str, Row]) -> None:
    names: SimpleQueue[str] = SimpleQueue()
    with Server(library) as first:
        known = {name: rows.pop(name, None) for name, *_ in first.cases}
        rows.clear()
        for name, size, off in first.cases:
            before = known[name]
            rows[name] = Row(name, size, off, before.seen if before else {})
            if re.search(only, name):
                names.put(name)
        helpers = [threading.Thread(target=_work_alone, args=(library, names, rows)) for _ in range(jobs - 1)]
        for helper in helpers:
            helper.start()
        _work(first, names, rows)
        for helper in helpers:
            helper.join()


def _work_alone(library: Library, names: "SimpleQueue[str]", rows: dict[str, Row]) -> None:
    with Server(library) as server:
        _work(server, names, rows)


def _work(server: Server, names: "SimpleQueue[str]", rows: dict[str, Row]) -> None:
    while True:
        try:
            outcome = server.run(names.get_nowait())
        except Empty:
            return
        rows[outcome.name].seen[server.library] = outcome
        line = f"{outcome.library:9}{outcome.verdict:5}{outcome.seconds:6.1f} s  {outcome.name}"
        print(f"{line}  {outcome.reason}"[:400].rstrip(), flush=True)


def page(rows: Iterable[Row], version: str) -> str:
    """Lay out the page."""
    rows = list(rows)
    return PAGE_TEXT.format(
        version=version,
        summary=summary(rows),
        table="\n".join(map(_line, rows)),
    )


def _line(row: Row) -> str:
    words = (_word(row, "torch"), _word(row, "paceline"), _cell(reason(row)))
    return f"| `{row.name}` | {row.size} | {' | '.join(words)} |"


def summary(rows: list[Row]) -> str:
    """Count."""
    count = Counter(row.standing for row in rows)
    passed = sum(row.verdict("torch") == "pass" for row in rows)
    ours = sum(row.verdict("torch") == row.verdict("paceline") == "pass" for row in rows)
    return (
        f"**{len(rows)} tests; torch passes {passed}, of which ours passes {ours}**, "
        f"deviates in {count['deviates']} where torch raises or is silently wrong, differs otherwise in "
        f"{count['differs otherwise']}, and fails {count['ours fails']}. "
        f"{count['torch does not pass']} cannot pass here with torch's class either."
    )


def reason(row: Row) -> str:
    """Say why a row is not twice a pass."""
    parts = []
    if row.switched_off:
        parts.append(f"torch's own runs leave it out: {row.switched_off}")
    if row.name in DEVIATIONS:
        parts.append(DEVIATIONS[row.name].reason)
    if row.name in OUT_OF_REACH:
        parts.append(OUT_OF_REACH[row.name])
    parts += [f"{library}: {seen.reason[:200]}" for library, seen in row.seen.items() if seen.reason]
    return "; ".join(parts)


def _word(row: Row, library: Library) -> str:
    verdict = row.verdict(library)
    return "deviates" if library == "paceline" and row.standing == "deviates" else WORDS.get(verdict, verdict)


def _cell(text: str) -> str:
    for sign, written in (("|", "\\|"), ("<", "&lt;"), ("\n", " ")):
        text = text.replace(sign, written)
    return text


if __name__ == "__main__":
    main()
