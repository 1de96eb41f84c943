"""Distributed autograd: a pass over several processes keeps its gradients in a context, not in ``.grad``.

While a backward of such a pass is reduced, the parameters borrow their gradients from the context, and what
the ranks have agreed on is written back into it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from paceline.torch_private import agent_is_set, context_is_live, context_is_ours, gradients_in_context


class Context:
    """A context of distributed autograd, as this process knows it."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return context_is_live(self.number)

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it; others' come with a call from there."""
        return context_is_ours(self.number)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of the pass so far: the tensors themselves, so that they can be written."""
        return gradients_in_context(self.number)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether the pass has computed a gradient of this parameter."""
        return parameter in self.gradients()

    @contextlib.contextmanager
    def lent(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let parameters have their gradients inside, and take back what has become of them.

        A gradient that all ranks have dropped becomes zero: a context cannot forget one.
        """
        theirs = self.gradients()
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = theirs.get(parameter)
        try:
            yield
            with torch.no_grad():
                for parameter in parameters:
                    if parameter in theirs:
                        _write(theirs[parameter], parameter.grad)
            _finish({gradient.device for gradient in theirs.values()})
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


def _write(gradient: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is None:
        gradient.zero_()
    elif value is not gradient:
        gradient.copy_(value)


def _finish(devices: Iterable[torch.device]) -> None:
    """Wait for what was written on GPUs: who reads on another stream waits only for what a pass computes."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def unknown_context(name: str = "a parameter") -> RuntimeError:
    """Say that a parameter's gradient is in a context that nobody has told us of, or was in one."""
    return RuntimeError(
        f"{name} got a gradient, but its .grad is empty: the gradient is in a context of distributed "
        "autograd that this process has not heard of, or that has ended. Call the replicated module itself "
        "inside the context, or call torch.distributed.autograd.backward() in this process"
    )


def refuse_context(name: str) -> None:
    """Raise if a parameter's gradient is in a context that nobody has told us of."""
    if agent_is_set():
        raise unknown_context(name)
