"""Buffers (BatchNorm's running figures and the like): every rank takes rank 0's, in one message."""

from collections.abc import Sequence

import torch
from torch import nn

from paceline.comm import Comm, Pending
from paceline.torch_private import flatten

Tensors = Sequence[torch.Tensor]

CHUNK_NBYTES = 64 * 1024 * 1024


class BufferSync:
    """Keeps a module's buffers equal to rank 0's; the caller says when."""

    def __init__(self, module: nn.Module, comm: Comm, left_out: frozenset[str] = frozenset()) -> None:
        # The dictionaries, not the tensors: a module may put another tensor under the same name.
        self._places = [
            (owner._buffers, name)
            for prefix, owner in module.named_modules()
            for name in owner._buffers
            if f"{prefix}.{name}".lstrip(".") not in left_out
        ]
        self._comm = comm

    def is_empty(self) -> bool:
        """Whether the module has no buffers."""
        return not self._places

    def start(self) -> list["Transfer"]:
        """Send rank 0's buffers on their way. Every rank has to call this at the same point."""
        found = (owner.get(name) for owner, name in self._places)
        return start_broadcast([buffer for buffer in found if buffer is not None], self._comm)

    def run(self) -> None:
        """Take rank 0's buffers now."""
        finish_broadcast(self.start())


class Transfer:
    """Tensors of one device, packed as bytes and on their way from rank 0."""

    def __init__(self, tensors: Tensors, comm: Comm) -> None:
        self._groups = list(_by_dtype(tensors).values())
        parts = [flatten(group).view(torch.uint8) for group in self._groups]
        self._sizes = [part.numel() for part in parts]
        self._pending: Pending = comm.broadcast(parts[0] if len(parts) == 1 else torch.cat(parts))
        self._keep = comm.rank == 0

    def finish(self) -> None:
        """Wait, and write what came into the tensors."""
        packed = self._pending.wait()
        if self._keep:
            return
        for group, part in zip(self._groups, torch.split_with_sizes(packed, self._sizes), strict=True):
            flat = part.clone().view(group[0].dtype)
            values = [
                v.view(t.shape)
                for v, t in zip(torch.split_with_sizes(flat, [t.numel() for t in group]), group, strict=True)
            ]
            # Through .data: a forward whose backward is still to come may have saved these tensors, and
            # taking rank 0's values is no edit that this backward has to be warned about.
            torch._foreach_copy_([tensor.data for tensor in group], values)


def start_broadcast(tensors: Tensors, comm: Comm) -> list[Transfer]:
    """Start sending rank 0's tensors to all ranks, bit for bit, whatever their dtype."""
    return [Transfer(chunk, comm) for chunk in _chunks([t for t in tensors if t.numel()])]


def finish_broadcast(transfers: list[Transfer]) -> None:
    """Write what was sent."""
    with torch.no_grad():
        for transfer in transfers:
            transfer.finish()


def _chunks(tensors: Tensors) -> list[list[torch.Tensor]]:
    """Group tensors by device, in chunks of bounded size."""
    chunks: list[list[torch.Tensor]] = []
    room: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        chunk, nbytes = room.get(tensor.device, ([], 0))
        if not chunk or nbytes + tensor.nbytes > CHUNK_NBYTES:
            chunk, nbytes = [], 0
            chunks.append(chunk)
        chunk.append(tensor)
        room[tensor.device] = (chunk, nbytes + tensor.nbytes)
    return chunks


def _by_dtype(tensors: Tensors) -> dict[torch.dtype, list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    return groups
