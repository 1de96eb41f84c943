"""What a replica does about exceptions: it tells the other ranks, forgets the gradients, and trains on.

raised here        told to the others in the frames of its backward, or of one that is opened for it
told by others     known to all ranks already: nothing is told again
a peer is lost     nothing can be told or reduced any more
too late           the others have stepped: this rank is behind, and says so in the next backward
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from paceline.backward import LocalBackward, SyncedBackward, TooLate
from paceline.errors import InputsExhausted, PeerFailed, PeerLost, RanksDisagree, words_of
from paceline.frames import Kind
from paceline.tally import BACKWARD
from paceline.wiring import Wiring

LOOP = "in its loop"
HALF_TOLD = (
    "it did not come to the end of telling the others of an exception: start the run again from a checkpoint"
)


class Engine(Protocol):
    """What reduces the gradients of a replica, as far as exceptions are concerned."""

    name: bytes
    step: int

    @property
    def parameters(self) -> Sequence[torch.Tensor]: ...

    @property
    def wiring(self) -> Wiring: ...

    @property
    def wants_sync(self) -> bool: ...

    @property
    def has_closed(self) -> bool: ...

    @property
    def open_backward(self) -> SyncedBackward | LocalBackward | None: ...

    def start_synced(
        self, kind: Kind = ..., *, failure: str = "", where: str = BACKWARD
    ) -> SyncedBackward: ...

    def end_backward(self) -> None: ...

    def undo_local(self) -> None: ...

    def drop_gradients(self) -> None: ...

    def note_disagreement(self, error: RanksDisagree) -> None: ...

    def note_failure(self, step: int, text: str) -> None: ...


class Trouble:
    """The exceptions of one replica, its own and other ranks'."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = weakref.proxy(engine)
        self._peer_lost: PeerLost | None = None
        self.broken = ""  # how this rank failed when the others could not be told any more

    def forget(self) -> None:
        """Begin anew, with other ranks."""
        self._peer_lost, self.broken = None, ""

    # ---- lost peers ------------------------------------------------------------------------------

    @property
    def lost(self) -> Exception | None:
        """Why nothing can be reduced any more."""
        return self._peer_lost or self._engine.wiring.control.ended

    def check_usable(self) -> None:
        """Raise if nothing can be sent any more."""
        if (lost := self.lost) is not None:
            rank = getattr(lost, "rank", -1)
            raise PeerLost(f"no reduction is possible any more: {lost}", rank) from lost

    def __enter__(self) -> None:
        """Note a peer that is lost inside. Around whatever waits for others; may be entered several times."""

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, PeerLost):
            self._peer_lost = error

    # ---- a backward that raised ------------------------------------------------------------------

    def on_failing(self, error: BaseException, leaves: Callable[[], set[int]]) -> None:
        """Open, as failed, what was going to be opened. Waits for nobody."""
        if getattr(error, "is_known", False) or self.has_told(error):
            return
        engine = self._engine
        if engine.open_backward is None and self.lost is None and self._was_to_be_reduced(leaves):
            with contextlib.suppress(PeerLost):
                engine.start_synced(failure=words_of(error))

    def _was_to_be_reduced(self, leaves: Callable[[], set[int]]) -> bool:
        """Tell whether a backward that raised before our first gradient was going to be reduced here."""
        if self._engine.has_closed or not self._engine.wants_sync:
            return False
        return any(id(parameter) in leaves() for parameter in self._engine.parameters)

    def on_raised(self, error: BaseException) -> None:
        """Settle the matter with the other ranks before the user sees the error."""
        engine = self._engine
        backward = engine.open_backward
        if backward is None or isinstance(backward, LocalBackward):
            engine.end_backward()
            engine.undo_local()
            if self.lost is not None:
                engine.drop_gradients()
            return
        engine.note_failure(backward.step + 1, words_of(error))
        if isinstance(error, PeerLost):
            self._peer_lost = self._peer_lost or error
        try:
            if self.lost is None:
                self.settle(backward, error)
            else:
                backward.tell_across(error)
                engine.drop_gradients()
        finally:
            # What is told needs to know that a backward is under way: only now it is over.
            engine.end_backward()
        if backward.is_out_of_step:
            self._end_for_good(error)

    def _end_for_good(self, error: BaseException) -> None:
        """End every replica over this group: what it sends next would meet what the hook has left behind."""
        own = PeerFailed(
            f"the communication hook raised on this rank: {words_of(error)}", text=words_of(error)
        )
        known = isinstance(error, PeerFailed | PeerLost | RanksDisagree)
        self._engine.wiring.control.ended = error if known else own  # type: ignore[assignment]

    def settle(self, backward: SyncedBackward, error: BaseException) -> None:
        """Tell the other ranks what happened here, and forget the gradients."""
        backward.tell_across(error)
        failure = words_of(error)
        try:
            self._tell(backward, failure)
        except (PeerFailed, RanksDisagree, InputsExhausted):
            pass  # the others had something to say as well; this rank raises its own exception
        except TooLate:
            self.broken = failure
        except PeerLost as trouble:
            error.add_note(f"paceline could not tell the other ranks: {trouble}")
        except BaseException as trouble:
            if not backward.is_over:
                # Half told: what this rank tells next would pass for what is missing.
                self._engine.wiring.control.close(HALF_TOLD)
            error.add_note(f"paceline could not tell the other ranks: {trouble}")
            if not isinstance(trouble, Exception):
                raise
        finally:
            if backward.is_behind:
                self.broken = failure
            _told_by(error)[self._engine.name] = self._engine.step
            self._engine.drop_gradients()
            if isinstance(error, RanksDisagree):
                self._engine.note_disagreement(error)

    def _tell(self, backward: SyncedBackward, failure: str) -> None:
        with self:
            try:
                backward.abandon(failure)
            finally:
                self._engine.step = backward.step + (not backward.is_void)

    # ---- exceptions from elsewhere ---------------------------------------------------------------

    def tell(self, error: BaseException, where: str = LOOP) -> None:
        """Let the others know, in their next backward, that an exception has come in its place here."""
        self.open(error, where)
        backward = self._engine.open_backward
        if isinstance(backward, SyncedBackward):
            try:
                self.settle(backward, error)
            finally:
                self._engine.end_backward()

    def open(self, error: BaseException, where: str = LOOP) -> None:
        """Say so, without waiting for anybody."""
        is_told = self.has_told(error) or getattr(error, "is_known", False)
        if not is_told and self._is_free:
            with contextlib.suppress(PeerLost):
                self._engine.start_synced(failure=words_of(error), where=where)

    @property
    def _is_free(self) -> bool:
        return self.lost is None and self._engine.open_backward is None

    def has_told(self, error: BaseException) -> bool:
        """Tell whether the others know of an exception, and nothing has begun here since."""
        return _told_by(error).get(self._engine.name) == self._engine.step

    def forget_told(self, error: BaseException, before: int) -> None:
        """Hear that an exception was raised anew since a step, be it an object that was raised before."""
        if _told_by(error).get(self._engine.name, before) <= before:
            _told_by(error).pop(self._engine.name, None)

    def say_goodbye(self) -> None:
        """Say, where that waits for nobody, that no backward follows; ranks that go on are told so."""
        if self._engine.wiring.control.posts_alone and self._is_free:
            with contextlib.suppress(PeerLost):
                self._engine.start_synced(Kind.LEFT)
            self._engine.end_backward()


def tell_all(troubles: Iterable[Trouble], error: BaseException, where: str = LOOP) -> None:
    """Let the others know of an exception in several replicas. All say so before one waits."""
    several = list(dict.fromkeys(troubles))
    for trouble in several:
        trouble.open(error, where)
    for trouble in several:
        trouble.tell(error, where)


def _told_by(error: BaseException) -> dict[bytes, int]:
    """Return, by replicas that have told the other ranks of an exception, at which step they were then."""
    told: dict[bytes, int] = error.__dict__.setdefault("_paceline_told", {})
    return told
