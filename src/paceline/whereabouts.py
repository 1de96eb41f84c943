"""Over which ranks everybody replicates: ranks that have chosen different dimensions of a mesh find out.

Such ranks are in different groups, and wait for each other in vain. What each of them has chosen is on a
board of the whole job; a rank that waits looks there.
"""

import json
import time
from collections.abc import Callable

from paceline.board import board_of, wait_until
from paceline.call_site import users_line
from paceline.comm import Comm, GroupComm, comm_over
from paceline.errors import RanksDisagree, name_ranks

WAIT_SECONDS = 2.0  # for ranks that have chosen otherwise: their next choice may be this one

_choices = 0  # of this process, so far


class Whereabouts:
    """What this rank has chosen, the n-th time that it chose a dimension of a mesh."""

    def __init__(self, comm: Comm, name: str) -> None:
        global _choices
        _choices += 1
        everybody = comm_over(None)
        self._ranks = list(comm.ranks)
        self._words = f"{name} ({name_ranks(self._ranks)})"
        self._line = users_line()
        board = board_of(everybody, f"mesh {_choices}") if isinstance(everybody, GroupComm) else None
        self._board = board
        if board is not None:
            board.come("here", json.dumps([self._words, self._ranks, self._line]).encode())

    def wait(self, all_are_here: Callable[[], bool], seconds: float) -> None:
        """Wait for the ranks of the chosen dimension before anything is sent to them.

        Raises if one of them has chosen another one in the same line of the program, and does not come. If
        one is just missing, it is for others to say so.
        """
        since = time.monotonic()
        while not wait_until(all_are_here, lambda: WAIT_SECONDS) and time.monotonic() - since < seconds:
            self._refuse_others()

    def _refuse_others(self) -> None:
        notes = {} if self._board is None else self._board.notes("here")
        told = {rank: json.loads(note) for rank, note in notes.items()}
        odd = {
            rank: words
            for rank, (words, ranks, line) in told.items()
            if rank in self._ranks and ranks != self._ranks and line == self._line
        }
        if odd:
            theirs = ", ".join(f"rank {rank} over {words}" for rank, words in odd.items())
            raise RanksDisagree(
                f"the ranks replicate over different ranks: this one over {self._words}, {theirs}. Give "
                "every rank the same dimension of the same mesh."
            )
