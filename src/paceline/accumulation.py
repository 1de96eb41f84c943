"""What autograd does with a gradient at a parameter, for many at once."""

from collections.abc import Sequence

import torch


def accumulate(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to what the parameters have; where there is nothing, keep a copy."""
    new: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    old: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        present = parameter.grad
        if present is None and gradient.layout is torch.strided:
            present, (there, given) = torch.empty_like(parameter, dtype=gradient.dtype), new
            parameter.grad = present
        elif present is None:
            parameter.grad = gradient.clone()
            continue
        elif present.layout is not torch.strided or gradient.layout is not torch.strided:
            parameter.grad = present.detach() + gradient
            continue
        else:
            there, given = old
        there.append(present.detach())
        given.append(gradient)
    with torch.no_grad():
        if new[0]:
            torch._foreach_copy_(*new)
        if old[0]:
            torch._foreach_add_(*old)
