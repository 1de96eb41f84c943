"""The passes of distributed autograd that a replica takes part in, and what has become of each.

    forward    note_forward()     in which context the module was called, and by whom
    backward   find(), claim()    the first gradient arrives: of which pass is it?
               begin()            it has computed everything, and its turn has come
    its end    end()              agreed on by all ranks, this rank's only, or failed

No gradient says which pass it is of. It is of the pass whose backward this thread has called, if it has
called one; else of the only one that is due and holds a gradient of that parameter. Several passes may
compute at once. They are reduced one by one, in the order in which they end, and the ranks tell each other
in every opening whose turn it is: where they differ, all of them refuse.
"""

import contextlib
import enum
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from paceline.errors import RanksDisagree, words_of
from paceline.remote import Context, unknown_context
from paceline.riders import Rider
from paceline.tally import peer_failed
from paceline.torch_private import context_number, current_task
from paceline.watches.passes import pass_watch

_CROWDED, _ALONE = "\1", "\0"
_CONTEXT = "context "
_NOBODY = "a call from another process"
_MANY = 64  # passes of which nobody says that they have failed are forgotten some time


class Stage(enum.Enum):
    """What the gradients of a pass are."""

    COMPUTED = enum.auto()  # none yet: only a forward has run here
    LOCAL = enum.auto()  # this rank's only
    AGREED = enum.auto()
    FAILED = enum.auto()


