"""Runs random programs for a while, on processes and on threads: python -m tests.soak --minutes 10.

The seed that is printed reproduces a run; a failure prints the seed of the batch that it was in, the program
as it was met, and a shorter one that fails, too.
"""

import argparse
import logging
import secrets
import sys
import time
from collections.abc import Callable

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.soak.interpreter import Entry
from tests.soak.on_processes import Pool
from tests.soak.on_threads import run_on_threads
from tests.soak.program import Program
from tests.soak.reference import Figures, judge
from tests.soak.strategies import programs

BATCH = 50  # programs of one seed
SHOW_SECONDS = 1.0 if sys.stdout.isatty() else 10.0

Run = Callable[[Program], list[list[Entry]]]


class TimeIsUp(Exception):
    """The soak has lasted as long as it was to."""


class Soak:
    """Runs batch after batch, each of the next seed, until the time is over or something fails."""

    def __init__(self, arguments: argparse.Namespace, pool: Pool) -> None:
        self._arguments = arguments
        self._pool = pool
        self._figures = Figures()
        self._end = time.monotonic() + 60 * arguments.minutes
        self._began = time.monotonic()
        self._shown = 0.0
        self._failed: list[tuple[Program, BaseException]] = []

    def run(self) -> bool:
        """Tell whether all went well."""
        number = self._arguments.seed
        try:
            while True:
                self._run_batch(number)
                number += 1
        except (TimeIsUp, KeyboardInterrupt) as end:
            if not self._failed:
                self._show("stopped" if isinstance(end, KeyboardInterrupt) else "done", end="\n")
                return True
        except BaseException as error:
            if not self._failed:
                raise
            self._show("failed", end="\n")
            if not isinstance(error, AssertionError):
                print(f"(hypothesis: {type(error).__name__}: {str(error).splitlines()[0]})")
        self._report(number)
        return False

    def _run_batch(self, number: int) -> None:
        kind, run = self._kind_of(number)

        @seed(number)
        @settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(programs(self._arguments.ranks))
        def check(program: Program) -> None:
            self._check(program, kind, run)

        check()

    def _kind_of(self, number: int) -> tuple[str, Run]:
        on_processes = self._arguments.processes or (not self._arguments.threads and number % 2 == 1)
        return ("processes", self._pool.run) if on_processes else ("threads", run_on_threads)

    def _check(self, program: Program, kind: str, run: Run) -> None:
        # While a failure is made shorter, time does not count.
        if not self._failed and time.monotonic() > self._end:
            raise TimeIsUp
        try:
            judge(program, run(program), self._figures)
        except Exception as error:
            if not self._failed:
                print(
                    f"\nfailed on {kind}; as it was met:\n{program}\n{_short(error)}\nmaking it shorter ..."
                )
            self._failed.append((program, error))
            raise
        if time.monotonic() - self._shown > SHOW_SECONDS:
            self._show(kind)

    def _show(self, what: str, end: str = "") -> None:
        self._shown = time.monotonic()
        line = f"{self._shown - self._began:6.0f} s  {what:10}{self._figures}"
        print(
            f"\r{line:80}" if sys.stdout.isatty() else line, end=end or ("" if sys.stdout.isatty() else "\n")
        )
        sys.stdout.flush()

    def _report(self, number: int) -> None:
        program, error = self._failed[-1]
        kind, _ = self._kind_of(number)
        print(f"\nthe shortest program that fails, on {kind}:\n\n{program}\n\n{program!r}\n\n{error}\n")
        print(f"again: python -m tests.soak --seed {number} --ranks {self._arguments.ranks} --{kind}")


def _short(error: BaseException) -> str:
    return "\n".join(f"{type(error).__name__}: {error}".splitlines()[:3])


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=4, choices=range(2, 9), help="at most (default: 4)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first batch")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--processes", action="store_true", help="real ones only (default: in turns)")
    kinds.add_argument("--threads", action="store_true", help="ranks as threads only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("paceline").setLevel(logging.ERROR)
    print(f"seed {arguments.seed}, {arguments.minutes:g} minutes, up to {arguments.ranks} ranks")
    with Pool(arguments.ranks) as pool:
        return 0 if Soak(arguments, pool).run() else 1


if __name__ == "__main__":
    sys.exit(main())
