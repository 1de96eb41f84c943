"""The passes of distributed autograd that a replica takes part in, and what has become of each.

    forward    note_forward()     in which context the module was called, and by whom
    backward   begin()            the first gradient arrives: of which pass is it?
    its end    end(), fail()      agreed on by all ranks, this rank's only, or failed

No gradient says which pass it is of. It is of the pass whose backward this thread has called, if it has
called one; else of the only one that is due and holds a gradient of that parameter. If two passes run at
once, the second waits for its turn, and the ranks tell each other in every opening whose turn it is: where
they differ, all of them refuse.
"""

import contextlib
import enum
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from paceline.errors import RanksDisagree
from paceline.remote import Context
from paceline.riders import Rider
from paceline.torch_private import context_number, current_task, pass_watch, raise_at_end

_CROWDED, _ALONE = b"\1", b"\0"
_CONTEXT = "context "
_NOBODY = "a call from another process"


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

    def settle(self, stage: Stage, error: BaseException | None = None) -> None:
        """Note how it has ended."""
        self.stage, self.error, self.is_due, self.is_closing = stage, error, False, False
        gradients = self.context.gradients() if self.context is not None and self.is_live else {}
        self.versions = {parameter: gradient._version for parameter, gradient in gradients.items()}


class Passes(Rider):
    """The passes of one replica; ``present`` is the one whose backward is open."""

    def __init__(self) -> None:
        self._known: dict[int, Pass] = {}
        self.present: Pass | None = None
        self.opening = threading.Condition()  # several threads may bring the first gradients of a pass
        self.refused: list[RuntimeError] = []  # the other ranks hear of it when the present one is over
        self._turn = threading.RLock()
        self._task = -1
        self._refused_tasks: deque[int] = deque(maxlen=64)
        self._threads_mixed = False  # contexts of several threads were open at once
        self._is_shared = False  # the ranks are called in common contexts

    def note_forward(self) -> bool:
        """Note the context that a forward of the module runs in; tell whether it runs in one."""
        number = context_number()
        if number is None:
            return False
        found = self._known_or_new(number)
        found.has_forward = found.is_due = True
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
            raise _at_once()

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
                self._known.pop(other, None)
        return self._known.setdefault(number, Pass(Context(number)))

    def _others(self, one: Pass) -> list[Pass]:
        return [each for each in self._known.copy().values() if each is not one and each.is_live]

    # ---- a backward ------------------------------------------------------------------------------

    def find(self, first: torch.Tensor, came: torch.Tensor | None, *, is_taken: bool) -> Pass | None:
        """Find out which pass a backward is of, by its first gradient; None for an ordinary backward.

        ``came`` is what autograd has brought for that parameter.
        """
        found = self._pass_of(first, came)
        # A gradient that is nowhere to be seen belongs to a context that nobody has told us of.
        return Pass(None) if found is None and first.grad is None and not is_taken else found

    def begin(self, found: Pass | None) -> None:
        """Note the backward that opens now."""
        self.present, self._task = found, current_task()
        if found is not None and found.context is not None and not found.is_live and not self.is_over:
            raise RuntimeError(
                f"the context {found.context.number} of distributed autograd has ended before its backward "
                "had its turn. Run one pass at a time through a replica"
            )

    def _pass_of(self, first: torch.Tensor, came: torch.Tensor | None) -> Pass | None:
        called = pass_watch.context
        if called is not None and (found := self._known_or_new(called)).holds(first):
            return found
        holding = [each for each in self._known.copy().values() if each.holds(first)]
        # A pass that has ended once, and is to come again, holds the gradients that it had then.
        new = [each for each in holding if each is not self.present and each.has_changed(first)]
        due = [each for each in new if each.is_due or each.is_called]
        if len(due) > 1 and came is not None and came.layout is torch.strided:
            # What comes fresh is put into its context as it is.
            due = [each for each in due if each.gradient_of(first).data_ptr() == came.data_ptr()] or due
        if len(due) > 1:
            raise _at_once()
        # A pass of another process may come again, and we have not heard of the call.
        again = [each for each in holding if not _is_ours(each) and each.has_changed(first)]
        found_again = again[0] if len(again) == 1 else None
        return due[0] if due else found_again

    @property
    def is_over(self) -> bool:
        """Whether the backward that this thread works for has failed here: what still comes is of no use."""
        found = self.present
        if found is None or found.stage is not Stage.FAILED or found.is_due:
            return current_task() in self._refused_tasks
        if found.error is not None:  # all ranks have refused it before it had begun here
            self.refuse(found.error)
        return True

    @property
    def is_called(self) -> bool:
        """Whether a thread of this process is in the backward of a pass, and hears how it ends."""
        return any(each.is_called for each in self._known.copy().values())

    @property
    def has_turn(self) -> bool:
        """Whether this thread works for the backward that is open."""
        return current_task() == self._task

    def refuse_second(self) -> None:
        """End another backward than the open one, where it cannot wait for its turn."""
        if current_task() in self._refused_tasks:
            return
        others = [each for each in self._known.copy().values() if each is not self.present]
        meant = [each for each in others if each.is_called or each.is_due]
        self.refuse(self.give_way(meant[0] if len(meant) == 1 else Pass(None)))

    def give_way(self, second: Pass) -> RuntimeError:
        """Let a pass fail because another backward is open; the other ranks hear of it when that is over."""
        error = _at_once()
        self.refused.append(error)
        second.settle(Stage.FAILED, error)
        return error

    def refuse(self, error: BaseException) -> None:
        """Have the backward that this thread works for end with an exception, whatever else it computes."""
        if current_task() not in self._refused_tasks:
            self._refused_tasks.append(current_task())
            raise_at_end(error)

    def lent(self, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Let parameters have the gradients of the present pass inside, if there is one."""
        if self.present is None:
            return contextlib.nullcontext()
        self.present.is_closing = True
        context = self.present.context
        return contextlib.nullcontext() if context is None else context.lent(parameters)

    def end(self, stage: Stage, error: BaseException | None = None) -> None:
        """Note how the present pass has ended."""
        if self.present is not None:
            self.present.settle(stage, error)
        self.present, self._task = None, -1

    def ended_early(self) -> bool:
        """Tell whether the present pass can never end: its context has, and nothing is being reduced."""
        return self.present is not None and not self.present.is_closing and not self.present.is_live

    # ---- who reduces what ------------------------------------------------------------------------

    def opens(self, step: int) -> bytes:
        if self.present is None or self.present.context is None:
            return b""
        crowded = self._threads_mixed or any(
            other.is_due and not _is_ours(other) for other in self._others(self.present)
        )
        return (_CROWDED if crowded else _ALONE) + self.present.who.encode()

    def opened(self, step: int, told: Sequence[bytes], present: Sequence[int]) -> None:
        """Refuse, on every rank, to average different passes where several run at once on some."""
        if not any(told):
            return
        whose = {rank: told[rank][1:].decode() for rank in present if told[rank]}
        is_one = len(set(whose.values())) == 1 and "" not in whose.values()
        self._is_shared |= is_one and len(whose) > 1 and _CONTEXT in next(iter(whose.values()))
        is_crowded = self._is_shared or any(told[rank].startswith(_CROWDED) for rank in whose)
        if not whose or is_one or not is_crowded:
            return
        where = ", ".join(f"rank {rank} that of {who or _NOBODY}" for rank, who in whose.items())
        error = RanksDisagree(
            f"step {step}: several passes of distributed autograd run at once, and the ranks reduce "
            f"different ones: {where}. Run one pass at a time through a replica, or give each thread a "
            "replica over a process group of its own. No context was changed."
        )
        for each in self._known.copy().values():
            if each.who.startswith(_CONTEXT) and each.who in whose.values() and each is not self.present:
                each.settle(Stage.FAILED, error)  # here its turn has not come, and never will
        raise error

    # ---- the guard -------------------------------------------------------------------------------

    def holding(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose gradients are in a context that has not ended."""
        known = [each for each in self._known.copy().values() if each.is_live]
        return [p for p in parameters if p.grad is None and any(each.holds(p) for each in known)]

    def unsynced(self, number: int, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Return those parameters, with their gradients, whose gradients in a context only this rank has."""
        found = self._known.get(number)
        if found is not None and found.stage is Stage.AGREED and found is not self.present:
            return {}
        gradients = Context(number).gradients()
        return {parameter: gradients[parameter] for parameter in parameters if parameter in gradients}

    def why_unsynced(self, number: int) -> str:
        """Say what has become of a pass, and what helps."""
        found = self._known.get(number)
        if found is not None and found is self.present:
            return "Its backward is still running: step after it"
        if found is not None and found.stage is Stage.LOCAL:
            return (
                "They were computed inside no_sync() or accumulate(): run one backward of the same context "
                "outside of it before the step"
            )
        return "Its backward has failed, or was never reduced: run the pass again in a new context"


def _is_ours(one: Pass) -> bool:
    return one.context is not None and one.context.is_ours


def _at_once() -> RuntimeError:
    return RuntimeError(
        "two backwards run at once through one replica, in different passes of distributed autograd. Run one "
        "pass at a time, or give each thread a replica over a process group of its own"
    )


def _name_of_thread() -> str:
    """Name this thread as on every rank; empty for one that serves calls, which has no name of its own."""
    name = threading.current_thread().name
    return "" if name.startswith("Dummy-") else f"thread {name}"
