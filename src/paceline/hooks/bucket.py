"""What a hook gets to see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.comm import Comm, Pending


@dataclass(frozen=True)
class GradBucket:
    """One bucket on its way out: this rank's gradients, flat, and who they belong to.

    ``is_scaled``: they were multiplied by ``comm.mean_factor()`` when they were copied, so that a sum is a
    mean. Only ``average`` ever sees such a bucket.
    """

    index: int
    flat: torch.Tensor
    parameters: Sequence[torch.Tensor]
    is_last: bool
    is_scaled: bool = False


Hook = Callable[[GradBucket, Comm], Pending]
