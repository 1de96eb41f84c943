"""What an operator of torch's communicates, read from its arguments: kind, group, sizes, and with whom.

Private names of torch, seen in 2.11 and 2.13: the arguments of the operators in ``torch.ops.c10d`` and
``torch.ops._c10d_functional``, ``distributed_c10d._resolve_process_group``, ``_world.pg_group_ranks``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.call_site import users_line
from paceline.collective_log import RECEIVES, SENDS, Collective, Group

c10d: Any = distributed_c10d

Given = Mapping[str, Any]  # arguments, by name

INPUTS = ("input_tensors", "input_tensor", "tensors", "tensor", "input", "inputs", "self")
# What a rank takes part with, and what has to be of the same size on every rank, where it is something else:
# only the root of a scatter has an input, and the inputs of an all_gather may be of different sizes.
PAYLOADS = {"scatter_": ("output_tensors",), "barrier": (), "monitored_barrier_": ()}
ALIKE = {"allgather_": ("output_tensors",), "alltoall_": ()}
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "isend": SENDS,
    "irecv": RECEIVES,
    "recv_any_source_": RECEIVES,
}


def described(name: str, given: Given) -> Collective:
    """Describe a collective, or a message, that the user's code has just asked for."""
    kind, group = NAMES.get(name, name.strip("_")), known_group(_group_in(given))
    tensors = _tensors_in(given, PAYLOADS.get(name, INPUTS))
    root = given.get("root_rank", given.get("src") if kind == "broadcast" else None)
    peer = _peer_in(given, group) if kind in (SENDS, RECEIVES) else None
    op = given.get("reduce_op")
    return Collective(
        kind,
        group,
        nbytes=sum(each.numel() * each.element_size() for each in tensors),
        dtype="+".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in tensors)),
        sizes=_sizes(name, given, tensors),
        terms=(root, op if isinstance(op, str) else None, given.get("tag")),
        note=_with_whom(kind, peer if root is None else group.ranks[root]),
        where=users_line(),
        peer=peer,
    )


def _tensors_in(given: Given, names: Sequence[str]) -> list[torch.Tensor]:
    return _flat(next((given[name] for name in names if name in given), ()))


def _flat(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for each in given or () for tensor in _flat(each)]


def _sizes(name: str, given: Given, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the sizes that have to be the same on every rank."""
    if given.get("input_split_sizes") or given.get("output_split_sizes"):
        return ()
    alike = _tensors_in(given, ALIKE[name]) if name in ALIKE else tensors
    return tuple(each.numel() for each in alike)


def _peer_in(given: Given, group: Group) -> int:
    """Return whom a message goes to or comes from; -1 is whoever sends one."""
    rank = int(given.get("dst", given.get("src", -1)))
    return group.ranks[rank] if rank >= 0 else -1


def _with_whom(kind: str, rank: int | None) -> str:
    if rank is None:
        return ""
    way = "to" if kind in (SENDS, "reduce", "gather") else "from"
    return f" {way} rank {rank}" if rank >= 0 else " from any rank"


# ---- groups --------------------------------------------------------------------------------------


def known_group(group: Any) -> Group:
    """Describe a process group as all its members would."""
    ranks, name = tuple(dist.get_process_group_ranks(group)), str(group.group_name)
    same = [
        str(each.group_name)
        for each, members in c10d._world.pg_group_ranks.items()
        if tuple(members) == ranks
    ]
    words = str(group.group_desc)
    label = {"default_pg": "the default group", "undefined": ""}.get(words, words)
    return Group(ranks, same.index(name) if name in same else 0, label)


def _group_in(given: Given) -> Any:
    found = given.get("process_group", given.get("group_name", given.get("group")))
    if isinstance(found, str):
        return c10d._resolve_process_group(found)
    return dist.ProcessGroup.unbox(found) if isinstance(found, torch.ScriptObject) else found
