"""The ranks that hold the other parts of a sharded model: a step counts on all of them, or on none.

    same parts     0 ─ 2   1 ─ 3    data-parallel ranks, each pair with closing frames of its own
    other parts    0 ─ 1   2 ─ 3    one verdict of each: did the step succeed among those with its parts?

Frames of their own, never the model's collectives: a rank that has failed says so and waits for nobody, so
that it is heard wherever the others are.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paceline.comm import GroupComm
from paceline.control import Control, control_over
from paceline.errors import NotFinite, PeerFailed, RanksDisagree, words_of
from paceline.sharded import mesh_of
from paceline.waiting import Waiter

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class Verdict:
    """What has become of a step among the ranks with the same parts."""

    failure: str = ""  # what an exception said, with its type
    message: str = ""  # all of it, if others are to say the same
    is_dropped: bool = False
    weights: Sequence[float | None] = ()  # that all of them have given


@dataclass(frozen=True)
class Link:
    """The ranks along one dimension of a mesh, and what this replica is called among them."""

    control: Control
    name: bytes
    ranks: Sequence[int]  # as all processes of the job know them

    def topic(self, step: int) -> bytes:
        """Name the verdicts of one step."""
        return b"%b.verdicts on step %d of ranks with other parts" % (self.name, step)


class Across:
    """The ranks with other parts, along every dimension that a model is sharded over."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links

    def for_copy(self, name: bytes) -> "Across":
        """Link the same ranks for a copy of the replica, by a name that they all give it."""
        return Across([replace(link, name=link.name + b"/" + name) for link in self._links])

    def tell(self, step: int, error: BaseException) -> None:
        """Say that the step has failed here. Waits for nobody."""
        cause = error.text if isinstance(error, PeerFailed) else words_of(error)
        verdict = Verdict(cause, str(error) if isinstance(error, NotFinite) else "")
        self._post(self._links, step, verdict)

    def agree(self, step: int, mine: Verdict, seconds: float, waiter: Waiter) -> bool:
        """Wait for the verdicts of the others; tell whether the step is dropped. Raises if it has failed."""
        is_dropped = mine.is_dropped
        for place, link in enumerate(self._links):
            self._post([link], step, Verdict(is_dropped=is_dropped, weights=mine.weights))
            frames = link.control.collect(link.topic(step), seconds, waiter)
            verdicts = [Verdict(**json.loads(frame)) for frame in frames]
            try:
                _refuse(step, link, verdicts)
            except Exception as error:
                failed = next((v for v in verdicts if v.failure), Verdict(words_of(error)))
                self._post(self._links[place + 1 :], step, failed)
                raise
            is_dropped |= any(verdict.is_dropped for verdict in verdicts)
        if is_dropped and not mine.is_dropped:
            logger.warning("paceline: step %d was skipped, as by ranks that hold other parts", step)
        return is_dropped

    @staticmethod
    def _post(links: Sequence[Link], step: int, verdict: Verdict) -> None:
        for link in links:
            link.control.post(link.topic(step), json.dumps(asdict(verdict)).encode())


def _refuse(step: int, link: Link, verdicts: Sequence[Verdict]) -> None:
    """Raise what others have raised, or because they weigh the step otherwise."""
    for rank, verdict in zip(link.ranks, verdicts, strict=True):
        if verdict.message:
            raise NotFinite(verdict.message, step=step)
        if verdict.failure:
            raise PeerFailed(
                f"step {step}: rank {rank} of the job, which holds other parts of the parameters, has lost "
                f"this step: {verdict.failure}\nThe gradients were dropped on every rank. Mend the cause "
                "there, or catch this on every rank and go on with the next step.",
                rank,
                verdict.failure,
            )
    if len({tuple(verdict.weights) for verdict in verdicts}) > 1:
        told = zip(link.ranks, (verdict.weights for verdict in verdicts), strict=True)
        where = ", ".join(f"{_words(weights)} among those with the parts of rank {r}" for r, weights in told)
        raise RanksDisagree(
            f"step {step}: ranks that hold parts of one model have given different weights: {where}. They "
            "compute with the same batch: give each of them the same weight. The gradients were dropped on "
            "every rank."
        )


def _words(weights: Sequence[float | None]) -> str:
    return " and ".join("none" if weight is None else f"{weight:g}" for weight in weights)


def across_for(parameters: Iterable[torch.Tensor]) -> Across | None:
    """Link the ranks with other parts of some parameters, if there are any. All of them call this."""
    meshes: dict[str, Any] = {}
    for parameter in parameters:
        if (mesh := mesh_of(parameter)) is not None:
            meshes.setdefault(str((mesh.mesh_dim_names, mesh.mesh.tolist())), mesh)
    groups = {
        tuple(comm.ranks): comm
        for _, mesh in sorted(meshes.items())
        for dimension in range(mesh.ndim)
        if (comm := GroupComm(mesh.get_group(dimension))).size > 1
    }
    links = []
    for ranks, comm in groups.items():
        control = control_over(comm)
        links.append(Link(control, control.new_name(), ranks))
    return Across(links) if links else None
