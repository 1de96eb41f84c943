"""Backwards: who enters the autograd engine, what is nested, how it ends, and what was raised."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from paceline.places import Place, Sentry, here
from paceline.torch_private import (
    call_when_backward_ends,
    compiled_autograd,
    current_task,
    engine_door,
    leaves_below,
    set_engine_door,
    without_compiled_autograd,
)

BY_NAME = attrgetter("name")  # the same order on every rank


class EndListener(Protocol):
    """Who wants to know that a backward ends. ``name`` puts several in the same order on every rank."""

    name: bytes

    def on_backward_over(self) -> None:
        """Hear, before anybody closes, that the backward has computed everything."""

    def on_backward_end(self) -> None:
        """Close the backward. Like the one before, called by the engine in the streams of its caller."""


class BackwardListener(EndListener, Protocol):
    """Who wants to know how every backward begins and ends."""

    @property
    def parameters(self) -> Iterable[torch.Tensor]:
        """Those whose gradients it waits for."""

    def on_nested_begin(self) -> None:
        """Hear that a backward is going to run inside a backward of this thread."""

    def on_nested_end(self) -> None:
        """Hear that a backward inside a backward has ended; this thread is back in the outer one."""

    def on_backward_begin(self, leaves: Callable[[], set[int]]) -> None:
        """Hear that an outermost backward starts.

        ``leaves`` returns the ids of the tensors whose gradient it computes.
        """

    def on_backward_left(self) -> None:
        """Hear that an outermost backward has ended, in whatever way."""

    def on_backward_failing(self, error: BaseException, leaves: Callable[[], set[int]]) -> None:
        """Hear that an outermost backward raised, on the thread that had started it. Wait for nobody.

        ``leaves`` returns the ids of the tensors whose gradient it was to compute.
        """

    def on_backward_raised(self, error: BaseException) -> None:
        """Settle with the other ranks that the backward raised. Every listener has been told before."""


class _EngineWatch(Sentry[Any]):
    """Stands at the one Python door of the autograd engine while somebody listens.

    The engine's own callbacks tell when a backward has ended. They stay silent when it raises, and a callback
    queued inside a nested backward (re-entrant checkpointing) fires at the nested end. Both are visible here.
    A listener hears of the backwards of its own place (see paceline.places).
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = threading.local()
        self._ending: dict[int, list[Any]] = {}
        self._entry: Callable[..., Any] | None = None
        self.making_graphs = 0  # backwards under way with create_graph=True, on whatever threads
        self._under_way: set[int] = set()  # the threads that have called for an outermost backward

    def add(self, listener: BackwardListener) -> None:
        self._items.add(listener)
        here().has_come(listener)
        self._stand()

    def remove(self, listener: BackwardListener) -> None:
        place = self._items.discard(listener)
        if place is not None:
            place.has_gone(listener)
        self.forget(listener)
        self._leave_if_idle()

    def _stand(self) -> None:
        if self._entry is None:
            self._entry = engine_door()
            set_engine_door(self._run)

    def _leave(self) -> None:
        # Somebody may have wrapped us in turn; then the door stays ours, and costs nothing.
        if self._entry is not None and engine_door() == self._run:
            set_engine_door(self._entry)
            self._entry = None

    def forget(self, listener: EndListener) -> None:
        """Call a listener no more for backwards that were cut short."""
        # Only this thread works for the tasks that the listener waits for; others may add theirs meanwhile.
        for task, waiting in list(self._ending.items()):
            others = [other for other in waiting if other is not listener]
            if not others:
                self._ending.pop(task, None)
            elif len(others) < len(waiting):
                self._ending[task] = others

    def call_at_end(self, listener: EndListener) -> list[Any]:
        """Have a listener called when the backward that this thread works for ends.

        Returns the others that are called, too.

        Several replicas may be reached by one backward, in different orders on different ranks. They are
        closed together, in the order of their names.
        """
        task = current_task()
        waiting = self._ending.setdefault(task, [])
        waiting.append(listener)
        if waiting[0] is listener:  # several threads may be here at once, in distributed autograd
            call_when_backward_ends(partial(self._end, task))
        return [other for other in waiting if other is not listener]

    def _end(self, task: int) -> None:
        listeners = sorted(self._ending.pop(task, ()), key=BY_NAME)  # none, if they were told to forget it
        for listener in listeners:
            listener.on_backward_over()
        for listener in listeners:
            listener.on_backward_end()

    def in_order(self) -> list[Any]:
        """Return the listeners of this place, in the order of their names: the same on every rank."""
        listeners = self._items.here()
        return sorted(listeners, key=BY_NAME) if len(listeners) > 1 else listeners

    def has_one_listener(self, place: Place) -> bool:
        """Tell whether nobody but one listens at a place, whatever thread asks."""
        return len(self._items.at(place)) == 1

    def has_one_backward(self) -> bool:
        """Tell whether no more than one backward is under way in this process."""
        return len(self._under_way) <= 1

    @staticmethod
    def inside() -> bool:
        """Tell whether this thread is inside a backward."""
        return current_task() != -1

    def nested(self) -> bool:
        """Whether this thread is inside a backward that was started by a backward."""
        return getattr(self._depth, "value", 0) > 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        assert self._entry is not None
        if current_task() != -1:
            return self._run_nested(outputs, *args, **kwargs)
        # torch.autograd.grad writes no .grad, so it is nobody's business here.
        if not kwargs.get("accumulate_grad"):
            return self._entry(outputs, *args, **kwargs)
        listeners = self.in_order()
        makes_graph, inputs = args[2:4] if len(args) > 3 else (False, ())
        leaves = _Leaves(outputs, inputs)
        self._under_way.add(threading.get_ident())
        try:
            for listener in listeners:
                listener.on_backward_begin(leaves)
            self.making_graphs += bool(makes_graph)
            with _keeping_compiled_autograd_out(listeners, leaves):
                return self._entry(outputs, *args, **kwargs)
        except BaseException as error:
            listeners = self.in_order()
            for listener in listeners:
                listener.on_backward_failing(error, leaves)
            for listener in listeners:
                listener.on_backward_raised(error)
            raise
        finally:
            self._under_way.discard(threading.get_ident())
            self.making_graphs -= bool(makes_graph)
            for listener in listeners:
                listener.on_backward_left()

    def _run_nested(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        assert self._entry is not None
        self._depth.value = getattr(self._depth, "value", 0) + 1
        for listener in self._items.here():
            listener.on_nested_begin()
        try:
            return self._entry(outputs, *args, **kwargs)
        finally:
            self._depth.value -= 1
            if not self._depth.value:
                for listener in self._items.here():
                    listener.on_nested_end()


class _Leaves:
    """The ids of the tensors whose gradient a backward computes, found out when somebody asks."""

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._outputs = outputs
        self._inputs = inputs
        self._found: set[int] | None = None

    def __call__(self) -> set[int]:
        if self._found is None:
            inputs = self._inputs
            self._found = {id(tensor) for tensor in inputs} if inputs else leaves_below(self._outputs)
        return self._found


def _keeping_compiled_autograd_out(
    listeners: Sequence[BackwardListener], leaves: Callable[[], set[int]]
) -> AbstractContextManager[Any]:
    """Run a backward that somebody listens to by the engine: compiled autograd traces what listens."""
    compiler = compiled_autograd()
    if compiler is None:
        return nullcontext()
    if all(leaves().isdisjoint(map(id, listener.parameters)) for listener in listeners):
        return nullcontext()
    _say_that_compiled_autograd_is_out()
    return without_compiled_autograd(compiler)


@cache
def _say_that_compiled_autograd_is_out() -> None:
    logging.getLogger("paceline").warning(
        "compiled autograd is on; the backwards of replicated models go without it, so that their gradients "
        "are reduced"
    )


engine_watch = _EngineWatch()
