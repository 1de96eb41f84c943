"""Distributed autograd: a pass over several processes keeps its gradients in a context, not in ``.grad``.

While a backward of such a pass is reduced, the parameters borrow their gradients from the context, and what
the ranks have agreed on is written back into it.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from paceline.torch_private import agent_is_set, context_number, gradients_in_context


class Context:
    """The context of one pass, as the thread that runs a forward finds it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of the pass so far: the tensors themselves, so that they can be written."""
        return gradients_in_context(self._number)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether the pass has computed a gradient of this parameter."""
        return parameter in self.gradients()

    @contextlib.contextmanager
    def lent(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let parameters have their gradients inside, and take back what has become of them."""
        theirs = self.gradients()
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = theirs.get(parameter)
        try:
            yield
            with torch.no_grad():
                for parameter in parameters:
                    if parameter in theirs and parameter.grad is not None:
                        theirs[parameter].copy_(parameter.grad)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def refuse_context(name: str) -> None:
    """Raise if a parameter's gradient is in a context that nobody has told us of."""
    if agent_is_set():
        raise RuntimeError(
            f"{name} got a gradient, but its .grad is empty: the gradient is in a context of distributed "
            "autograd, which is reduced only if the forward went through DistributedDataParallel. Wrap the "
            "module in that, and call the wrapper"
        )


def current_context() -> Context | None:
    """Return the context that this thread computes in, if it computes in one."""
    number = context_number()
    return None if number is None else Context(number)
