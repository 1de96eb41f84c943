"""A forward and a backward before the first step, for what they compile; they leave nothing behind."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import PeerFailed, name_ranks, words_of
from paceline.nested import map_tensors
from paceline.reducer import Reducer


def warm_up(
    module: nn.Module,
    reducer: Reducer | None,
    forward: Callable[..., Any],
    loss: Callable[[Any], torch.Tensor],
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Run a forward and a backward on every rank, inside ``no_sync()``, and wait until all have done so."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise RuntimeError(
            "warmup() computes gradients and drops them: call it where there are none, before the first step "
            "or after zero_grad()"
        )
    failure: BaseException | None = None
    try:
        with leaving_nothing(module):
            torch.autograd.backward(loss(forward(*inputs, **kwargs)))
    except Exception as error:
        failure = error
    if reducer is not None:
        _tell(reducer, failure)
    if failure is not None:
        raise failure


def _tell(reducer: Reducer, failure: BaseException | None) -> None:
    """Wait for everybody; raise on the others if it has failed on some rank."""
    frames = reducer.exchange(b"warmup", words_of(failure).encode() if failure else b"")
    failed = {rank: frame.decode() for rank, frame in enumerate(frames) if frame}
    if failed and failure is None:
        rank, text = min(failed.items())
        raise PeerFailed(
            f"warmup() raised on {name_ranks(sorted(failed))}: {text}\nNothing was changed on any rank.",
            rank,
            text,
        )


@contextlib.contextmanager
def leaving_nothing(module: nn.Module) -> Iterator[None]:
    """Put buffers and random numbers back afterwards, and drop gradients."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter in module.parameters():
            parameter.grad = None


def total_of(outputs: Any) -> torch.Tensor:
    """Add up everything that a gradient can come from."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor.float().sum())
        return tensor

    map_tensors(note, outputs)
    if not found:
        raise ValueError("warmup() found no output that needs a gradient; give it a loss, of the output")
    return torch.stack(found).sum()
