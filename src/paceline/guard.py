"""The gate before ``optimizer.step()``: nothing steps on gradients that only this rank has.

While all gradients are agreed, the gate costs one address per parameter; only a suspicion looks closer.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.errors import UnsyncedGradients, name_some
from paceline.local import has_anything
from paceline.orphans import Orphan
from paceline.places import Sentry
from paceline.reducer import Reducer
from paceline.torch_private import agent_is_set, put_first
from paceline.watched import is_heard
from paceline.watches.remote_steps import check_remote_steps

Suspects = Mapping[str, torch.Tensor]


class Guard(Sentry[Reducer]):
    """Stands before every torch optimizer of this process while there are replicas to guard."""

    def __init__(self) -> None:
        super().__init__()
        self._handles: list[Any] = []
        self._remote = threading.local()  # a step of this thread is one of a DistributedOptimizer

    def add(self, reducer: Reducer) -> None:
        """Let no optimizer step on unsynced gradients of this reducer."""
        self._items.add(reducer)
        self._stand()
        if agent_is_set():
            self.watch_remote_steps()

    def remove(self, reducer: Reducer) -> None:
        """Stop guarding a reducer."""
        self._items.discard(reducer)
        self._leave_if_idle()

    def _stand(self) -> None:
        if not self._handles:
            before = register_optimizer_step_pre_hook(self._on_step)
            after = register_optimizer_step_post_hook(self._on_stepped)
            put_first(after)  # a step has been made, whatever another hook for all optimizers raises
            self._handles = [before, after]

    def _leave(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Look before each step of any optimizer. Called by torch on the thread that steps."""
        # To be out of the tracer's reach costs more than to look, so who is not traced does without.
        if torch.compiler.is_compiling():
            return self._look_untraced(optimizer, args, kwargs)
        return self._look(optimizer, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look_untraced(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return self._look(optimizer, args, kwargs)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._check(optimizer)
            return None

        def closure_then_check() -> Any:
            loss = closure()
            self._check(optimizer)
            return loss

        # The gradients that count are those which the closure leaves: it may be the one that reduces.
        if len(args) > 1:
            return (args[0], closure_then_check, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_check}

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        for reducer in self._items.here():
            reducer.steps.begins(optimizer)
            # Gradients of a context were looked at before.
            if not getattr(self._remote, "is_stepping", False) and not reducer.is_settled:
                check_gradients(reducer, "optimizer.step()", optimizer)

    def _on_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of any optimizer that has not raised. Called by torch on the thread that stepped."""
        if torch.compiler.is_compiling():
            self._count_untraced(optimizer)
        else:
            self._count(optimizer)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _count_untraced(self, optimizer: torch.optim.Optimizer) -> None:
        self._count(optimizer)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        for reducer in self._items.here():
            reducer.steps.note(optimizer)

    # ---- gradients in contexts of distributed autograd -------------------------------------------

    def watch_remote_steps(self) -> None:
        """Stand before DistributedOptimizers, too."""
        check_remote_steps(self)

    def before_remote_step(self, context: int, parameters: Sequence[torch.Tensor]) -> None:
        """See StepChecker. Called in the process that owns the parameters."""
        for reducer in self._items.here():
            check_pass(reducer, context, parameters)

    @contextmanager
    def during_remote_step(self) -> Iterator[None]:
        """See StepChecker."""
        self._remote.is_stepping = True
        try:
            yield
        finally:
            self._remote.is_stepping = False

    def meant(self, error: BaseException) -> BaseException:
        """See StepChecker: an exception that comes back from its owner, or out of a script, is only text."""
        _, found, text = str(error).rpartition(f"{UnsyncedGradients.__name__}: ")
        return UnsyncedGradients(text.split("\n")[0]) if found else error


def check_gradients(reducer: Reducer, what: str, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Raise if something would use gradients, an optimizer's or all, that the ranks have not agreed on."""
    moved = reducer.moved()
    if moved:
        _refuse_moved(reducer, _of(optimizer, moved), what)
    if optimizer is not None and (orphans := reducer.orphans):
        _refuse_orphans(reducer, orphans, optimizer)
    if not reducer.all_agreed:
        _refuse_local(reducer, _of(optimizer, reducer.unsynced()), what)


def check_pass(reducer: Reducer, context: int, parameters: Sequence[torch.Tensor]) -> None:
    """Raise if a DistributedOptimizer would use gradients that the ranks have not agreed on."""
    stepped = {id(parameter) for parameter in parameters}
    watched: dict[torch.Tensor, str] = {p: name for name, p in reducer.named() if id(p) in stepped}
    suspects = reducer.passes.unsynced(context, list(watched))
    names = [watched[parameter] for parameter, gradient in suspects.items() if has_anything([gradient])]
    if names:
        raise UnsyncedGradients(
            f"step {reducer.step}: DistributedOptimizer.step({context}) would use gradients that only this "
            f"rank has: {name_some(names)}. {reducer.passes.why_unsynced(context)}.",
            names,
        )


def left_unsynced(reducer: Reducer) -> list[str]:
    """Name the parameters that hold a gradient which was never reduced."""
    return [name for name, parameter in reducer.unsynced().items() if has_anything([parameter.grad])]


def _refuse_local(reducer: Reducer, suspects: Suspects, what: str) -> None:
    names = [name for name, p in suspects.items() if has_anything([p.grad])]
    if names:
        raise UnsyncedGradients(
            f"step {reducer.step}: {what} would use gradients that only this rank has: "
            f"{name_some(names)}. {reducer.why_unsynced()}.",
            names,
        )


def _refuse_moved(reducer: Reducer, suspects: Suspects, what: str) -> None:
    names = [name for name, p in suspects.items() if p.grad is not None]
    if names:
        raise UnsyncedGradients(
            f"step {reducer.step}: {what} would use gradients that were never reduced: "
            f"{name_some(names)}. These parameters were cast or moved after the model was replicated, or "
            "swapped, and torch forgets its hooks then. Move the model first, or detach() and replicate it "
            "again.",
            names,
        )


def _refuse_orphans(
    reducer: Reducer, orphans: Mapping[int, Orphan], optimizer: torch.optim.Optimizer
) -> None:
    names = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in orphans):
        orphan = orphans[id(parameter)]
        if is_heard(parameter) or not has_anything([parameter.grad]):
            orphan.forget()
        else:
            names.append(orphan.name)
    if names:
        raise UnsyncedGradients(
            f"step {reducer.step}: optimizer.step() would use gradients that only this rank has: "
            f"{name_some(names)}. These parameters were taken out of the module after it was replicated, so "
            "that nobody reduces them any more. Call replicate() for what holds them now, or take them out "
            "of the optimizer.",
            names,
        )


def _of(optimizer: torch.optim.Optimizer | None, suspects: Suspects) -> Suspects:
    """Return the suspects that an optimizer steps."""
    if optimizer is None:
        return suspects
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in suspects.items() if id(parameter) in stepped}


guard = Guard()
