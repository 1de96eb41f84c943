"""What is said of a rank that cannot be heard any more, and of a process that has closed its own links."""

import errno

from paceline.errors import PeerLost, PeerTimeout

UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
FORKED = "it is a fork of a rank: only the process that has made a replica may use it"
TORN = "it was interrupted in the middle of a frame: start the run again from a checkpoint"


class ClosedHere(OSError):
    """A link that this process itself has closed."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EBADF, why)


def gone(rank: int, error: Exception | None = None) -> PeerLost:
    """Say that a rank has ended."""
    if isinstance(error, ClosedHere):
        return PeerLost(f"this process has closed its connections to the other ranks: {error.strerror}")
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return PeerLost(
            f"rank {rank} is gone: its machine does not answer any more ({error.strerror}). The machine is "
            "down, or the network to it is.",
            rank,
        )
    if isinstance(error, TimeoutError):
        return PeerLost(
            f"rank {rank} is gone: it did not share its memory in time. Look at what that rank is doing.",
            rank,
        )
    return PeerLost(
        f"rank {rank} is gone: it closed its connection. Its process has ended, or it left the world "
        "early; its own last message says why.",
        rank,
    )


def stuck(rank: int, nbytes: int) -> PeerTimeout:
    """Say that a rank reads nothing."""
    return PeerTimeout(
        f"rank {rank} has left {nbytes:,} bytes of control frames unread. It is stuck; look at what that "
        "rank is doing.",
        rank,
    )
