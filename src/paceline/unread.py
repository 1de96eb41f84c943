"""The number that ``tensor.item()`` gives where tensors have no values: it can be logged, but not looked at.

It can be added up, averaged and formatted. What would decide something by it (a comparison, an ``if``,
``float()``) is refused, because each rank of a check would take the same way whatever a run would do.
"""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch


class Unread:
    """A number that nobody knows. ``refuse`` raises, and says what to do."""

    __array_ufunc__ = None  # leave arithmetic with numpy's numbers to us

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    def item(self) -> "Unread":
        return self

    def __repr__(self) -> str:
        return "?"

    def __format__(self, spec: str) -> str:
        return "?"

    def __round__(self, digits: int | None = None) -> "Unread":
        return self

    def __hash__(self) -> int:
        self._refuse()

    def _decide(self, *_other: Any) -> NoReturn:
        self._refuse()

    def _alone(self) -> "Unread":
        return self

    __bool__ = __float__ = __int__ = __index__ = __complex__ = _decide
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _decide
    __neg__ = __pos__ = __abs__ = _alone


def _combine(operation: Callable[[Any, Any], Any], *, reverse: bool) -> Callable[[Unread, Any], Any]:
    def combined(number: Unread, other: Any) -> Any:
        if isinstance(other, torch.Tensor):  # its shape and dtype are known, whatever the number is
            return operation(other, 1) if reverse else operation(1, other)
        return number

    return combined


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Unread, f"__{_name}__", _combine(getattr(operator, _name), reverse=False))
    setattr(Unread, f"__r{_name}__", _combine(getattr(operator, _name), reverse=True))
