"""Known values through every collective, before anything is made of what a link returns.

    every rank    comes to the board ── tensors of known values ── verdict ── bytes, other devices ── verdict

A link that garbles, swaps or loses data would otherwise look like ranks with different models. The verdict
is exchanged over the store of the group, never over what is being checked, so all ranks raise alike.
"""

import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed import DistError

from paceline.board import Board, board_of, wait_until
from paceline.comm import Comm, GroupComm, Pending
from paceline.errors import PeerLost, first_line, name_ranks
from paceline.hosts import this_place
from paceline.link_faults import Fault, How, communication_fault
from paceline.whereabouts import Whereabouts

LENGTHS = (1, 7, 4099)  # odd ones, below and above what transports treat as one piece
PATIENCE_SECONDS = 120.0  # for small messages, and a library's start, once every rank is there
GRACE_SECONDS = 5.0  # for the others to report, once a rank has
LOOK_SECONDS = 0.2  # how often a rank that waits looks at the board
KINDS = ("cpu", "cuda")

Start = Callable[[torch.Tensor], Pending]
Expected = Callable[[int, int], torch.Tensor]  # of a length and a salt


class _Stop(Exception):
    """A collective that cannot be waited for any longer."""

    def __init__(self, how: How, words: str) -> None:
        super().__init__(words)
        self.how = how


# The groups whose links were found right, and how often each was looked at. An entry ends with its group.
_passed: weakref.WeakSet[Any] = weakref.WeakSet()
_rounds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def preflight(comm: Comm, module: object, mesh: str = "") -> None:
    """Check the link, once for a group. Every rank calls this, whatever is wrong with its arguments.

    ``mesh`` says which dimension of a mesh the group is, if it is one.
    """
    if not isinstance(comm, GroupComm) or comm.size == 1 or comm.group in _passed:
        return
    comm.refuse_if_unfit()
    number = _rounds[comm.group] = _rounds.get(comm.group, 0) + 1
    try:
        whereabouts = Whereabouts(comm, mesh) if mesh else None
        _Preflight(comm, board_of(comm, f"preflight {number}"), _devices_of(module), whereabouts).run()
    except DistError as error:
        raise PeerLost(
            f"the store of the process group does not answer: {first_line(error)}. The process that hosts "
            "it has ended, or its machine cannot be reached."
        ) from error
    _passed.add(comm.group)


