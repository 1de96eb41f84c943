"""The gate through which passes of distributed autograd come to a replica, to be reduced one at a time.

    a gradient           open()               of which pass is it? nothing is sent while it computes
    the end of a pass    on_backward_end()    its gradients are reduced, all at once

Its engine says neither which pass a gradient is of, nor that a pass has failed. The gate is told by the
module's forward, and by the door of ``torch.distributed.autograd.backward`` in the process that calls it.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from paceline.backward import LocalBackward, SyncedBackward
from paceline.passes import Pass, Passes, Stage, at_once
from paceline.tally import BACKWARD
from paceline.torch_private import current_task, is_dtensor
from paceline.trouble import Trouble
from paceline.watches.engine import engine_watch

LOOK_SECONDS = 0.02  # how often a pass looks whether its turn has come
GIVE_WAY_SECONDS = 10.0  # how long it lets one go first that began before it, and may have failed elsewhere


class Engine(Protocol):
    """What reduces the gradients of a replica, as far as the gate works with it."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]: ...

    @property
    def wants_sync(self) -> bool: ...

    @property
    def open_backward(self) -> SyncedBackward | LocalBackward | None: ...

    def open_now(self) -> SyncedBackward | LocalBackward: ...

    def run_pass(self, present: Pass) -> Stage: ...

    def awaited(self) -> list[str]: ...

    def why_not_several(self) -> Exception | None: ...

    def on_backward_begin(self, leaves: Callable[[], set[int]]) -> None: ...

    def on_backward_left(self) -> None: ...

    def on_backward_raised(self, error: BaseException) -> None: ...

    @property
    def trouble(self) -> Trouble: ...


