"""What stands in for a module's parameters while its forward runs: casts, or sharded tensors.

Forward reads a parameter from its owner's ``_parameters``. That dictionary is replaced by one which answers
with stand-ins to the thread that runs the module's forward, and to a backward that computes something again
(activation checkpointing). Everybody else, copies and pickles included, finds the parameters themselves.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import currentframe
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from paceline.own_hooks import OwnHook
from paceline.watches.engine import engine_watch

CALL = nn.Module.__call__.__code__

T = TypeVar("T")


class StandIns(dict[str, Any], ABC):
    """A module's parameters by name; a forward reads something else. Copies and pickles are plain."""

    @abstractmethod
    def source(self, *, of_many: bool = False) -> Any:
        """Return who makes stand-ins for a reader that asks now; None if it gets the parameters themselves.

        Who reads ``of_many`` (state_dict(), parameters()) is rarely a forward and often saves a checkpoint.
        """

    @abstractmethod
    def stand_in(self, key: str, parameter: Any, source: Any) -> Any:
        """Return what a forward reads in place of a parameter."""

    def __getitem__(self, key: str) -> Any:
        return self._read(key, super().__getitem__(key), self.source())

    def get(self, key: str, default: Any = None) -> Any:
        return self._read(key, super().get(key, default), self.source())

    def items(self) -> Any:
        source = self.source(of_many=True)
        if source is None:
            return super().items()
        return {key: self._read(key, parameter, source) for key, parameter in super().items()}.items()

    def values(self) -> Any:
        return super().values() if self.source(of_many=True) is None else dict(self.items()).values()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def _read(self, key: str, parameter: Any, source: Any) -> Any:
        return parameter if source is None else self.stand_in(key, parameter, source)


class Calls(Generic[T]):
    """The calls of a module, by thread, with what is made for each outermost one."""

    def __init__(self, begin: Callable[[], T], end: Callable[[T], None]) -> None:
        self._begin = begin
        self._end = end
        self._thread = threading.local()

    def attach(self, module: nn.Module, change: Callable[[Any, Any], Any] | None = None) -> list[Any]:
        """Note every call of a module, whose inputs may be changed; return the handles to remove.

        First in line, so that the module's other hooks see what forward sees.
        """

        def on_call(args: Any, kwargs: Any) -> Any:
            """Note it. Called before the module's forward."""
            self._enter()
            return (args, kwargs) if change is None else change(args, kwargs)

        return [
            module.register_forward_pre_hook(_Hook(on_call), with_kwargs=True, prepend=True),
            module.register_forward_hook(_Hook(self._leave), always_call=True),
        ]

    def _enter(self) -> None:
        if self.current(surely=True) is None:
            self._thread.made, self._thread.frames = self._begin(), []
        self._thread.frames.append(_frame_of_call())

    def _leave(self, *_: Any) -> None:
        """Note the end. Called after the module's forward; also when it raised, or a hook before ours did."""
        if self.current() is not None and self._thread.frames[-1] is _frame_of_call():
            self._thread.frames.pop()
            if not self._thread.frames:
                self.end()

    def current(self, *, surely: bool = False) -> T | None:
        """Return what was made for the call that runs on this thread, if one does.

        No hook is told of a KeyboardInterrupt and its like, so a call may be over without our notice. To look
        at the stack for each single parameter would cost more than all the rest: ``surely`` does so.
        """
        made: T | None = getattr(self._thread, "made", None)
        if made is not None and surely and not _is_on_the_stack(self._thread.frames[0]):
            self.end()
            return None
        return made

    def end(self) -> None:
        """End the call that runs on this thread, however many others are within it."""
        made, self._thread.made = getattr(self._thread, "made", None), None
        if made is not None:
            self._end(made)


def is_computed_again() -> bool:
    """Tell whether a backward computes a forward again here: inside one, who else would enable gradients."""
    return engine_watch.inside() and torch.is_grad_enabled()


class _Hook(OwnHook):
    """A forward hook that looks at no module."""

    def __init__(self, act: Any) -> None:
        self._act = act

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _module: nn.Module, *given: Any) -> Any:
        return self._act(*given)


def _frame_of_call() -> FrameType | None:
    """Return the call of a module that the running hook belongs to."""
    frame = currentframe()
    while frame is not None and frame.f_code is not CALL:
        frame = frame.f_back
    return frame


def _is_on_the_stack(outermost: FrameType | None) -> bool:
    """Tell whether this thread is still inside a call."""
    frame = currentframe()
    while frame is not None and frame is not outermost:
        frame = frame.f_back
    return frame is outermost
