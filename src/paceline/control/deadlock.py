"""Ranks that wait for each other at different points, found from what they report.

Every rank waits for a frame that has not been sent. Who waits sends nothing, so none of them ever goes on.
"""

from collections.abc import Mapping, Sequence

from paceline.errors import name_ranks
from paceline.reports import Wait


class Canary:
    """Looks at all ranks' waits, and tells when every rank has reported the same deadlock anew."""

    def __init__(self) -> None:
        self._found: Sequence[Wait] | None = None
        self._since: Mapping[int, float] = {}

    def look(self, waits: Sequence[Wait | None], times: Mapping[int, float]) -> bool:
        """Tell whether no rank can go on. ``waits`` are by rank; ``times`` say when the others reported them.

        A report may be old. Who has reported the same wait before and after one moment was in it then, and
        has not been interrupted, or run out of time, unseen.
        """
        found = deadlock(waits)
        if found is None or found != self._found:
            self._found, self._since = found, times
            return False
        return all(times[rank] > since for rank, since in self._since.items())


def deadlock(waits: Sequence[Wait | None]) -> Sequence[Wait] | None:
    """Return the waits if none of them can end, else None.

    Reports are read one after the other, and that does no harm: the first rank to leave its wait would need a
    frame from a rank that is in its own.
    """
    known = [wait for wait in waits if wait is not None and wait.missing and wait.is_sure]
    if len(known) < len(waits) or len({wait.epoch for wait in known}) > 1:
        return None
    nothing_on_its_way = all(wait.heard[peer] == known[peer].posts for wait in known for peer in wait.missing)
    return known if nothing_on_its_way else None


def is_sound(waits: Sequence[Wait]) -> bool:
    """Tell whether all ranks have started the same collectives, so that they can go on from here."""
    return len({wait.trace for wait in waits}) == 1 and not any(".round" in wait.topic for wait in waits)


def describe(waits: Sequence[Wait]) -> str:
    """Say who waits where, in the same words on every rank."""
    places: dict[str, list[int]] = {}
    for rank, wait in enumerate(waits):
        places.setdefault(wait.place, []).append(rank)
    where = "; ".join(
        f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {place}"
        for place, ranks in places.items()
    )
    end = "The gradients were dropped on every rank."
    if not is_sound(waits):
        end = "Some have sent buckets that others have not: nothing can be reduced over this group any more."
    return (
        f"the ranks wait for each other, and none can go on: {where}. Make every rank run the same backwards "
        f"of the same models in the same order. {end}"
    )


def waits_of(size: int, rank: int, mine: Wait, others: Mapping[int, Wait | None]) -> list[Wait | None]:
    """Put this rank's own wait among the others'."""
    return [mine if each == rank else others.get(each) for each in range(size)]
