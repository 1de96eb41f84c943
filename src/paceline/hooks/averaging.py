"""The mean of the ranks' parameters, for training in which they drift apart."""

from collections.abc import Iterable, Sequence

import torch

from paceline.comm import Comm
from paceline.hooks.widened import widened
from paceline.interrupts import interrupts
from paceline.torch_private import flatten, unflatten


@torch.no_grad()
def average_parameters(
    parameters: Iterable[torch.Tensor], comm: Comm, *, dtype: torch.dtype | None = None
) -> None:
    """Give every rank the mean of the ranks' parameters. A collective: all ranks of ``comm`` call it alike.

    One message for each dtype and device. 16-bit parameters are averaged in 32 bits, where no other ``dtype``
    is asked for: rounding would wear them away.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter.detach())
    with interrupts:
        under_way = [(group, comm.average(_joined(group, dtype))) for group in groups.values()]
        for group, pending in under_way:
            torch._foreach_copy_(group, list(unflatten(interrupts.put_off(pending.wait), group)))


class Anchors:
    """What all ranks held after their last average, so that only how far they have moved has to travel.

    A move is small against what is moved, so 16 bits do for it where they would not for the weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.by_name: dict[str, torch.Tensor] = {}  # the same ones on every rank

    @torch.no_grad()
    def average(self, named: Sequence[tuple[str, torch.Tensor]], comm: Comm) -> None:
        """Give every rank the mean of the ranks' parameters. What has no anchor yet travels as it is."""
        with interrupts:  # the anchors have to be the same ones on every rank
            self._average(named, comm)

    def _average(self, named: Sequence[tuple[str, torch.Tensor]], comm: Comm) -> None:
        anchored = [(p, self._anchor_of(name, p)) for name, p in named if name in self.by_name]
        new = [(name, parameter) for name, parameter in named if name not in self.by_name]
        if new:
            average_parameters([parameter for _, parameter in new], comm)
            wide = [(name, p.detach()) for name, p in new if self._shrinks(p)]
            self.by_name |= {name: p.clone(memory_format=torch.contiguous_format) for name, p in wide}
        if anchored:
            parameters = [parameter.detach() for parameter, _ in anchored]
            anchors = [anchor for _, anchor in anchored]
            moves = torch._foreach_sub(parameters, anchors)
            average_parameters(moves, comm, dtype=self._dtype)
            torch._foreach_add_(anchors, moves)
            torch._foreach_copy_(parameters, anchors)

    def _anchor_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        # What was loaded may be elsewhere.
        anchor = self.by_name[name] = self.by_name[name].to(parameter.device, parameter.dtype)
        return anchor

    def _shrinks(self, parameter: torch.Tensor) -> bool:
        return parameter.is_floating_point() and parameter.dtype.itemsize > self._dtype.itemsize

    def clear(self) -> None:
        """Let everything travel as it is next time."""
        self.by_name = {}


def _joined(group: list[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    flat = flatten([tensor.contiguous() for tensor in group])
    if len(group) == 1:
        flat = flat.clone()  # of one tensor, flatten makes no copy but a view
    return flat if flat.is_complex() else flat.to(dtype or widened(flat.dtype))
