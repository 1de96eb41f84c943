"""What the ranks' closing frames say together. Pure: the same frames give the same answers on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.errors import (
    InputsExhausted,
    PeerFailed,
    RanksDisagree,
    UnusedParameters,
    name_ranks,
    name_some,
)
from paceline.frames import Closing
from paceline.plan import Plan


@dataclass(frozen=True)
class Outcome:
    """What the ranks told each other in a backward that succeeded."""

    missing: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by parameter, who did not use it
    missing_everywhere: frozenset[int] = frozenset()
    arrival: Sequence[int] = ()  # in which order gradients came on one rank, where that was asked for
    sparse: frozenset[int] = frozenset()  # whose gradient came without its zeros
    is_crossed: bool = False  # some script has started collectives of its own meanwhile


@dataclass(frozen=True)
class Rows:
    """What one rank has of a sparse gradient."""

    count: int = 0
    came_dense: bool = False


NOTHING_NEW = Outcome()


class Tally:
    """The closing frames of one backward, by rank. ``is_plain``: none has anything to tell."""

    def __init__(
        self,
        closings: Sequence[Closing],
        plan: Plan,
        step: int,
        active: Sequence[int],
        *,
        is_plain: bool = False,
    ) -> None:
        self.closings = closings
        self.plan = plan
        self.step = step
        self.active = active  # the ranks that had a batch
        self.is_plain = is_plain

    @cached_property
    def failed(self) -> dict[int, str]:
        """What went wrong, by rank."""
        return {rank: closing.failure for rank, closing in enumerate(self.closings) if closing.failure}

    @property
    def is_stuck(self) -> bool:
        """Whether a rank has not sent everything."""
        return not self.is_plain and any(closing.stuck for closing in self.closings)

    @property
    def is_mixed_up(self) -> bool:
        """Whether the ranks have sent buckets in different orders, or between different collectives."""
        orders = {(closing.others, closing.order) for closing in self.closings}
        # Ranks that have started different numbers are no proof: messages from rank to rank count, too.
        counts = {others for others, _ in orders}
        return len({closing.trace for closing in self.closings}) > 1 or len(orders) > len(counts)

    @property
    def late(self) -> list[int]:
        """The parameters that got one more gradient, on some rank, after their bucket was out."""
        return sorted({index for closing in self.closings for index in closing.late})

    @cached_property
    def missing(self) -> dict[int, tuple[int, ...]]:
        """For each parameter that some rank has not used, these ranks."""
        holes = [(rank, closing.used) for rank, closing in enumerate(self.closings) if closing.used]
        if not holes:
            return {}
        missing = {i: tuple(rank for rank, used in holes if not used[i]) for i in self.plan.members}
        return {index: ranks for index, ranks in missing.items() if ranks}

    @property
    def outcome(self) -> Outcome:
        """What there is to learn for the next backwards."""
        return NOTHING_NEW if self.is_plain else self._outcome

    @cached_property
    def _outcome(self) -> Outcome:
        everywhere = (index for index, ranks in self.missing.items() if len(ranks) == len(self.closings))
        sparse = frozenset(index for told in self.rows for index in told)
        return Outcome(
            self.missing,
            frozenset(everywhere),
            sparse=sparse.intersection(self.plan.order),
            is_crossed=any(closing.crossed for closing in self.closings),
        )

    @property
    def guide(self) -> int | None:
        """The rank whose order of arrival is taken, if one is asked for and there is one."""
        if self.is_plain or self.failed or self.outcome.sparse:  # what was found to be sparse comes first
            return None
        return next((rank for rank, closing in enumerate(self.closings) if closing.arrived), None)

    @cached_property
    def rows(self) -> list[dict[int, Rows]]:
        """For each rank, what it has of the gradients that came without their zeros."""
        return [_rows(closing.sparse) for closing in self.closings]

    def is_used(self, index: int, rank: int) -> bool:
        """Tell whether a rank has something to add to a parameter's gradient."""
        used = self.closings[rank].used
        return not used or bool(used[index])

    def unused(self) -> UnusedParameters | None:
        """Name the parameters that a rank with a batch has not used, if there are any."""
        found = {index: [r for r in ranks if r in self.active] for index, ranks in self.missing.items()}
        named = {self.plan.specs[i].name: tuple(ranks) for i, ranks in sorted(found.items()) if ranks}
        if not named:
            return None
        shown = [f"{name} ({name_ranks(ranks)})" for name, ranks in named.items()]
        return UnusedParameters(
            f"step {self.step}: unused='error', and these parameters got no gradient in this backward: "
            f"{name_some(shown)}. Use them in the loss, freeze them, or replicate with unused='allow'. The "
            "gradients were dropped on every rank.",
            named,
        )


def _rows(numbers: Sequence[int]) -> dict[int, Rows]:
    threes = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return {index: Rows(count, bool(dense)) for index, count, dense in threes}


def mixed_up(step: int) -> RanksDisagree:
    """Say that sums cannot be trusted."""
    return RanksDisagree(
        f"step {step}: the ranks have started the buckets of several models, or a bucket and a collective of "
        "the script's own, in different orders, so that sums were mixed up. One backward reaches these "
        "models, or holds that collective, in different orders on different ranks. Run one backward for each "
        "model, and give collectives inside backward a process group of their own. The gradients were "
        "dropped on every rank."
    )


def ended(step: int, left: Mapping[int, int]) -> RanksDisagree:
    """Say that there is nobody to go on with. ``left``: after how many reduced backwards ranks have ended."""
    where = ", ".join(f"rank {rank} ended after {count}" for rank, count in left.items())
    return RanksDisagree(
        f"step {step}: the ranks run different numbers of reduced backwards: {where}. Give every rank the "
        "same number of batches, or train inside join(). The gradients were dropped on every rank."
    )


BACKWARD = "during its backward"


def peer_failed(
    step: int, failed: dict[int, str], where: str = BACKWARD, *, is_stepped: bool = False
) -> PeerFailed:
    """Say on the other ranks that one raised."""
    rank, text = min(failed.items())
    others = f" ({name_ranks(sorted(failed)[1:])} failed too)" if len(failed) > 1 else ""
    end = (
        "The optimizer runs inside backward and had begun this step, so the weights are those of a step that "
        f"lacks gradients. Mend the cause on rank {rank}, and load the last checkpoint."
        if is_stepped
        else f"The gradients of this step were dropped on every rank. Mend the cause on rank {rank}, or "
        "catch this on every rank and go on with the next step."
    )
    return PeerFailed(f"step {step}: rank {rank} raised {where}{others}: {text}\n{end}", rank, text)


def exhausted(ranks: Sequence[int]) -> InputsExhausted:
    """Say that join(early="stop") has ended the loop."""
    return InputsExhausted(
        f'{name_ranks(ranks)} ran out of batches, and join(early="stop") ends the loop on every rank then. '
        "The gradients of this step were dropped on every rank.",
        ranks,
    )
