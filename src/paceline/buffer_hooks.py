"""A user's own way of making buffers equal, in torch's form: ``hook(state, {name: buffer})``.

It runs before or after each forward of the wrapper, in place of taking one rank's buffers, and may return
futures: they are waited for when backward ends.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.hooks import name_of
from paceline.hooks.checks import odd_signature
from paceline.torch_private import unnoticed_by_autograd

LOCATIONS = ("PRE_FORWARD", "POST_FORWARD")


@dataclass(frozen=True)
class BufferHook:
    """The hook, what it is called with, and where."""

    state: Any
    hook: Any
    location: str

    @classmethod
    def of(cls, state: Any, hook: Any, location: Any) -> "BufferHook":
        """Check what torch's users register; ``location`` is torch's enumeration, or a name of it."""
        where = getattr(location, "name", location)
        if where not in LOCATIONS:
            raise ValueError(f"a buffer hook runs at {' or '.join(LOCATIONS)}, got {location!r}")
        _check(hook)
        return cls(state, hook, where)

    def run(self, named: Mapping[str, torch.Tensor]) -> list[Any]:
        """Call the hook, and return the futures that are still to be waited for."""
        with torch.no_grad(), _unnoticed(named.values()):
            futures = self.hook(self.state, dict(named))
        if futures is None:
            return []
        futures = list(futures) if isinstance(futures, list | tuple) else [futures]
        strange = [type(future).__name__ for future in futures if not hasattr(future, "wait")]
        if strange:
            raise TypeError(
                f"the buffer hook {name_of(self.hook)} has to return nothing, a future or a list of futures, "
                f"got {', '.join(strange)}"
            )
        return futures


def _unnoticed(buffers: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Let a forward have saved the buffers whose backward is still to come, as torch does."""
    versioned = tuple(buffer for buffer in buffers if not buffer.is_inference())
    return unnoticed_by_autograd(versioned)


def _check(hook: Any) -> None:
    if not callable(hook):
        raise TypeError(f"a buffer hook has to be a function of (state, buffers), got {type(hook).__name__}")
    if (signature := odd_signature(hook, 2)) is not None:
        raise TypeError(
            f"a buffer hook has to be a function of (state, buffers), but it is {name_of(hook)}{signature}"
        )
