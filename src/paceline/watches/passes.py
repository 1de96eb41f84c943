"""Passes of distributed autograd whose backward is called in this process."""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Protocol

import torch

from paceline.places import Sentry
from paceline.torch_private import context_of, pass_door, set_pass_door
from paceline.watches.engine import BY_NAME

FAILED_CONTEXTS = 4  # are kept, with their gradients,
LATE_SECONDS = 60.0  # for as long as torch's RPC waits for an answer


class PassListener(Protocol):
    """Who wants to know of the passes of distributed autograd whose backward is called in this process."""

    name: bytes

    def turn_of(self, context: int) -> AbstractContextManager[Any]:
        """Wait inside until no other pass through the same parameters runs a backward."""

    def on_pass_begin(self, context: int) -> None:
        """Hear that the backward of a pass starts."""

    def on_pass_returned(self, context: int) -> None:
        """Look at what it has left, and raise if that is wrong."""

    def on_pass_failing(self, context: int, error: BaseException) -> None:
        """Hear that it raised. Wait for nobody."""

    def on_pass_raised(self, context: int, error: BaseException) -> BaseException | None:
        """Settle with the other ranks that it raised; return what has been raised here in its course."""

    def on_pass_left(self, context: int) -> None:
        """Hear that it has ended, in whatever way."""


class _PassWatch(Sentry[Any]):
    """Stands at ``torch.distributed.autograd.backward`` while somebody listens.

    Its engine says neither which pass a gradient is of, nor that a pass has failed, and it makes a plain
    RuntimeError of every exception. All three are known here, in the process that calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._present = threading.local()
        self._entry: Callable[..., Any] | None = None
        self._failed: deque[tuple[float, Any]] = deque(maxlen=FAILED_CONTEXTS)

    def add(self, listener: PassListener) -> None:
        self._items.add(listener)
        self._stand()

    def remove(self, listener: PassListener) -> None:
        self._items.discard(listener)
        self._leave_if_idle()

    @property
    def context(self) -> int | None:
        """The context whose backward this thread has called, and is in."""
        return getattr(self._present, "context", None)

    def _stand(self) -> None:
        if self._entry is None and (entry := pass_door()) is not None:
            self._entry = entry
            set_pass_door(self._run)

    def _leave(self) -> None:
        if self._entry is not None and pass_door() == self._run:
            set_pass_door(self._entry)
            self._entry = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, context_id: int, *args: Any, **kwargs: Any) -> None:
        assert self._entry is not None
        listeners = sorted(self._items.here(), key=BY_NAME)
        with ExitStack() as turns:
            for listener in listeners:  # in one order on every thread
                turns.enter_context(listener.turn_of(context_id))
            before, self._present.context = self.context, context_id
            try:
                self._forget_failed()
                for listener in listeners:
                    listener.on_pass_begin(context_id)
                self._entry(context_id, *args, **kwargs)
                for listener in listeners:
                    listener.on_pass_returned(context_id)
            except BaseException as error:
                self._keep_failed(context_id)
                for listener in listeners:
                    listener.on_pass_failing(context_id, error)
                for known in [listener.on_pass_raised(context_id, error) for listener in listeners]:
                    if known is not None and known is not error:
                        raise known from None
                raise
            finally:
                self._present.context = before
                for listener in listeners:
                    listener.on_pass_left(context_id)

    def _keep_failed(self, number: int) -> None:
        """Keep a context in memory whose parts may fail still.

        When torch hears of that, it writes to the context whether it is there or not (context.cpp,
        addOutstandingRpc): another pass fails with this one's error, or the process dies.
        """
        with suppress(RuntimeError):  # it has ended already
            self._failed.append((time.monotonic(), context_of(number)))

    def _forget_failed(self) -> None:
        with suppress(IndexError):  # several threads may be here at once
            while self._failed[0][0] < time.monotonic() - LATE_SECONDS:
                self._failed.popleft()


pass_watch = _PassWatch()
