"""The mean of the ranks' parameters, for training in which they drift apart."""

from collections.abc import Iterable

import torch

from paceline.comm import Comm
from paceline.hooks.widened import widened
from paceline.torch_private import flatten, unflatten


@torch.no_grad()
def average_parameters(parameters: Iterable[torch.Tensor], comm: Comm) -> None:
    """Give every rank the mean of the ranks' parameters. A collective: all ranks of ``comm`` call it alike.

    One message for each dtype and device. 16-bit parameters are averaged in 32 bits: rounding would wear
    them away.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter.detach())
    under_way = [(group, comm.average(_joined(group))) for group in groups.values()]
    for group, pending in under_way:
        torch._foreach_copy_(group, list(unflatten(pending.wait(), group)))


def _joined(group: list[torch.Tensor]) -> torch.Tensor:
    flat = flatten([tensor.contiguous() for tensor in group])
    if len(group) == 1:
        flat = flat.clone()  # of one tensor, flatten makes no copy but a view
    return flat if flat.is_complex() else flat.to(widened(flat.dtype))
