"""What paceline hangs around forwards: of no use to copies of a module, and unseen by ``torch.jit``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from torch import nn

from paceline.torch_private import around_scripting, takes_hooks

# What stands in for a hook of ours in copies and pickles: it takes anything and returns None, and it loads
# where paceline is not installed.
_IN_COPIES = nullcontext.__exit__


class OwnHook:
    """A forward hook that does nothing in copies and pickles of its module."""

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), _IN_COPIES.__name__)


@cache
def stay_out_of_scripts() -> None:
    """Have modules scripted as if nothing were hung on them, from now on."""
    around_scripting(_without_own_hooks)


@contextmanager
def _without_own_hooks(module: nn.Module) -> Iterator[None]:
    """Take our hooks off a module and its parts, and put them back in their places."""
    were: list[tuple[dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]] = []
    for part in filter(takes_hooks, module.modules()):
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            own = [key for key, hook in hooks.items() if _is_own(hook)]
            if own:
                were.append((hooks, dict(hooks)))
                for key in own:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in were:
            hooks.clear()
            hooks.update(before)


def _is_own(hook: object) -> bool:
    return isinstance(hook, OwnHook) or getattr(hook, "__func__", None) is _IN_COPIES
