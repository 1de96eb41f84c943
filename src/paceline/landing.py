"""Buckets that are out, until what came of them is in their flat tensors.

A hook that cannot fail on one rank alone is simply waited for. With any other hook the ranks confirm to each
other, between its collectives, that all is well, so that no rank waits for a collective that a peer did not
start.
"""

from collections.abc import Callable, Sequence

from paceline.comm import Pending
from paceline.errors import PeerFailed, RanksDisagree, name_ranks, words_of
from paceline.frames import Round
from paceline.shelf import Packet

DROPPED = "The gradients of this step were dropped on every rank."

Exchange = Callable[[Round], Sequence[Round]]  # tells every rank, and returns what every rank told


class Flight:
    """A bucket that is out."""

    def __init__(self, packet: Packet, pending: Pending) -> None:
        self.packet = packet
        self.pending = pending
        self.is_consumed = False

    def land(self) -> None:
        """Wait for the collective, and see to it that the result is in the flat tensor."""
        result = self.pending.wait()
        if result is not self.packet.flat:
            self.packet.flat.copy_(result.view_as(self.packet.flat))

    def release(self) -> None:
        """Let go of the memory: nobody is going to ask for these gradients again."""
        self.is_consumed = True
        self.packet.drop()
        del self.pending


def land(flights: Sequence[Flight]) -> None:
    """Wait for all buckets. Stages go on in plan order, the same on every rank."""
    while _advance(flights):
        pass
    for flight in flights:
        flight.land()


def linger(flights: Sequence[Flight]) -> None:
    """Sleep while the buckets travel, as long as that is no longer than usual. No result is looked at.

    What the ranks have to tell each other is there by then. To look out for it meanwhile would take the
    processor from the threads that move the buckets.
    """
    for flight in flights:
        if not flight.is_consumed and not flight.pending.linger():
            return


def _advance(flights: Sequence[Flight]) -> bool:
    """Start the next collective of every bucket that has one; tell whether any has."""
    has_any = False
    for flight in flights:
        has_any |= flight.pending.advance()
    return has_any


def land_in_rounds(
    flights: Sequence[Flight], exchange: Exchange, catch_up: Callable[[], bool], step: int
) -> None:
    """Wait for all buckets, and have every rank confirm each round; raise on all ranks if one fails.

    ``catch_up`` brings the ranks' collectives level then, or tells that this cannot be done.
    """
    more = True
    while more:
        try:
            more = _advance(flights)
            if not more:
                land(flights)
        except BaseException as error:
            exchange(Round(failure=words_of(error)))
            catch_up()
            raise
        _check(exchange(Round(more)), catch_up, step)


def _check(rounds: Sequence[Round], catch_up: Callable[[], bool], step: int) -> None:
    failed = {rank: told.failure for rank, told in enumerate(rounds) if told.failure}
    if failed:
        raise hook_failed(step, failed, is_over=not catch_up())
    going_on = [rank for rank, told in enumerate(rounds) if told.more]
    if 0 < len(going_on) < len(rounds):
        end = DROPPED if catch_up() else "Nothing can be reduced over this group any more."
        raise RanksDisagree(
            f"step {step}: the hook starts more collectives on {name_ranks(going_on)} than on the others. "
            f"A hook has to do the same on every rank. {end}"
        )


def hook_failed(step: int, failed: dict[int, str], *, is_over: bool) -> PeerFailed:
    """Say on the other ranks that a hook raised, and whether that is the end of it."""
    rank, text = min(failed.items())
    end = (
        "The ranks' collectives do not match any more, so nothing can be reduced over this group again. Mend "
        "the hook and start anew."
        if is_over
        else f"{DROPPED} Mend the hook, or catch this on every rank and go on with the next step."
    )
    return PeerFailed(
        f"step {step}: the communication hook raised on {name_ranks(sorted(failed))}: {text}\n{end}",
        rank,
        text,
    )
