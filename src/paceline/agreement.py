"""The start of a replica: all ranks hold the same model, or all raise the same message about what differs."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from paceline.comm import Comm
from paceline.errors import PeerFailed, RanksDisagree, name_ranks, name_some
from paceline.sharded import describe

T = TypeVar("T")
Trait = tuple[str, str]  # what a tensor is called, and everything about it that has to be the same


def agree_to_start(comm: Comm, check: Callable[[], None], traits: Callable[[], Sequence[Trait]]) -> None:
    """Run this rank's own checks, then compare the models. A rank that refuses makes all ranks raise."""
    try:
        check()
        mine, failure = list(traits()), None
    except (TypeError, ValueError) as error:
        mine, failure = [], error
    card = {"failure": str(failure or ""), "digest": _digest(mine)}
    cards = [json.loads(frame) for frame in comm.gather_bytes(json.dumps(card).encode())]
    if failure is not None:
        raise failure
    for rank, card in enumerate(cards):
        if card["failure"]:
            raise PeerFailed(
                f"rank {rank} could not replicate its model: {card['failure']}", rank, card["failure"]
            )
    if len({card["digest"] for card in cards}) > 1:
        everyone = [dict(json.loads(frame)) for frame in comm.gather_bytes(json.dumps(mine).encode())]
        raise RanksDisagree(_describe(everyone))


def or_refuse(comm: Comm, read: Callable[[], T]) -> T:
    """Read this rank's arguments; if that fails, tell the ranks that are about to compare models."""
    try:
        return read()
    except (TypeError, ValueError) as error:
        refusal = error

    def refuse() -> None:
        raise refusal

    agree_to_start(comm, refuse, lambda: [])
    raise refusal


def traits_of(module: nn.Module, left_out: frozenset[str] = frozenset()) -> list[Trait]:
    """Write down what has to be the same on every rank: names, shapes, dtypes, layout, what is trained."""
    kinds = ((_parameter, module.named_parameters()), (_buffer, module.named_buffers()))
    return [
        (name, "left out" if name in left_out else trait(tensor))
        for trait, named in kinds
        for name, tensor in named
    ]


def _digest(traits: Sequence[Trait]) -> str:
    return hashlib.blake2b(json.dumps(traits).encode(), digest_size=16).hexdigest()


def _describe(everyone: Sequence[dict[str, str]]) -> str:
    names = dict.fromkeys(name for traits in everyone for name in traits)
    odd = [line for name in names if (line := _difference(name, everyone))]
    if not odd:
        odd = [_first_swap(everyone)]
    return (
        f"the ranks hold different models: {name_some(odd)}. Build the model the same way on every rank: "
        "the same arguments, the same order, the same parts frozen."
    )


def _difference(name: str, everyone: Sequence[dict[str, str]]) -> str:
    """Say how one tensor differs between the ranks, or nothing."""
    holders: dict[str, list[int]] = {}
    for rank, traits in enumerate(everyone):
        holders.setdefault(traits.get(name, "missing"), []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name} is " + " but ".join(f"{what} on {name_ranks(ranks)}" for what, ranks in holders.items())


def _first_swap(everyone: Sequence[dict[str, str]]) -> str:
    """Say where the same names come in another order."""
    orders = [list(traits) for traits in everyone]
    place = next(i for i, names in enumerate(zip(*orders, strict=True)) if len(set(names)) > 1)
    holders: dict[str, list[int]] = {}
    for rank, order in enumerate(orders):
        holders.setdefault(order[place], []).append(rank)
    came = " but ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in holders.items())
    return f"the same names come in another order, at place {place} {came}"


def _parameter(p: torch.Tensor) -> str:
    return f"{_shape(p)} {_dtype(p)}, {_trained(p)}{_layout(p)}{describe(p)}"


def _buffer(b: torch.Tensor) -> str:
    return f"buffer {_shape(b)} {_dtype(b)}{describe(b)}"


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _trained(tensor: torch.Tensor) -> str:
    return "trainable" if tensor.requires_grad else "frozen"


def _layout(tensor: torch.Tensor) -> str:
    return "" if tensor.is_contiguous() else f", strides {tuple(tensor.stride())}"
