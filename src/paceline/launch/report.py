"""The words at the end of a run: who failed first, how, and who was stopped because of it. Pure."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import name_ranks

LINES_SHOWN = 80
LINES_WITHOUT_TRACEBACK = 10

_START = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):|Fatal Python error:")
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's excepthook adds it once there is a process group
_CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
# What a rank says when it failed only because another one did.
_SYMPTOM = re.compile(r"\b(PeerFailed|PeerLost)\b|Connection (closed|reset) by peer|remote process exited")


@dataclass(frozen=True)
class Ending:
    """How one rank ended; ``stopped`` if the launcher had told it to."""

    rank: int
    code: int
    stopped: bool
    last_words: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Tell whether it ended badly, and by itself."""
        return self.code != 0 and not self.stopped

    @property
    def symptom(self) -> bool:
        """Tell whether the failure is the echo of another rank's."""
        words = find_traceback(self.last_words)
        return self.code > 0 and any(_SYMPTOM.search(line) for line in words[-3:])


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """Return the failure that explains the others: the first one that is no echo."""
    failures = [ending for ending in endings if ending.failed]
    return min(failures, key=lambda ending: ending.symptom, default=None)


def exit_code(endings: Sequence[Ending]) -> int:
    """Return what the launcher should exit with: 0, or the first failure's code as a shell would give it."""
    first = first_failure(endings) or next((ending for ending in endings if ending.code), None)
    if first is None:
        return 0
    return first.code if first.code > 0 else 128 - first.code


def describe(code: int, *, stopped: bool = False) -> str:
    """Say how a process ended; ``stopped`` if the launcher had told it to."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if name != "SIGKILL":
        return f"killed by {name}"
    if stopped:
        return "killed by SIGKILL, as it had not ended by itself"
    return "killed by SIGKILL (if nobody did that by hand, the machine ran out of memory)"


def failure_report(endings: Sequence[Ending], size: int) -> list[str]:
    """Tell the story of a failed run."""
    first = first_failure(endings)
    if first is None:
        return []
    words = find_traceback(first.last_words)
    headline = f"rank {first.rank} of {size} failed first: {describe(first.code)}"
    report = [f"{headline}. Its last words:" if words else headline]
    report += [f"    {line}".rstrip() for line in words]
    later = [ending.rank for ending in endings if ending.failed and ending is not first]
    stopped = [ending.rank for ending in endings if ending.stopped]
    if later:
        report.append(f"{name_ranks(sorted(later))} failed after it")
    if stopped:
        report.append(f"stopped because of it: {name_ranks(sorted(stopped))}")
    return report


def interrupt_report(name: str, endings: Sequence[Ending]) -> list[str]:
    """Tell how the ranks of a run ended that was told to."""
    in_order = sorted(endings, key=lambda ending: ending.rank)
    each = ", ".join(f"rank {e.rank}: {describe(e.code, stopped=e.stopped)}" for e in in_order)
    return [f"{name} was passed on to the ranks; {each}"]


def find_traceback(lines: Sequence[str]) -> list[str]:
    """Return the last traceback in what a rank wrote, with those it was caused by; else the last lines."""
    lines = [_TORCH_PREFIX.sub("", line) for line in lines]
    starts = [index for index, line in enumerate(lines) if _START.match(line)]
    if not starts:
        return lines[-LINES_WITHOUT_TRACEBACK:]
    first = starts.pop()
    while starts and any(line.startswith(_CHAIN) for line in lines[starts[-1] : first]):
        first = starts.pop()
    return lines[first:][-LINES_SHOWN:]