@dataclass(eq=False)
class Pass:
    """One pass, seen from one replica."""

    context: Context | None  # None: nobody has told us of it
    who: str = ""  # the thread that runs it, or what all processes call it; empty if neither is known
    stage: Stage = Stage.COMPUTED
    has_forward: bool = False
    is_due: bool = False  # a backward is to come
    is_called: bool = False  # a thread of this process is in its backward
    has_come: bool = False  # a gradient of it was seen here
    is_open: bool = False  # it is computing gradients, or they wait to be reduced
    is_closing: bool = False  # its gradients are being reduced, on some thread
    error: BaseException | None = None
    versions: dict[torch.Tensor, int] = field(default_factory=dict)  # of its gradients, when it had ended

    @property
    def is_live(self) -> bool:
        """Whether its context has not ended."""
        return self.context is not None and self.context.is_live

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether it has computed a gradient of this parameter."""
        return self.is_live and self.context is not None and self.context.holds(parameter)

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient that it holds."""
        assert self.context is not None
        return self.context.gradients()[parameter]

    def has_changed(self, parameter: torch.Tensor) -> bool:
        """Tell whether its gradient was written since it had ended."""
        return self.gradient_of(parameter)._version != self.versions.get(parameter, -1)

    def arrived(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return which parameters have got a gradient since all ranks had agreed on what it holds."""
        gradients = self.context.gradients() if self.context is not None else {}
        held = [(index, p) for index, p in enumerate(parameters) if p in gradients]
        is_new = self.stage is not Stage.AGREED
        return [i for i, p in held if is_new or gradients[p]._version != self.versions.get(p, -1)]

    def settle(self, stage: Stage, error: BaseException | None = None) -> None:
        """Note how it has ended."""
        self.stage, self.error = stage, error
        self.is_due = self.is_open = self.is_closing = False
        gradients = self.context.gradients() if self.context is not None and self.is_live else {}
        self.versions = {parameter: gradient._version for parameter, gradient in gradients.items()}


class Passes(Rider):
    """The passes of one replica; ``present`` is the one that is being reduced."""

    def __init__(self) -> None:
        self._known: dict[int, Pass] = {}
        self._ended: list[Pass] = []  # their contexts have, but their last gradients may be still to come
        self._claims: dict[int, Pass] = {}  # by the number of the backward that computes it
        self.present: Pass | None = None
        self._turn = threading.RLock()
        self._threads_mixed = False  # contexts of several threads were open at once
        self._is_shared = False  # the ranks are called in common contexts

    def note_forward(self) -> bool:
        """Note the context that a forward of the module runs in; tell whether it runs in one."""
        number = context_number()
        if number is None:
            return False
        found = self._known_or_new(number)
        if found.is_open and not found.is_closing:
            self.drop_claim(found)  # it has failed elsewhere, and is run again
        found.has_forward = found.is_due = True
        found.error = None
        assert found.context is not None
        if found.context.is_ours:
            found.who = _name_of_thread()
            others = [other for other in self._others(found) if other.context and other.context.is_ours]
            self._threads_mixed |= any(not found.who or other.who != found.who for other in others)
        else:
            found.who = f"{_CONTEXT}{number}"
        return True

    def note_call(self, number: int) -> None:
        """Note that a thread calls the backward of a pass."""
        found = self._known_or_new(number)
        found.is_called = True
        found.is_due = found.has_forward
        found.error = None
        if not found.is_live:
            raise RuntimeError(
                f"the context {number} of distributed autograd has ended, and its gradients with it. Call "
                "backward(), and the step of a DistributedOptimizer, inside `with "
                "torch.distributed.autograd.context()`"
            )

    def note_return(self, number: int) -> None:
        """Note that a call of a pass's backward is over."""
        if (found := self._known.get(number)) is not None:
            found.is_called = False
            found.is_due &= found.is_closing

    def check_reduced(self, number: int, parameters: Sequence[torch.Tensor]) -> None:
        """Raise if a backward has returned whose gradients went by unseen, into another one that was open."""
        found = self._known.get(number)
        if found is None or not found.is_due or found.is_closing or found.context is None:
            return
        if not found.context.gradients().keys().isdisjoint(parameters):
            raise at_once()

    def turn_of(self, number: int) -> AbstractContextManager[object]:
        """Wait inside until no other pass through this replica is in a backward that this process called."""
        found = self._known.get(number)
        return self._turn if found is not None and found.has_forward else contextlib.nullcontext()

    def get(self, number: int) -> Pass | None:
        """Return a pass by the number of its context."""
        return self._known.get(number)

    def _known_or_new(self, number: int) -> Pass:
        for other in [n for n, each in self._known.copy().items() if n != number and not each.is_live]:
            if self._known.get(other) is not self.present:  # another thread may do the same
                ended = self._known.pop(other, None)
                if ended is not None and ended.stage in (Stage.COMPUTED, Stage.FAILED):
                    self._ended = [*self._ended[-_MANY:], ended]
        return self._known.setdefault(number, Pass(Context(number)))

    def _others(self, one: Pass) -> list[Pass]:
        return [each for each in self._known.copy().values() if each is not one and each.is_live]

    # ---- a backward ------------------------------------------------------------------------------

    def find(self, first: torch.Tensor, came: torch.Tensor | None, *, is_taken: bool) -> Pass | None:
        """Find out which pass a backward is of, by its first gradient; None for an ordinary backward.

        ``came`` is what autograd has brought for that parameter.
        """
        found = self._pass_of(first, came)
        if found is not None or first.grad is not None or is_taken:
            return found
        # A gradient that is nowhere to be seen: its context has ended, or nobody has told us of it.
        late = (each for each in self._gone() if not each.has_come)
        return next(late, None) or Pass(None, error=unknown_context())

    def _gone(self) -> list[Pass]:
        """Return passes that other processes have begun and given up, the first one first."""
        known = [*self._ended, *self._known.copy().values()]
        return [each for each in known if each.who.startswith(_CONTEXT) and not each.is_live]

    def gone(self, whose: Sequence[str]) -> Pass | None:
        """Return a pass that others wait for, and of which nobody has said yet that it fails here."""
        missed = [each for each in self._gone() if each.who in whose and each.stage is Stage.COMPUTED]
        return missed[0] if missed else None

    def _pass_of(self, first: torch.Tensor, came: torch.Tensor | None) -> Pass | None:
        called = pass_watch.context
        if called is not None and (found := self._known_or_new(called)).holds(first):
            return found
        holding = [each for each in self._known.copy().values() if each.holds(first)]
        # A pass that has ended once, and is to come again, holds the gradients that it had then.
        new = [each for each in holding if not each.is_open and each.has_changed(first)]
        due = _brought([each for each in new if each.is_due or each.is_called], first, came)
        if len(due) > 1:
            return Pass(None, error=at_once())
        # A pass of another process may come again, and we have not heard of the call.
        again = _brought([each for each in new if not _is_ours(each)], first, came)
        found_again = again[0] if len(again) == 1 else None
        return due[0] if due else found_again

    def claim(self, found: Pass) -> None:
        """Note that the backward that this thread works for is of a pass."""
        found.has_come = found.is_open = True
        self._claims[current_task()] = found
        for task in list(self._claims)[:-_MANY]:
            self._claims.pop(task).is_open = False

    @property
    def has_claim(self) -> bool:
        """Whether the backward that this thread works for is known to be of a pass."""
        return current_task() in self._claims

    @property
    def is_first(self) -> bool:
        """Whether no other pass has begun to compute before this one, and may still end."""
        for task, each in self._claims.copy().items():
            if task == current_task():
                break
            if each.is_open and each.is_live:
                return False
        return True

    def take_claim(self) -> Pass | None:
        """Return the pass that the backward is of which this thread works for, when it has ended."""
        return self._claims.pop(current_task(), None)

    def drop_claim(self, found: Pass) -> None:
        """Hear that the backward of a pass has raised."""
        found.is_open = False
        for task, each in self._claims.copy().items():  # another thread may claim one meanwhile
            if each is found:
                self._claims.pop(task, None)

    def refuse_ordinary(self) -> None:
        """Refuse an ordinary backward, whose gradients could be taken for those of a pass."""
        if any(each.is_open and each.is_live for each in self._claims.copy().values()):
            raise at_once()

    def begin(self, found: Pass) -> None:
        """Note that the gradients of a pass are reduced from now on."""
        self.present, found.is_closing = found, True
        found.error = self.why_not(found)

    def why_not(self, found: Pass) -> BaseException | None:
        """Say why a pass cannot be reduced, if it cannot."""
        if found.error is None and found.context is not None and not found.is_live:
            return _too_late(found.context)
        return found.error

    @property
    def is_called(self) -> bool:
        """Whether a thread of this process is in the backward of a pass, and hears how it ends."""
        return any(each.is_called for each in self._known.copy().values())

    def lent(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Let parameters have the gradients of the present pass inside."""
        context = self.present.context if self.present is not None else None
        return contextlib.nullcontext() if context is None else context.lent(parameters)

    def end(self, stage: Stage, error: BaseException | None = None) -> None:
        """Note how the present pass has ended."""
        if self.present is not None:
            self.present.settle(stage, error)
        self.present = None

    # ---- who reduces what ------------------------------------------------------------------------

    def opens(self, step: int) -> bytes:
        if self.present is None:
            return b""
        crowded = self._threads_mixed or any(
            other.is_due and not _is_ours(other) for other in self._others(self.present)
        )
        why = words_of(self.present.error) if self.present.error is not None else ""
        return f"{_CROWDED if crowded else _ALONE}{self.present.who}\0{why}".encode()

    def opened(self, step: int, told: Sequence[bytes], present: Sequence[int]) -> None:
        """Refuse, on every rank, to average different passes where several run at once on some."""
        if not any(told):
            return
        said = {rank: told[rank].decode() for rank in present if told[rank]}
        whose = {rank: who_of(text) for rank, text in said.items()}
        refused = {rank: why for rank, text in said.items() if (why := text[1:].partition("\0")[2])}
        is_one = len(set(whose.values())) == 1 and "" not in whose.values()
        self._is_shared |= is_one and len(whose) > 1 and _CONTEXT in next(iter(whose.values()))
        is_crowded = self._is_shared or any(text.startswith(_CROWDED) for text in said.values())
        if refused:
            own = self.present.error if self.present is not None else None
            self._give_up(set(whose.values()), error := peer_failed(step, refused))
            raise error if own is None else own
        if whose and not is_one and is_crowded:
            self._give_up(set(whose.values()), differ := _differ(step, whose))
            raise differ

    def _give_up(self, whose: set[str], error: Exception) -> None:
        """Let passes fail that other ranks have given up: when they have ended here, that is known."""
        for each in [*self._ended, *self._known.copy().values()]:
            if each.who.startswith(_CONTEXT) and each.who in whose and each is not self.present:
                each.stage, each.error, each.is_due = Stage.FAILED, error, False

    # ---- the guard -------------------------------------------------------------------------------

    def holding(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose gradients are in a context that has not ended."""
        known = [each for each in self._known.copy().values() if each.is_live]
        return [p for p in parameters if p.grad is None and any(each.holds(p) for each in known)]

    def unsynced(self, number: int, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return those parameters, with their gradients, whose gradients in a context only this rank has."""
        found = self._known.get(number)
        if found is not None and found.stage is Stage.AGREED and not found.is_open:
            return {}
        gradients = Context(number).gradients()
        return {parameter: gradients[parameter] for parameter in parameters if parameter in gradients}

    def why_unsynced(self, number: int) -> str:
        """Say what has become of a pass, and what helps."""
        found = self._known.get(number)
        if found is not None and found.is_open:
            return "Its backward is still running: step after it"
        if found is not None and found.stage is Stage.LOCAL:
            return (
                "They were computed inside no_sync() or accumulate(): run one backward of the same context "
                "outside of it before the step"
            )
        return "Its backward has failed, or was never reduced: run the pass again in a new context"


def _is_ours(one: Pass) -> bool:
    return one.context is not None and one.context.is_ours


def _brought(some: list[Pass], first: torch.Tensor, came: torch.Tensor | None) -> list[Pass]:
    """Return, of several passes, the one that a gradient is of, if that can be seen."""
    if len(some) < 2 or came is None or came.layout is not torch.strided:
        return some
    # What comes fresh is put into its context as it is.
    return [each for each in some if each.gradient_of(first).data_ptr() == came.data_ptr()] or some


def _too_late(context: Context) -> RuntimeError:
    return RuntimeError(
        f"the context {context.number} of distributed autograd has ended before its backward had its turn. "
        "Run one pass at a time through a replica"
    )


def who_of(told: str) -> str:
    """Return, of what a rank says when it opens a backward, whose pass that is."""
    return told[1:].partition("\0")[0]


def _differ(step: int, whose: dict[int, str]) -> RanksDisagree:
    where = ", ".join(f"rank {rank} that of {who or _NOBODY}" for rank, who in whose.items())
    return RanksDisagree(
        f"step {step}: several passes of distributed autograd run at once, and the ranks reduce different "
        f"ones: {where}. Run one pass at a time through a replica, or give each thread a replica over a "
        "process group of its own. No context was changed."
    )


def at_once() -> RuntimeError:
    """Say that two backwards run at once which cannot be told apart."""
    return RuntimeError(
        "two backwards run at once through one replica, in different passes of distributed autograd. Run one "
        "pass at a time, or give each thread a replica over a process group of its own"
    )


def _name_of_thread() -> str:
    """Name this thread as on every rank; empty for one that serves calls, which has no name of its own."""
    name = threading.current_thread().name
    return "" if name.startswith("Dummy-") else f"thread {name}"
