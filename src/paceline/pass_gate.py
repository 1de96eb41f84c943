"""The gate through which passes of distributed autograd come to a replica, one at a time.

Its engine says neither which pass a gradient is of, nor that a pass has failed. The gate is told by the
module's forward, and by the door of ``torch.distributed.autograd.backward`` in the process that calls it.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from paceline.backward import LocalBackward, SyncedBackward
from paceline.passes import Passes, Stage
from paceline.tally import BACKWARD
from paceline.torch_private import is_dtensor

LOOK_SECONDS = 0.02  # how often a pass looks whether its turn has come


class Engine(Protocol):
    """What reduces the gradients of a replica, as far as the gate works with it."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]: ...

    @property
    def wants_sync(self) -> bool: ...

    @property
    def open_backward(self) -> SyncedBackward | LocalBackward | None: ...

    def open_now(self) -> SyncedBackward | LocalBackward: ...

    def on_backward_begin(self, leaves: Callable[[], set[int]]) -> None: ...

    def on_backward_left(self) -> None: ...

    def on_backward_raised(self, error: BaseException) -> None: ...

    def tell_failure(self, error: BaseException, where: str) -> None: ...

    def open_failure(self, error: BaseException, where: str) -> None: ...


class PassGate:
    """Lets passes in, and settles what becomes of them. Listens to ``pass_watch``."""

    def __init__(self, engine: Engine, name: bytes) -> None:
        self.name = name
        self.passes = Passes()
        self.keeps_gradients = False  # what fails is a pass: the parameters' own gradients are none of it
        self._engine: Engine = weakref.proxy(engine)
        self._if_alive = weakref.ref(engine)

    def note_forward(self) -> bool:
        """Hear that a forward begins; tell whether it is part of a pass of distributed autograd."""
        if self._engine.open_backward is not None and self.passes.ended_early():
            # The engine of distributed autograd does not say that a pass has failed elsewhere.
            self._fail_pass(_never_ended())
        return torch.is_grad_enabled() and self.passes.note_forward()

    def _fail_pass(self, error: BaseException) -> None:
        self.passes.end(Stage.FAILED, error)
        with self._keeping_gradients():
            self._engine.on_backward_raised(error)
        self.tell_refused()

    def tell_refused(self) -> None:
        """Let the others know of passes that came while another one was open here."""
        while self.passes.refused:
            with self._keeping_gradients():
                self._engine.tell_failure(self.passes.refused.pop(), BACKWARD)

    @contextlib.contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """Leave what the parameters have alone while the failure of a pass is settled: it has its own."""
        self.keeps_gradients = True
        try:
            yield
        finally:
            self.keeps_gradients = False

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Settle a failure at once if no door of the engine is going to tell us of it."""
        try:
            yield
        except BaseException as error:
            if self.passes.present is not None:
                self._fail_pass(error)
            raise

    def open(
        self, first: int, came: torch.Tensor | None, *, is_taken: bool = False
    ) -> SyncedBackward | LocalBackward:
        """Start a backward that may be one of distributed autograd, whose threads may all be here at once."""
        with self.passes.opening:
            if self._engine.open_backward is not None and self.passes.has_turn:
                return self._engine.open_backward
            is_pass = True
            try:
                found = self.passes.find(self._engine.parameters[first], came, is_taken=is_taken)
                is_pass = found is not None
                if is_pass:
                    self._refuse_sharded()
                self._await_turn()
                self.passes.begin(found)
                if not self.passes.is_over:
                    with self.settling():
                        return self._engine.open_now()
            except BaseException as error:
                if not is_pass:
                    raise
                self.passes.refuse(error)
                if (
                    self._engine.wants_sync and not self.passes.is_called
                ):  # nobody here is going to hear of it
                    with self._keeping_gradients():
                        self._engine.tell_failure(error, BACKWARD)
                    self.tell_refused()
            self.passes.present = None
            return LocalBackward(self._engine.parameters, set())

    def _refuse_sharded(self) -> None:
        """Refuse sharded parameters: what is partial in a context would be taken for a whole."""
        if any(map(is_dtensor, self._engine.parameters)):
            raise RuntimeError(
                "sharded parameters (DTensors) cannot be reduced inside a context of distributed autograd. "
                "Run an ordinary backward(), or replicate a part of the model that is not sharded"
            )

    def arrived_elsewhere(self, index: int) -> None:
        """Note a gradient of another backward than the open one. Called by the thread that computes it."""
        if self._engine.parameters[index].device.type != "cpu":  # the open one may need this very thread
            self.passes.refuse_second()
            return
        self.open(index, None).arrived(index)

    def _await_turn(self) -> None:
        """Wait until no backward of another pass is open."""
        while self._engine.open_backward is not None:
            if self.passes.ended_early():
                self._fail_pass(_never_ended())
            self.passes.opening.wait(LOOK_SECONDS)

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
        found = self.passes.get(context)
        if self._is_gone or found is None or not found.is_due or found.is_closing:
            return
        if self._engine.open_backward is not None and self.passes.present is not found:
            self.passes.give_way(found)  # to a backward of another thread
        elif self._engine.wants_sync:
            self._engine.open_failure(error, BACKWARD)

    def on_pass_raised(self, context: int, error: BaseException) -> BaseException | None:
        """See PassListener: settle the matter with the other ranks, unless that has been done."""
        found = self.passes.get(context)
        if self._is_gone or found is None or found.is_closing:
            return None
        if found.is_due:
            if self.passes.present is found:
                self._fail_pass(error)
            else:
                with self._keeping_gradients():
                    self._engine.on_backward_raised(error)  # of what was opened as failed
                self.tell_refused()
            found.settle(Stage.FAILED)
        return found.error


def _never_ended() -> RuntimeError:
    return RuntimeError("a backward of distributed autograd did not end")
