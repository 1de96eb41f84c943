"""Parameters that several replicated modules share: the first replica keeps them, and reduces them for all.

    actor    body ─ policy    replicated first: reduces body and policy
    critic   body ─ value     replicated next: reduces value, and leaves body to the actor's replica

A parameter has one gradient, and a place in one bucket. A backward of the critic reaches both replicas, which
are closed together. A keeper goes on with what is left to it as long as somebody leaves it something, even
when its own module is gone: modules are collected at different times on different ranks, and nothing may
depend on that.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.comm import Comm
from paceline.errors import name_some
from paceline.hooks import name_of
from paceline.reducer import Reducer
from paceline.settings import Settings, watched_in

Named = tuple[str, nn.Parameter]


class Holder(Protocol):
    """A replica, as far as others share its parameters."""

    settings: Settings
    comm: Comm
    reducer: Reducer | None
    sharing: "Sharing"

    @property
    def module(self) -> nn.Module | None:
        """The replicated module, as long as it is there."""

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that are watched."""

    def detach(self) -> Any:
        """Take everything off again."""


class Sharing:
    """To whom a replica leaves parameters, and who leaves some to it."""

    def __init__(self, keepers: Iterable[Any] = ()) -> None:
        self.keepers: list[Any] = list(keepers)
        self.leavers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_over = False  # its module or wrapper is gone: it only goes on for others

    @property
    def is_needed(self) -> bool:
        """Whether somebody who is still there leaves parameters to it."""
        return any(not leaver.sharing.is_over for leaver in self.leavers)

    def begin(self, replica: Holder) -> None:
        """Tell the keepers."""
        for keeper in self.keepers:
            keeper.sharing.leavers.add(replica)

    def take_over(self, replica: Holder, replaces: Holder) -> None:
        """Have left to this replica what was left to the one that is replaced."""
        for leaver in list(replaces.sharing.leavers):
            keepers = leaver.sharing.keepers
            keepers[keepers.index(replaces)] = replica
            self.leavers.add(leaver)
            replaces.sharing.leavers.discard(leaver)

    def let_go(self, replica: Holder) -> None:
        """Leave nothing to anybody any more. A keeper whom nobody needs now is done."""
        while self.keepers:
            sharing = (keeper := self.keepers.pop()).sharing
            sharing.leavers.discard(replica)
            if sharing.is_over and not sharing.is_needed:
                keeper.detach()

    def own(self, watched: Sequence[Named]) -> list[Named]:
        """Return those parameters that are not left to others."""
        kept = {id(p) for keeper in self.keepers for p in keeper.parameters()}
        return [(name, p) for name, p in watched if id(p) not in kept]

    def left(self, module: nn.Module, left_out: frozenset[str]) -> list[Named]:
        """Return those that are."""
        watched = watched_in(module, left_out)
        own = {id(p) for _, p in self.own(watched)}
        return [(name, p) for name, p in watched if id(p) not in own]

    def entrusted(self) -> set[int]:
        """Return the ids of what others leave to this replica, and of more that they have."""
        modules = [(leaver.module, leaver.settings.left_out) for leaver in self.leavers]
        return {id(p) for module, out in modules if module is not None for _, p in watched_in(module, out)}


def keepers_of(module: nn.Module, left_out: frozenset[str], replicas: Iterable[Any]) -> list[Any]:
    """Return the replicas that have parameters of this module."""
    mine = {id(p) for name, p in module.named_parameters() if name not in left_out}
    return [replica for replica in replicas if any(id(p) in mine for p in replica.parameters())]


def traits_of_sharing(
    module: nn.Module, settings: Settings, keepers: Sequence[Holder]
) -> list[tuple[str, str]]:
    """Write down what every rank has to leave to the same replicas."""
    left = [[name for name, _ in Sharing([keeper]).left(module, settings.left_out)] for keeper in keepers]
    return [("what earlier replicas reduce", "; ".join(map(name_some, left)))] if left else []


def check_keepers(module: nn.Module, comm: Comm, settings: Settings, keepers: Sequence[Holder]) -> None:
    """Refuse to leave parameters to replicas that would treat them in another way."""
    for keeper in keepers:
        known = {id(p) for p in keeper.parameters()}
        shared = name_some([name for name, p in module.named_parameters() if id(p) in known])
        outer = keeper.module
        if outer is not None and any(part is module for part in outer.modules()):
            raise ValueError(
                f"{type(module).__name__} shares parameters with a module that is replicated already: "
                f"{shared}. Replicate the outer module only, or detach() the other one first"
            )
        if odd := _differences(comm, settings, keeper):
            raise ValueError(
                f"{type(module).__name__} shares parameters with a module that is replicated already: "
                f"{shared}. They are reduced in one way, but this replica is to differ in {name_some(odd)}. "
                "Replicate both alike, or detach() the other one first"
            )


def _differences(comm: Comm, settings: Settings, keeper: Holder) -> list[str]:
    """Name what makes a difference for the gradients that two replicas share."""
    theirs, reducer = keeper.settings, keeper.reducer
    hook = name_of(reducer.hook if reducer else theirs.hook)
    pairs = {
        "ranks": (list(comm.ranks), list(keeper.comm.ranks)),
        "hook": (name_of(settings.hook), hook),
        "unused": (settings.unused, theirs.unused),
        "guard": (settings.guard, theirs.guard),
        "deterministic": (settings.deterministic, theirs.deterministic),
        "check_finite": (settings.check_finite, theirs.check_finite),
    }
    odd = [name for name, (one, other) in pairs.items() if one != other]
    if settings.precision is not None or theirs.precision is not None:
        odd.append("precision, which casts parameters for one module's forward")
    if reducer is not None and reducer.wiring.consumer is not None:
        odd.append("an optimizer inside backward")
    return odd
