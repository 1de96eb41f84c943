"""Compiled training: the same plan, inside captured graphs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.compile.cutting import cut as cut
    from paceline.compile.splitting import last_cuts as last_cuts
    from paceline.compile.splitting import split as split

# No module of this package is called like a name here: importing it would put the module in the name's place.
_HOMES = {"cut": "cutting", "last_cuts": "splitting", "split": "splitting"}

__all__ = ["cut", "last_cuts", "split"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.compile' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.compile.{_HOMES[name]}"), name)
