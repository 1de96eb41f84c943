"""Tensors inside nested containers, as modules are called with."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Change = Callable[[Any], Any]


def map_tensors(change: Change, value: Any) -> Any:
    """Change every tensor in lists, tuples, mappings and dataclasses; ``change`` gets PackedSequences too.

    What holds nothing that changes is handed back itself, so that a module can still write into a container
    of its caller's.
    """
    if isinstance(value, torch.Tensor | PackedSequence):
        return change(value)
    if isinstance(value, tuple):
        return _tuple(change, value)
    if isinstance(value, list):
        return _with(value, _changed(change, enumerate(value)), list.__setitem__)
    if isinstance(value, MutableMapping):
        return _with(value, _changed(change, value.items()), type(value).__setitem__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with(value, _changed(change, _fields(value)), object.__setattr__)
    return value


def _fields(value: Any) -> list[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _changed(change: Change, items: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    both = ((key, item, map_tensors(change, item)) for key, item in items)
    return [(key, new) for key, item, new in both if new is not item]


def _with(value: Any, changed: Sequence[tuple[Any, Any]], write: Callable[[Any, Any, Any], None]) -> Any:
    """Return a copy with other entries, made without the constructor: the class may be anybody's."""
    if not changed:
        return value
    twin = copy.copy(value)
    for key, new in changed:
        write(twin, key, new)
    return twin


def _tuple(change: Change, value: tuple[Any, ...]) -> Any:
    items = [map_tensors(change, item) for item in value]
    if all(new is item for new, item in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
