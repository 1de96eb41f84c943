"""Hooks in torch's form, ``hook(state, bucket) -> Future``, run unchanged."""

import copy
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm import Comm, Pending
from paceline.hooks.bucket import GradBucket, Hook
from paceline.hooks.checks import odd_signature
from paceline.torch_private import CFuture

TorchHook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class BucketView:
    """A bucket as hooks in torch's form read it."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        """Tell the bucket's place in the plan."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one flat tensor."""
        return self._bucket.flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Put another flat tensor in its place."""
        self._bucket = self._bucket.holding(buffer)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients one by one, as views of the flat tensor."""
        return list(self._bucket.gradients())

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that they belong to."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the backward."""
        return self._bucket.is_last


class FromTorch:
    """A hook in torch's form with its state, as one of ours."""

    def __init__(self, state: Any, hook: TorchHook) -> None:
        check_torch_hook(hook)
        self.state = state
        self.hook = hook
        self.label = f"{_name(hook)} (torch's form)"

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        future = self.hook(self.state, BucketView(bucket))
        if not isinstance(future, torch.futures.Future | CFuture):
            raise RuntimeError(  # torch's exception, and its words
                "DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{type(future).__name__} from {_name(self.hook)}"
            )
        return FutureResult(future, bucket, _name(self.hook))

    def __deepcopy__(self, memo: dict[int, Any]) -> "FromTorch":
        twin = memo[id(self)] = FromTorch.__new__(FromTorch)
        twin.__dict__.update(self.__dict__)
        twin.state, twin.hook = (_copied_or_shared(part, memo) for part in (self.state, self.hook))
        return twin


class FutureResult(Pending):
    """What a hook in torch's form has promised."""

    def __init__(self, future: Any, bucket: GradBucket, name: str) -> None:
        self._future = future
        self._bucket = bucket
        self._name = name

    def wait(self) -> torch.Tensor:
        value = self._future.wait()
        if isinstance(value, Sequence) and len(value) == 1:
            value = value[0]
        expected = self._bucket.flat.numel()
        if not isinstance(value, torch.Tensor) or value.numel() != expected:
            got = f"{value.numel()}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(
                f"the future of the communication hook {self._name} has to hold a tensor of the bucket's "
                f"{expected} elements, got {got}"
            )
        return value


def _copied_or_shared(part: Any, memo: dict[int, Any]) -> Any:
    """Copy a part of a hook, or share what cannot be copied: process groups, and what holds them."""
    before = dict(memo)
    try:
        return copy.deepcopy(part, memo)
    except Exception:
        # Half-made copies must not be found by who copies the same things later.
        memo.clear()
        memo.update(before)
        return part


def check_torch_hook(hook: Any) -> None:
    """Refuse what cannot be called as ``hook(state, bucket)``, or says that it is something else.

    Where torch refuses it too, in torch's words.
    """
    if not callable(hook):
        raise TypeError(
            "Communication hook must be callable. Give a function of (state, bucket), not "
            f"{type(hook).__name__}"
        )
    if (signature := odd_signature(hook, 2)) is not None:
        raise TypeError(
            f"the communication hook {_name(hook)} has to take (state, bucket), but it is "
            f"{_name(hook)}{signature}"
        )
    hints = _hints(hook)
    bucket, future = hints.get("bucket"), hints.get("return")
    if getattr(bucket, "__name__", "") != "GradBucket":
        _check_hint(
            hook, bucket, (GradBucket, BucketView, Any), "bucket annotation should be dist.GradBucket"
        )
    futures = (torch.futures.Future, torch.futures.Future[torch.Tensor], CFuture, Any)
    _check_hint(hook, future, futures, "return annotation should be torch.futures.Future[torch.Tensor]")


def _check_hint(hook: Any, hint: Any, allowed: Sequence[Any], rule: str) -> None:
    if hint is not None and hint not in allowed:
        raise ValueError(f"Communication hook: {rule}. That of {_name(hook)} is {hint}")


def _hints(hook: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(hook)
    except (NameError, TypeError, AttributeError):
        return {}


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def sends_by_comm(hook: Hook) -> bool:
    """Tell whether a hook sends by the comm that it is given; one in torch's form has ways of its own."""
    while (inner := getattr(hook, "inner", None)) is not None:
        hook = inner
    return not isinstance(hook, FromTorch)
