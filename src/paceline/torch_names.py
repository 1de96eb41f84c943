"""Names of torch's wrapper that frameworks and scripts reach for although they are private.

Each answers from paceline's own state. Where torch's engine needs to be told something that ours finds out
by itself, the call is accepted and does nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import name_some
from paceline.reducer import Reducer

_GIVE = "Give the parameters that _build_params_for_reducer() returns"
BROADCAST_NBYTES = 250 * 1024 * 1024


class ReducerFace:
    """The engine under the names of torch's reducer."""

    def __init__(self, engine: Reducer | None) -> None:
        self._engine = engine

    def prepare_for_backward(self, outputs: Any) -> None:
        """Accept torch's announcement of a backward; the first gradient is announcement enough."""

    def _rebuild_buckets(self) -> bool:
        """Accept the request; the plan is re-made when there is something to learn."""
        return False

    def _delay_all_reduce(self) -> None:
        """Accept the request; buckets go out when they are complete."""

    def _get_local_used_map(self) -> torch.Tensor:
        """Count, for each parameter, the ranks that used it in the last backward."""
        uses = self._engine.uses() if self._engine else []
        return torch.tensor(uses, dtype=torch.int32, device="cpu")

    def _ddp_graph_static(self) -> bool:
        """Tell whether all backwards so far have used the same parameters."""
        return self._engine is None or self._engine.is_use_constant


def trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a wrapper of this module reduces, with their names."""
    left_out = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return ((name, p) for name, p in module.named_parameters() if name not in left_out)


def name_parameters(module: nn.Module, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    """Map the places of parameters in a list to their names; the list has to be the trained ones."""
    names = {id(p): name for name, p in trained(module) if p.requires_grad}
    given = {id(p) for p in parameters}
    strange = [
        f"{tuple(p.shape)} at place {place}" for place, p in enumerate(parameters) if id(p) not in names
    ]
    if strange:
        raise ValueError(
            "Expected param to name mapping of what is trained here, but these are not: "
            f"{name_some(strange)}. {_GIVE}"
        )
    missing = [name for key, name in names.items() if key not in given]
    if missing:
        raise ValueError(
            f"Param with name {name_some(missing)}: trained here as well, but missing from the list. {_GIVE}"
        )
    return {place: names[id(p)] for place, p in enumerate(parameters)}


def mark_precision(module: nn.Module, dtype: torch.dtype | None, left_out: frozenset[str]) -> None:
    """Show both precisions of each parameter as torch does; the low one is empty, casts live in forward."""
    if dtype is None:
        return
    for name, parameter in module.named_parameters():
        if name not in left_out and parameter.is_floating_point():
            marks: Any = parameter
            marks._fp_param = parameter.data
            marks._mp_param = parameter.data.new_empty(0, dtype=dtype)
