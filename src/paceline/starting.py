"""The start of a replica: what all ranks check together, before anything is attached."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from paceline.agreement import agree_to_start, traits_of
from paceline.buffers import finish_broadcast, start_broadcast
from paceline.comm import Comm
from paceline.errors import name_some
from paceline.hooks import Hook, StatefulHook
from paceline.reducer import bind
from paceline.settings import Settings, check_model
from paceline.sharded import check_sharding, leaf_of


class Holder(Protocol):
    """A replica, as far as its parameters are concerned."""

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that are watched."""


Holders = Mapping[int, Holder]  # by the identity of their module


def agree_and_take_state(module: nn.Module, comm: Comm, settings: Settings, others: Holders) -> None:
    """Make sure that all ranks can replicate the same model, and take rank 0's state."""
    agree_to_start(
        comm,
        lambda: _check(module, comm, settings, others),
        lambda: [*traits_of(module, settings.own(module)), *settings.traits()],
    )
    if settings.take_state and comm.size > 1:
        finish_broadcast(start_broadcast(_state(module, settings.own(module)), comm))


def agree_on_hook(hook: Hook, watched: Sequence[tuple[str, nn.Parameter]], comm: Comm) -> None:
    """Let the hook get to know the parameters. One that cannot, on one rank, makes all ranks raise."""
    if isinstance(hook, StatefulHook):
        leaves = [(name, leaf_of(parameter)) for name, parameter in watched]
        agree_to_start(comm, lambda: bind(hook, leaves, comm), lambda: [])


def _check(module: nn.Module, comm: Comm, settings: Settings, others: Holders) -> None:
    check_model(module, settings)
    check_sharding(module, lambda: comm.ranks, is_chosen=settings.is_group_chosen)
    comm.claim(module)
    _check_overlap(module, others)


def _check_overlap(module: nn.Module, replicas: Holders) -> None:
    kind = type(module).__name__
    if id(module) in replicas:
        raise ValueError(
            f"this {kind} is replicated already; use paceline.replica(module), or detach() it first"
        )
    compiled = getattr(module, "_orig_mod", None)
    if compiled is not None and id(compiled) in replicas:
        raise ValueError(
            f"this is the compiled form of a {type(compiled).__name__} that is replicated already: train it "
            "as it is"
        )
    inside = [name for name, part in module.named_modules() if id(part) in replicas]
    if inside:
        raise ValueError(
            f"{kind} holds parts that are replicated already: {name_some(inside)}; detach() them first"
        )
    if shared := shared_with(module, replicas):
        raise ValueError(
            f"{kind} shares parameters with a module that is replicated already: {name_some(shared)}. "
            "Replicate the outer module only, or detach() the other one first"
        )


def shared_with(module: nn.Module, replicas: Holders) -> list[str]:
    """Name the parameters that belong to a replica already."""
    owned = {id(p) for other in replicas.values() for p in other.parameters()}
    return [name for name, parameter in module.named_parameters() if id(parameter) in owned]


def _state(module: nn.Module, left_out: frozenset[str]) -> list[torch.Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return [tensor.detach() for name, tensor in named if name not in left_out]
