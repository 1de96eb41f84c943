"""Follows a replicated module that gets other parameters: layers that are added or replaced after wrapping,
and parameters that are swapped in place, as ``load_state_dict()`` does where torch is asked to.

Looked for before a reduced backward, and before a forward that one is to follow. All ranks have to change the
module at the same point; what is new starts as rank 0's, and what is swapped stays what it is.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.across import Across
from paceline.buffer_policies import Due
from paceline.buffers import BufferSync, finish_broadcast, names_of, start_broadcast
from paceline.comm import Comm
from paceline.errors import name_some
from paceline.interrupts import interrupts
from paceline.precision import LowPrecision
from paceline.reducer import Reducer
from paceline.settings import Settings, tensors_in, watched_in, wishes_for
from paceline.sharded import check_sharding
from paceline.sharing import Sharing
from paceline.watches.modules import module_watch


class Owner(Protocol):
    """A replica, as far as the parameters of its module are concerned."""

    comm: Comm
    settings: Settings
    sharing: Sharing
    reducer: Reducer | None
    watched: list[tuple[str, nn.Parameter]]
    buffers: BufferSync
    due: Due
    low_precision: LowPrecision | None

    @property
    def module(self) -> nn.Module | None:
        """The replicated module, as long as it is there."""

    def link_across(self) -> Across | None:
        """Link the ranks that hold other parts of the parameters, if there are any."""


class Following:
    """What a module was when it was looked at last."""

    def __init__(self, owner: Owner, module: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._state = module_watch.state
        self._buffer_names = names_of(module)

    @property
    def has_news(self) -> bool:
        """Whether some module of this process has changed since."""
        return module_watch.state != self._state

    def look_again(self, leaves: Callable[[], set[int]] | None = None) -> None:
        """Watch the parameters that the module has now.

        With ``leaves``, of a backward, only if that is one of this module: other ranks may leave it out.
        """
        if self.has_news:
            with interrupts:
                self._watch_anew(leaves)

    def _watch_anew(self, leaves: Callable[[], set[int]] | None) -> None:
        owner = self._owner()
        if owner is None or (module := owner.module) is None or (reducer := owner.reducer) is None:
            return
        state, (_, swaps) = module_watch.state, self._state
        watched = _watched_now(owner, module)
        if not all(isinstance(p, nn.Parameter) and p.is_leaf for _, p in watched):
            return  # something stands in for the parameters, for this forward: the backward is going to look
        are_swapped = state[1] != swaps and not reducer.hears_all
        if not are_swapped and [id(p) for _, p in watched] == [id(p) for p in reducer.parameters]:
            self._state = state
            return
        if leaves is not None and not _is_of(leaves(), watched, reducer.parameters):
            return
        settings, comm = owner.settings, owner.comm
        tensors = tensors_in(module, settings.left_out)
        check_sharding(tensors, lambda: comm.ranks, is_chosen=settings.is_group_chosen)
        # Not noted before all ranks have agreed: if one of them fails, it is looked for again.
        new: list[torch.Tensor] = [
            parameter.detach()
            for parameter in reducer.rewatch(watched, wishes_for(module, watched, settings))
        ]
        self._state, owner.watched = state, watched
        reducer.set_across(owner.link_across())
        if owner.low_precision is not None:
            owner.low_precision.attach_anew(settings.left_out)
        new += self._follow_buffers(owner, module)
        if settings.take_state and new:
            finish_broadcast(start_broadcast(new, comm))

    def _follow_buffers(self, owner: Owner, module: nn.Module) -> list[torch.Tensor]:
        """Keep the buffers equal that the module has now; return new ones."""
        settings = owner.settings
        before = set(self._buffer_names)
        self._buffer_names = names_of(module)
        owner.buffers = BufferSync(module, owner.comm, settings.buffers, settings.left_out, owner.due)
        if owner.reducer is not None:
            owner.reducer.set_buffers(owner.buffers)
        own = settings.own(module)
        return [b for name, b in module.named_buffers() if name not in before and name not in own]


def _watched_now(owner: Owner, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return what a module has now and does not leave to others, and what others leave to it."""
    watched = owner.sharing.own(watched_in(module, owner.settings.left_out))
    known, entrusted = {id(p) for _, p in watched}, owner.sharing.entrusted()
    return watched + [(name, p) for name, p in owner.watched if id(p) in entrusted - known]


def _is_of(leaves: set[int], now: Sequence[tuple[str, Any]], before: Sequence[torch.Tensor]) -> bool:
    """Tell whether a backward is one of the parameters that a module has now.

    It may be one of those that it had before, whose forward has run already, or of none.
    """
    present = {id(parameter) for _, parameter in now}
    known = {id(parameter) for parameter in before}
    if leaves.isdisjoint(known - present):
        return not leaves.isdisjoint(present)
    new = [name for name, parameter in now if id(parameter) in leaves - known]
    if new:
        raise RuntimeError(
            f"the module was given other parameters ({name_some(new)}) in place of some that this backward "
            "reaches as well, so that not all of them can be reduced. Run the backwards of all forwards "
            "before parameters are replaced"
        )
    return False
