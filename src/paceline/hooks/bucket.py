"""What a hook gets to see, and what it may be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from paceline.comm import Comm, Pending

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(slots=True, eq=False)
class GradBucket:
    """One bucket on its way out: this rank's gradients, flat, and who they belong to. Not to be written to.

    ``is_scaled``: they were multiplied by ``comm.mean_factor()`` when they were copied, so that a sum is a
    mean. Only ``average`` ever sees such a bucket.
    """

    index: int
    flat: torch.Tensor
    parameters: Sequence[torch.Tensor]
    names: Sequence[str]
    is_last: bool
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # a flat tensor into the parameters' shapes
    is_scaled: bool = False

    def gradients(self) -> Sequence[torch.Tensor]:
        """View the bucket as the parameters' gradients."""
        return self.split(self.flat)

    def holding(self, flat: torch.Tensor) -> "GradBucket":
        """Return the same bucket with other contents, for the hook inside a hook."""
        return replace(self, flat=flat)


Hook = Callable[[GradBucket, Comm], Pending]


class StatefulHook:
    """A hook that remembers something from step to step. Override what is needed.

    ``planned`` is the order of parameters that the plan was made from: the engine writes it whenever it has
    been learned. ``plan_to_take`` is that of a saved run: the engine makes its plan from it before the next
    backward, and sets it back to None.
    """

    planned: tuple[str, ...] = ()
    plan_to_take: tuple[str, ...] | None = None

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        """Start the bucket's collectives. Called in plan order, the same on every rank."""
        raise NotImplementedError

    def bind(self, named: Named, comm: Comm) -> None:
        """Get to know the parameters and the ranks. Called once, by every rank, before the first bucket.

        Raise before anything is changed: a hook that was refused is as it was.
        """

    def begin(self) -> None:
        """Note that a backward begins. Called once by the engine, on every rank, before the first bucket."""

    def settle(self) -> None:
        """Make the ranks' weights equal, if the hook lets them differ. Called by every rank before another
        hook takes over.
        """

    def unbind(self) -> None:
        """Let go of them: the replica has been detached, or has got another hook."""

    def forget(self) -> None:
        """Drop what an unfinished step has left behind. Called on every rank when a step was dropped."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has to save to resume bit for bit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state, on the rank that saved it."""


H = TypeVar("H", bound=Hook)
Way = Literal["mean", "sum", "own"]


def surely(hook: H) -> H:
    """Mark a hook whose end needs no confirmation: once started, it cannot fail on one rank only."""
    hook.is_sure = True  # type: ignore[attr-defined]
    return hook


def is_sure(hook: Hook) -> bool:
    """Tell whether the ranks may wait for a hook's collectives without asking each other first."""
    return getattr(hook, "is_sure", False)


def may_join(hook: Hook) -> bool:
    """Tell whether a hook can do without the steps of ranks that have run out of batches."""
    return getattr(hook, "may_join", True)


def way_of(hook: Hook) -> Way:
    """Say what a hook makes of gradients that cannot be in a bucket, such as sparse ones."""
    return getattr(hook, "way", "mean")


def name_of(hook: Hook) -> str:
    """Name a hook with its settings; the ranks compare these names."""
    if isinstance(hook, StatefulHook):
        return repr(hook)
    return str(getattr(hook, "label", None) or getattr(hook, "__qualname__", type(hook).__qualname__))
