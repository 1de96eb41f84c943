"""What the hooks with a memory share: one model each, a count of steps, and a state that knows its rank."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from paceline.comm import Comm
from paceline.errors import name_some
from paceline.hooks.bucket import Named, StatefulHook
from paceline.sharded import owner_of

Shapes = Mapping[str, torch.Size]


class RememberingHook(StatefulHook):
    """A hook that counts steps, and keeps tensors by the names of the parameters.

    Buckets change when the plan is made anew, names do not. A copy or a pickle of the hook has its memory,
    but belongs to no model yet.
    """

    def __init__(self) -> None:
        self.step = 0  # how many backwards have begun
        self._place = (0, 1)  # the rank and the size that the memory is of
        self._is_loaded = False  # from a saved state, and not seen to fit a model yet
        self._comm: Comm | None = None
        self._named: Named = ()

    def bind(self, named: Named, comm: Comm) -> None:
        if self._comm is not None and not _same(named, self._named):
            raise ValueError(
                f"{self!r} serves another model already, and its memory is of that one; make a hook for each"
            )
        if self._is_loaded:
            self._check_place(self._place, comm)
        self._check_shapes(self._shapes(), named)
        self._check_order(self.plan_to_take, named)
        if self._comm is None:
            self.planned = self.plan_to_take or ()  # what was learned of another replica holds no more
        self._comm, self._named = comm, named
        self._place, self._is_loaded = (comm.rank, comm.size), False

    def unbind(self) -> None:
        self._comm, self._named = None, ()

    def begin(self) -> None:
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        rank, size = self._place
        mine = {"rank": rank, "size": size, "step": self.step, "planned": list(self.planned)}
        return {"hook": type(self).__name__, **mine}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("hook") != type(self).__name__:
            raise ValueError(f"this is no state of {self!r}: it says hook={state.get('hook')!r}")
        place, step = (state["rank"], state["size"]), state["step"]
        planned = tuple(state.get("planned", ()))
        if self._comm is not None:
            self._check_place(place, self._comm)
            tensors = {**state.get("residuals", {}), **state.get("anchors", {})}
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self._check_shapes(shapes, self._named)
            self._check_order(planned, self._named)
        self._load(state)
        self.step, self.planned, self.plan_to_take = step, planned, planned or None
        self._place, self._is_loaded = place, self._comm is None

    def _load(self, state: Mapping[str, Any]) -> None:
        """Take up what a subclass has saved."""

    def _shapes(self) -> Shapes:
        """Return the shapes of the parameters that something is remembered of."""
        return {}

    def _check_place(self, place: tuple[int, int], comm: Comm) -> None:
        if place != (comm.rank, comm.size):
            raise ValueError(
                f"the state of {self!r} was saved by rank {place[0]} of {place[1]}, and this is rank "
                f"{comm.rank} of {comm.size}. Every rank saves and loads a state of its own; with another "
                "number of ranks start with a new hook"
            )

    def _check_shapes(self, remembered: Shapes, named: Named) -> None:
        shapes = {name: parameter.shape for name, parameter in named}
        odd = [name for name, shape in remembered.items() if shapes.get(name) != shape]
        self._refuse_strangers(odd)

    def _check_order(self, order: Sequence[str] | None, named: Named) -> None:
        names = {name for name, _ in named}
        self._refuse_strangers([name for name in order or () if name not in names])

    def _refuse_strangers(self, odd: Sequence[str]) -> None:
        if odd:
            raise ValueError(
                f"what {self!r} remembers is of other parameters than this model's: {name_some(odd)}. Load "
                "the state that was saved with this model, or take a new hook"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_comm": None, "_named": ()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin


def _same(named: Named, others: Named) -> bool:
    return [id(owner_of(p)) for _, p in named] == [id(owner_of(p)) for _, p in others]