class PassGate:
    """Lets passes in, and settles what becomes of them. Listens to ``pass_watch``, and to their ends."""

    def __init__(self, engine: Engine, name: bytes) -> None:
        self.name = name
        self.passes = Passes()
        self.keeps_gradients = False  # what fails is a pass: the parameters' own gradients are none of it
        # Whoever holds it waits for other ranks, but never for a thread of autograd: that may wait here.
        self._turn = threading.RLock()
        self._task = -1  # the number of the ordinary backward that was opened last
        self._failing: int | None = None  # the context of the pass that was opened as failed
        self._to_tell: list[BaseException] = []  # of passes that came inside of an ordinary backward
        self._engine: Engine = weakref.proxy(engine)
        self._if_alive: Callable[[], Engine | None] = weakref.ref(engine)
        self._nothing = LocalBackward((), set(), counts=False)

    def note_forward(self) -> bool:
        """Hear that a forward begins; tell whether it is part of a pass of distributed autograd."""
        return torch.is_grad_enabled() and self.passes.note_forward()

    def open(
        self, first: int, came: torch.Tensor | None, *, is_taken: bool = False
    ) -> SyncedBackward | LocalBackward:
        """Start a backward, unless its first gradient is of a pass: that is started when it has ended."""
        with self._turn:  # while a pass is reduced, the parameters have its gradients
            if self.passes.has_claim:
                return self._nothing
            opened = self._engine.open_backward
            if opened is not None and self._task == current_task():
                return opened  # by another thread that works for the same backward
            found = self.passes.find(self._engine.parameters[first], came, is_taken=is_taken)
            if found is None:
                self.passes.refuse_ordinary()
                self._await_turn()
                self._task = current_task()
                return self._engine.open_now()
            found = self._refused(found)
            self.passes.claim(found)
            if engine_watch.call_at_end(self):
                found.error = found.error or self._engine.why_not_several()
        return self._nothing

    def _refused(self, found: Pass) -> Pass:
        """Refuse sharded parameters: what is partial in a context would be taken for a whole."""
        if not any(map(is_dtensor, self._engine.parameters)):
            return found
        error = RuntimeError(
            "sharded parameters (DTensors) cannot be reduced inside a context of distributed autograd. "
            "Run an ordinary backward(), or replicate a part of the model that is not sharded"
        )
        return Pass(None, who=found.who, error=error)

    def _await_turn(self) -> None:
        """Wait until no other backward is open: another thread may be telling that its own has failed."""
        while self._engine.open_backward is not None:
            time.sleep(LOOK_SECONDS)

    # ---- a pass has computed everything ----------------------------------------------------------

    def on_backward_over(self) -> None:
        """See BackwardListener. What follows is done for one replica after the other."""

    def on_backward_end(self) -> None:
        """See BackwardListener: reduce the pass that has ended."""
        if self._is_gone:
            return
        self._let_others_go_first()
        found = self.passes.take_claim()
        if found is None:
            return
        with self._turn:
            self._await_turn()
            self._refuse_gone()
            error = self.passes.why_not(found)
            if error is not None and not self._is_to_be_told(found):
                found.is_open = False
                raise error
            self._run(found)

    def _run(self, found: Pass) -> None:
        self.passes.begin(found)
        try:
            stage = self._engine.run_pass(found)
        except BaseException as error:
            self.passes.end(Stage.FAILED, error)
            with self._keeping_gradients():
                self._engine.on_backward_raised(error)
            raise
        self.passes.end(stage)

    def _refuse_gone(self) -> None:
        """Refuse passes that others wait for, and that have been given up: here they may never end."""
        while (gone := self.passes.gone(self._engine.awaited())) is not None:
            with contextlib.suppress(RuntimeError):
                self._run(gone)

    def _let_others_go_first(self) -> None:
        """Keep the order in which passes began. On a GPU the others may need this very thread."""
        if all(parameter.device.type == "cpu" for parameter in self._engine.parameters):
            until = time.monotonic() + GIVE_WAY_SECONDS
            while not self.passes.is_first and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)

    def _is_to_be_told(self, found: Pass) -> bool:
        """Tell whether other ranks have to hear from here that a pass is refused: they are going to wait."""
        is_known = found.context is not None or self.passes.is_called  # who has called it hears, and tells
        return self._engine.wants_sync and not is_known

    @contextlib.contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """Leave what the parameters have alone while the failure of a pass is settled: it has its own."""
        self.keeps_gradients = True
        try:
            yield
        finally:
            self.keeps_gradients = False

    # ---- a pass that this process calls ----------------------------------------------------------

    @contextlib.contextmanager
    def turn_of(self, context: int) -> Iterator[object]:
        """See PassListener. Keeps the engine, too: garbage may be collected while a pass runs."""
        engine = self._if_alive()
        with self.passes.turn_of(context):
            yield engine

    @property
    def _is_gone(self) -> bool:
        return self._if_alive() is None

    def on_pass_begin(self, context: int) -> None:
        """See PassListener."""
        if self._is_gone:
            return
        self.passes.note_call(context)
        found = self.passes.get(context)
        reached = self._engine.parameters if found is not None and found.has_forward else ()
        self._engine.on_backward_begin(lambda: {id(parameter) for parameter in reached})

    def on_pass_returned(self, context: int) -> None:
        """See PassListener."""
        if not self._is_gone:
            self.passes.check_reduced(context, self._engine.parameters)

    def on_pass_left(self, context: int) -> None:
        """See PassListener."""
        if not self._is_gone:
            self.passes.note_return(context)
            self._engine.on_backward_left()

    def on_pass_failing(self, context: int, error: BaseException) -> None:
        """See PassListener: open, as failed, what was going to be opened."""
        if self._is_lost(context) and self._turn.acquire(blocking=False):
            try:
                if self._engine.open_backward is None:
                    self._engine.trouble.open(error, BACKWARD)
                    self._failing = context
            finally:
                self._turn.release()

    def _is_lost(self, context: int) -> bool:
        """Tell whether the other ranks wait for a pass that has failed before its gradients were there."""
        found = self.passes.get(context)
        is_ours = not self._is_gone and found is not None and found.is_due and not found.is_closing
        return is_ours and self._engine.wants_sync

    def on_pass_raised(self, context: int, error: BaseException) -> BaseException | None:
        """See PassListener: settle the matter with the other ranks, unless that has been done."""
        found = self.passes.get(context)
        if self._is_gone or found is None or found.is_closing:
            return None
        if found.is_due:
            self.passes.drop_claim(found)
            is_lost = self._is_lost(context)
            found.settle(Stage.FAILED, self._why_inside())
            if is_lost:
                self._tell(context, found.error or error)
        return found.error

    def _why_inside(self) -> BaseException | None:
        """Say why a pass has failed that came inside of an ordinary backward; this one is still open then."""
        backward = self._engine.open_backward
        return at_once() if backward is not None and not backward.is_pass else None

    def _tell(self, context: int, error: BaseException) -> None:
        """Tell the other ranks that a pass has failed, and hear where they are."""
        if self._failing == context:
            self._failing = None
            with self._keeping_gradients():
                self._engine.on_backward_raised(error)
        elif self._why_inside() is not None:
            self._to_tell.append(error)  # the ordinary backward may wait for this very thread
            if self._why_inside() is None:  # it has ended meanwhile
                self.on_ordinary_end()
        else:
            with self._turn:  # another pass was being reduced
                self._await_turn()
                self._tell_now(error)

    def _tell_now(self, error: BaseException) -> None:
        with self._keeping_gradients():
            self._engine.trouble.tell(error, BACKWARD)

    def on_ordinary_end(self) -> None:
        """Tell of passes that came inside of the ordinary backward that has just ended."""
        while self._to_tell:
            with self._turn:
                self._await_turn()
                if self._to_tell:
                    self._tell_now(self._to_tell.pop())