class _Preflight:
    """One look at one group."""

    def __init__(
        self,
        comm: GroupComm,
        board: Board | None,
        devices: Mapping[str, torch.device],
        whereabouts: Whereabouts | None = None,
    ) -> None:
        self._comm = comm
        self._board = board
        self._devices = devices
        self._whereabouts = whereabouts
        self._faults: list[Fault] = []
        self._is_stopped = False  # a collective did not end here: none that follows can match
        self._met_at: float | None = None  # when every rank was seen to have come
        self._trouble_at: float | None = None  # when another rank was seen to have reported a fault
        self._point = "first"

    def run(self) -> None:
        """Raise CommunicationFault on every rank if some rank was given wrong data, or none."""
        if self._board is not None:
            self._arrive(self._board)
        self._check_tensors(self._comm.working_device)
        self._settle("first")
        self._point = "second"
        for device in self._other_devices():
            self._check_tensors(device)
        # Only now: with wrong lengths, ranks would start collectives of different sizes.
        self._check_bytes()
        self._settle("second")

    # ---- who is here, and what is in use ---------------------------------------------------------

    def _arrive(self, board: Board) -> None:
        for kind in KINDS:
            # A device that is in use already may well be the next model's.
            if kind in self._devices or (kind == "cuda" and _is_cuda_used()):
                board.mark(f"wants {kind}")
            elif kind == "cuda" and not torch.cuda.is_available():
                board.mark(f"lacks {kind}")
        board.come("here")
        if self._whereabouts is not None:
            self._whereabouts.wait(lambda: board.is_full("here"), self._comm.seconds)

    def _other_devices(self) -> list[torch.device]:
        """Return this rank's devices of the kinds that models are on, on any rank."""
        used = self._comm.working_device.type
        kinds = [kind for kind in KINDS if kind != used and self._comm.backend_on(kind) is not None]
        board = self._board
        if board is None:  # nobody can say what the others' models are on
            return []
        wanted = [k for k in kinds if board.is_marked(f"wants {k}") and not board.is_marked(f"lacks {k}")]
        return [self._devices.get(kind) or torch.device(kind, torch.cuda.current_device()) for kind in wanted]

    # ---- known values ----------------------------------------------------------------------------

    def _check_tensors(self, device: torch.device) -> None:
        """Send tensors through the collectives, all at once, and compare what comes back."""
        out: list[tuple[str, Pending, torch.Tensor]] = []
        for collective, start, expected in _probes(self._comm, device):
            for length in LENGTHS:
                if self._is_stopped:
                    return
                salt = len(out) + 1  # what an earlier collective has left behind is not what is expected
                with self._noting(collective, device):
                    mine = _values(self._comm.rank, length, salt).to(device)
                    out.append((collective, start(mine), expected(length, salt)))
        for collective, pending, right in out:
            if self._is_stopped:
                return
            with self._noting(collective, device):
                self._compare(collective, device, self._finish(pending), right)

    def _compare(self, collective: str, device: torch.device, got: torch.Tensor, right: torch.Tensor) -> None:
        got, right = got.detach().cpu().flatten(), right.flatten()
        near = torch.isclose(got, right, rtol=1e-5, atol=0) if collective == "average" else got == right
        if not bool(near.all()):
            at = int((~near).nonzero()[0])
            words = f"element {at} of {len(right)} is {got[at].item():g} and has to be {right[at].item():g}"
            self._note(collective, device, "wrong", words)

    def _check_bytes(self) -> None:
        comm, device = self._comm, self._comm.working_device
        with self._noting("gather_bytes", device):
            if not self._is_stopped:
                got = comm.gather_bytes(_message(comm.rank), self._finish)
                right = [_message(rank) for rank in range(comm.size)]
                odd = [rank for rank in range(comm.size) if got[rank : rank + 1] != right[rank : rank + 1]]
                if odd:
                    shown = got[odd[0]][:16] if odd[0] < len(got) else b""
                    words = f"the message of rank {odd[0]} is {shown!r}... and has to be {right[odd[0]]!r}"
                    self._note("gather_bytes", device, "wrong", words)

    @contextmanager
    def _noting(self, collective: str, device: torch.device) -> Iterator[None]:
        """Make a fault of whatever goes wrong inside, and start no other collective."""
        try:
            yield
        except _Stop as stop:
            self._is_stopped = True
            self._note(collective, device, stop.how, str(stop))
        except Exception as error:
            self._refuse_absence(error)
            self._is_stopped = True
            self._note(collective, device, "raised", first_line(error.__cause__ or error))

    def _note(self, collective: str, device: torch.device, how: How, words: str) -> None:
        backend = self._comm.backend_on(device.type) or "an unknown backend"
        self._faults.append(Fault(collective, device.type, backend, how, words))

    # ---- waiting, but not for ever ---------------------------------------------------------------

    def _finish(self, pending: Pending) -> torch.Tensor:
        """Wait for a collective as long as a rank may still come, and for a while after all have."""
        start = looked = time.monotonic()
        while not pending.is_done():
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                self._look(start, now)
            time.sleep(min(max((now - start) / 8, 2e-5), 0.01))
        return pending.wait()

    def _look(self, start: float, now: float) -> None:
        """Give up on a collective that is not going to end."""
        if self._board is None:
            self._met_at = self._met_at or start
        elif self._met_at is None and self._board.is_full("here"):
            self._met_at = now
        elif self._trouble_at is None and self._board.is_marked(f"{self._point} trouble"):
            self._trouble_at = now
        patience = min(self._comm.seconds, PATIENCE_SECONDS)
        if self._trouble_at is not None and now - self._trouble_at > GRACE_SECONDS / 2:
            raise _Stop("left", "not before another rank reported a fault")
        if self._met_at is not None and now - max(self._met_at, start) > patience:
            raise _Stop("hung", f"not within {patience:g} s, although every rank had come")
        if now - start > self._comm.seconds:
            self._refuse_absence(None)

    def _refuse_absence(self, error: Exception | None) -> None:
        """Raise PeerLost if the reason is a rank that has not come, rather than the link."""
        board = self._board
        if board is None or wait_until(lambda: board.is_full("here"), lambda: GRACE_SECONDS / 2):
            return
        missing = sorted(set(range(self._comm.size)) - board.notes("here").keys())
        why = f": {first_line(error.__cause__ or error)}" if error else ""
        raise PeerLost(
            f"{name_ranks(missing)} did not come to replicate the model{why}. Look for the first rank that "
            "failed, its own message says why; if it is only slow, give the process group a longer timeout.",
            missing[0] if len(missing) == 1 else -1,
        ) from error

    # ---- the verdict -----------------------------------------------------------------------------

    def _settle(self, point: str) -> None:
        """Tell the others what was seen here, hear the same of them, and raise alike if it was wrong."""
        told = self._exchange(point, json.dumps([asdict(fault) for fault in self._faults]).encode())
        faults = {rank: [Fault(**fault) for fault in json.loads(note)] for rank, note in told.items()}
        silent = [rank for rank in range(self._comm.size) if rank not in faults]
        if any(faults.values()):
            raise communication_fault(faults, silent, self._places())
        if silent:
            raise PeerLost(
                f"{name_ranks(silent)} came to replicate the model, but did not end the check of the link. "
                "Look for the first rank that failed, its own message says why.",
                silent[0] if len(silent) == 1 else -1,
            )

    def _exchange(self, point: str, note: bytes) -> dict[int, bytes]:
        board = self._board
        if board is None:
            return self._exchange_over_the_group(note)
        if self._faults:
            board.mark(f"{point} trouble")
        board.come(point, note)
        start = time.monotonic()

        def seconds() -> float:
            """Return how long to wait in all: not much longer, once a rank has reported a fault."""
            if self._trouble_at is None and board.is_marked(f"{point} trouble"):
                self._trouble_at = time.monotonic()
            limit = 2 * min(self._comm.seconds, PATIENCE_SECONDS)
            return limit if self._trouble_at is None else self._trouble_at - start + GRACE_SECONDS

        wait_until(lambda: board.is_full(point), seconds)
        if board.is_full(point) and not board.is_marked(f"{point} trouble"):
            return dict.fromkeys(range(self._comm.size), b"[]")
        return board.notes(point)

    def _exchange_over_the_group(self, note: bytes) -> dict[int, bytes]:
        """Exchange the notes by what there is; if that is no use, this rank knows only its own."""
        mine = {**dict.fromkeys(range(self._comm.size), b"[]"), self._comm.rank: note}
        if self._is_stopped:
            return mine
        try:
            told = dict(enumerate(self._comm.gather_bytes(note, self._finish)))
            for other in told.values():
                json.loads(other)
        except (RuntimeError, ValueError, _Stop):
            return mine
        return told

    def _places(self) -> dict[int, str]:
        """Return where each rank runs, of those that say so in time."""
        board = self._board
        if board is None:
            return {self._comm.rank: this_place()}
        board.come("place", this_place().encode())
        wait_until(lambda: board.is_full("place"), lambda: GRACE_SECONDS)
        return {rank: place.decode() for rank, place in board.notes("place").items()}


