"""Runs a program on ranks that are threads of this process."""

import paceline
from tests.soak.interpreter import Entry, run
from tests.soak.program import Program
from tests.soak.reference import Mismatch, judge

HANG_SECONDS = 20.0


def run_on_threads(program: Program) -> list[list[Entry]]:
    """Return what each rank has seen. A program that goes wrong at its end may end the rehearsal, too."""
    seen: dict[int, list[Entry]] = {}

    def play(world: paceline.World) -> None:
        seen[world.rank] = run(program, world.rank)

    try:
        paceline.rehearse(play, program.ranks, timeout_seconds=HANG_SECONDS)
    except Exception as error:
        if len(seen) < program.ranks:
            raise Mismatch(_words_for(error)) from error
        if not program.wrong:
            judge(program, _in_order(seen))  # which says more, if there is something to be said
            raise Mismatch(_words_for(error)) from error
    return _in_order(seen)


def _in_order(seen: dict[int, list[Entry]]) -> list[list[Entry]]:
    return [seen[rank] for rank in sorted(seen)]


def _words_for(error: Exception) -> str:
    notes = "\n".join(getattr(error, "__notes__", []))
    return f"the rehearsal ended with {type(error).__name__}: {error}\n{notes}"
