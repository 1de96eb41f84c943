"""Guards of our own on compiled code: when what they compare has changed, it is compiled anew.

To be called while Dynamo traces, except for the marks on functions. Private names of torch, seen on 2.11 and
2.13: torch._guards.Guard (through Source.make_guard), torch._dynamo.guards.install_guard,
GuardBuilder.get_guard_manager, its guard_manager.root, GuardManager.add_lambda_guard,
torch._dynamo.source.GlobalStateSource.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

Describe = Callable[[Any], Any]
F = TypeVar("F", bound=Callable[..., Any])
_QUESTION = "_paceline_question"


def constant_while(question: Callable[[], Any]) -> Callable[[F], F]:
    """Make a function of ours a constant in traced code, for as long as ``question()`` has the same answer.

    It is run when the code is traced. Elsewhere it is what it was.
    """

    def mark(function: F) -> F:
        setattr(function, _QUESTION, question)
        return function

    return mark


def untraced(function: F) -> F:
    """Keep compilers out of a function, and out of all that it calls. It ends the graph."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]


def question_of(function: Callable[..., Any]) -> Callable[[], Any] | None:
    """Return the question that ``constant_while`` was given for a function, if it was."""
    question: Callable[[], Any] | None = vars(function).get(_QUESTION)
    return question


def guard_on(source: Any, describe: Describe, value: Any, said: str) -> None:
    """Compile anew when what is at ``source`` is not described as ``value`` is now."""
    from torch._dynamo.guards import install_guard

    try:
        guard = source.make_guard(partial(_add, check=_Check(describe, describe(value)), said=said))
    except NotImplementedError:  # a constant of the graph, which cannot change
        return
    install_guard(guard)


def guard_on_answer(question: Callable[[], Any], answer: Any, said: str) -> None:
    """Compile anew when ``question()`` has another answer, or none."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    check = _Check(lambda _frame: question(), answer)
    install_guard(GlobalStateSource().make_guard(partial(_add_to_root, check=check, said=said)))


def add_guard_on_answer(builder: Any, guard: Any, question: Callable[[], Any], said: str) -> None:
    """Do so where torch makes a guard, once in a set of guards and for the answer that there is now."""
    if said not in vars(builder).setdefault("_paceline_said", set()):
        vars(builder)["_paceline_said"].add(said)
        _add_to_root(builder, guard, check=_Check(lambda _frame: question(), question()), said=said)


class _Check:
    """Compares a description with the one that was traced. What cannot be described is another."""

    def __init__(self, describe: Describe, expected: Any) -> None:
        self._describe = describe
        self._expected = expected

    def __call__(self, value: Any) -> bool:
        try:
            return bool(self._describe(value) == self._expected)
        except Exception:
            return False


def _add(builder: Any, guard: Any, *, check: _Check, said: str) -> None:
    builder.get_guard_manager(guard).add_lambda_guard(check, [f"{said} of {guard.name}"], guard.user_stack)


def _add_to_root(builder: Any, guard: Any, *, check: _Check, said: str) -> None:
    builder.guard_manager.root.add_lambda_guard(check, [said], guard.user_stack)
