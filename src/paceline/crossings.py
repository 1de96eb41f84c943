"""Collectives of the script's own inside a backward, as those of SyncBatchNorm: on which side of each bucket.

Both travel over one process group. Where one rank starts a bucket first, and another the script's collective,
sums are made of what does not belong together, or the backend aborts. So

- a bucket goes out when it is complete, and the ranks wait for each other then: the same moment on all;
- once such collectives have been seen, every gradient is listened to, and if parameters have gone unused as
  well, no bucket goes out before the end: what is complete on one rank may not be on another;
- what was started before each bucket is counted, and compared when the backward closes, if it was the same
  number on the ranks altogether.
"""

import zlib

from paceline.comm import Comm
from paceline.control import Control
from paceline.tally import Outcome


class Crossings:
    """What the script has started over a group in one backward, on one rank.

    ``began_at`` is the count before the backward began, if that was noticed.
    """

    def __init__(self, comm: Comm, control: Control, began_at: int | None) -> None:
        self._comm = comm
        self._control = control
        self._began_at = others_on(comm, control) if began_at is None else began_at
        self._before: list[int] = []  # each bucket

    def note_bucket(self) -> None:
        """Note that a bucket is going to be started."""
        self._before.append(self.others)

    @property
    def others(self) -> int:
        """How many there have been so far."""
        return max(0, others_on(self._comm, self._control) - self._began_at)

    @property
    def order(self) -> int:
        """A number that stands for where among the buckets it was."""
        return zlib.crc32(repr(self._before).encode())


def others_on(comm: Comm, control: Control) -> int:
    """Count the collectives of a group that no replica has started. Only differences mean something."""
    return comm.started_on() - control.collectives


class Care:
    """What a replica has learned about such collectives; the same on every rank."""

    def __init__(self, *, may_use_differ: bool = False) -> None:
        self.is_crossed = False  # a backward has held some
        self.may_use_differ = may_use_differ  # parameters have gone unused, or somebody has said they will

    def learn(self, outcome: Outcome) -> None:
        """Learn from what all ranks have told each other at the end of a backward."""
        self.is_crossed |= outcome.is_crossed
        self.may_use_differ |= bool(outcome.missing)

    def holds(self, *, is_first: bool) -> bool:
        """Tell whether no bucket may go out before the end of a backward, of the first one above all."""
        return is_first or (self.is_crossed and self.may_use_differ)