# ---- what goes through --------------------------------------------------------------------------------


def _probes(comm: GroupComm, device: torch.device) -> Iterator[tuple[str, Start, Expected]]:
    """Yield what is checked: a name, how it is started, and what has to come of it."""

    def everyone(length: int, salt: int) -> torch.Tensor:
        return torch.stack([_values(rank, length, salt) for rank in range(comm.size)])

    last = comm.size - 1
    yield "gather_bytes", comm.gather_small, everyone
    yield "gather", comm.gather, everyone
    yield "total", comm.total, lambda length, salt: everyone(length, salt).sum(0)
    if comm.mean_factor(device) == 1:
        yield "average", comm.average, lambda length, salt: everyone(length, salt).mean(0)
    yield "broadcast", comm.broadcast, lambda length, salt: _values(0, length, salt)
    yield "broadcast", lambda flat: comm.broadcast(flat, last), lambda n, salt: _values(last, n, salt)


def _values(rank: int, length: int, salt: int) -> torch.Tensor:
    """Return what one rank sends: other numbers at each place, in each rank and in each collective.

    Small whole numbers, whose sum over any number of ranks is exact in whatever order it is taken.
    """
    return ((torch.arange(length, device="cpu") * 7 + rank * 31 + salt * 53) % 251).float()


def _message(rank: int) -> bytes:
    return b"paceline rank %d." % rank + b"~" * (2 * (rank % 5) + 1)


def _devices_of(module: object) -> dict[str, torch.device]:
    """Return a device of each kind that the module's tensors are on; of anything else, none."""
    if not isinstance(module, nn.Module):
        return {}
    tensors = (*module.buffers(), *module.parameters())
    return {tensor.device.type: tensor.device for tensor in tensors}


def _is_cuda_used() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
