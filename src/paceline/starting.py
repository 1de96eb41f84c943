"""The start of a replica: what all ranks check together, before anything is attached."""

from collections.abc import Callable, Container, Sequence

import torch
from torch import nn

from paceline.agreement import agree_to_start, traits_of
from paceline.buffers import finish_broadcast, start_broadcast
from paceline.comm import Comm
from paceline.errors import name_some
from paceline.fingerprint import read_in_order
from paceline.hooks import Hook, StatefulHook
from paceline.reducer import bind
from paceline.settings import Settings, check_model, tensors_in
from paceline.sharded import check_sharding, leaf_of, local_parts, owner_of
from paceline.sharing import Holder, check_keepers, keepers_of, traits_of_sharing


def agree_and_take_state(
    module: nn.Module, comm: Comm, settings: Settings, modules: Container[int], others: Sequence[Holder]
) -> None:
    """Make sure that all ranks can replicate the same model, and take rank 0's state.

    ``modules`` are those, by identity, that are replicated, ``others`` the replicas.
    """
    keepers = keepers_of(module, settings.left_out, others)
    agree_to_start(
        comm,
        lambda: _check(module, comm, settings, modules, keepers),
        lambda: [
            *traits_of(module, settings.own(module)),
            *settings.traits(),
            *traits_of_sharing(module, settings, keepers),
        ],
    )
    if settings.take_state and comm.size > 1:
        finish_broadcast(start_broadcast(_state(module, settings.own(module)), comm))


def gradients_of_its_own(
    leaves: Sequence[torch.Tensor], tell: Callable[[bytes], Sequence[bytes]]
) -> set[int]:
    """Return which gradients that are there already differ between the ranks. Every rank calls this.

    Those of a replica that this one replaces, and zeros, are the same on all. ``tell`` tells every rank
    something, and returns what all have told.
    """
    gradients = [owner_of(leaf).grad for leaf in leaves]
    there = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
    dense = {index: gradient for index, gradient in there.items() if gradient.layout is torch.strided}
    try:
        parts = local_parts([gradient.detach() for gradient in dense.values()])
        mine = {b"%d:%d" % told: told[0] for told in zip(dense, read_in_order(parts), strict=True)}
    except (RuntimeError, TypeError):  # of a kind that cannot be compared: the others wait to hear so
        mine = {}
    common = set(mine).intersection(*(frame.split(b",") for frame in tell(b",".join(mine))))
    return there.keys() - {mine[told] for told in common}


def agree_on_hook(hook: Hook, watched: Sequence[tuple[str, nn.Parameter]], comm: Comm) -> None:
    """Let the hook get to know the parameters. One that cannot, on one rank, makes all ranks raise."""
    if isinstance(hook, StatefulHook):
        leaves = [(name, leaf_of(parameter)) for name, parameter in watched]
        agree_to_start(comm, lambda: bind(hook, leaves, comm), lambda: [])


def _check(
    module: nn.Module, comm: Comm, settings: Settings, modules: Container[int], keepers: Sequence[Holder]
) -> None:
    check_model(module, settings)
    check_sharding(
        tensors_in(module, settings.left_out), lambda: comm.ranks, is_chosen=settings.is_group_chosen
    )
    comm.claim(module)
    _check_overlap(module, modules)
    check_keepers(module, comm, settings, keepers)


def _check_overlap(module: nn.Module, replicas: Container[int]) -> None:
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


def _state(module: nn.Module, left_out: frozenset[str]) -> list[torch.Tensor]:
    return [tensor.detach() for _, tensor in tensors_in(module, left_out)]
