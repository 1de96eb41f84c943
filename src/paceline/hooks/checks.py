"""Arguments of hooks are checked when a hook is made, long before the first bucket."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from paceline.hooks.bucket import StatefulHook


def odd_signature(function: Any, arguments: int) -> str | None:
    """Return a function's signature if it cannot be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None  # made in C, and silent about its arguments
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return str(signature)
    return None


def check_whole(hook: str, name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{hook}() needs {name} to be a whole number of {least} or more, got {value!r}")


def check_number(hook: str, name: str, value: Any, least: float) -> None:
    """Refuse what is not a number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise ValueError(f"{hook}() needs {name} to be a number of {least} or more, got {value!r}")


def check_dtype(hook: str, dtype: Any) -> None:
    """Refuse what numbers cannot travel in; None is none."""
    if dtype is None or dtype in (torch.bfloat16, torch.float16):
        return
    raise ValueError(f"{hook}() takes dtype=torch.bfloat16 or torch.float16, or None, got {dtype!r}")


def read_patterns(hook: str, name: str, value: Any) -> tuple[str, ...]:
    """Return patterns, sorted: a set has another order on each rank. A string alone would be letters."""
    patterns = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
    if not all(isinstance(each, str) and each for each in patterns):
        raise ValueError(
            f"{hook}() needs {name} to be a list of names or patterns such as ['head.*'], got {value!r}"
        )
    return tuple(sorted(patterns))


def check_inner(hook: str, inner: Any) -> None:
    """Refuse a hook inside a hook that is none."""
    if not callable(inner):
        raise TypeError(
            f"{hook}() takes another hook inside, a function of (bucket, comm), got {type(inner).__name__}"
        )


def check_stateless(hook: str, inner: Any) -> None:
    """Refuse a hook inside a hook that remembers buckets: it would see other things than gradients."""
    check_inner(hook, inner)
    if isinstance(inner, StatefulHook):
        raise ValueError(
            f"{hook}() sends factors through the hook inside it, which may remember nothing of them; got "
            f"{inner!r}. Give it average or in_dtype(torch.bfloat16, average), or nest the other way round"
        )
