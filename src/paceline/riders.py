"""What travels with every reduced backward beside the gradients: checks and counts that ranks compare.

    any time   enters(), begins()      a backward starts; it is one of these parameters, reduced or not
    opening    opens() -> bytes        every rank's bytes -> opened()
    a bucket   goes_out()              goes_apart(): a gradient that is in no bucket
    closing    closes() -> bytes       every rank's bytes -> closed()
    the end    handed_out()            gradients are there; collectives may be run

A rider sees the same calls with the same bytes on every rank, so what it raises is raised everywhere.
"""

from collections.abc import Mapping, Sequence

import torch

from paceline.hooks import GradBucket


class Rider:
    """Something that every backward takes along. Override what is needed."""

    label = ""  # with its settings; the ranks compare it
    is_for_join = True  # it makes sense among ranks that run out of batches, too

    def enters(self) -> None:
        """Hear that a backward starts, of these parameters or of others. Called on its own thread."""

    def begins(self) -> None:
        """Hear that it is one of these parameters, reduced or not."""

    def opens(self, step: int) -> bytes:
        """Say something to every rank before the first bucket goes out."""
        return b""

    def opened(self, step: int, told: Sequence[bytes], present: Sequence[int]) -> None:
        """Hear what every rank said; ``present`` are those that run a backward. Raise to drop the step."""

    def goes_out(self, bucket: GradBucket) -> None:
        """Look at this rank's gradients before they are reduced. Called by autograd's thread."""

    def goes_apart(self, name: str, gradient: torch.Tensor) -> None:
        """Look at a gradient of this rank that is in no bucket: a sparse one's rows, or a late one."""

    def closes(self, step: int) -> bytes:
        """Say something to every rank after the last bucket."""
        return b""

    def closed(self, step: int, told: Sequence[bytes]) -> bool:
        """Hear what every rank said. Raise to drop the step, or return True to drop it in silence."""
        return False

    def handed_out(self, step: int) -> None:
        """Do what needs the ranks together. Called after a step that has not failed, dropped or not."""

    def dropped(self) -> None:
        """Forget what was noted in a step that did not succeed."""


Places = Sequence[tuple[int, Rider]]  # riders with their places in what every rank tells

_CALLS = [name for name, member in vars(Rider).items() if callable(member)]


def by_call(riders: Sequence[Rider]) -> Mapping[str, Places]:
    """Sort riders by the calls that they do something in: every backward makes all of these calls."""
    return {
        call: [(i, r) for i, r in enumerate(riders) if getattr(type(r), call) is not getattr(Rider, call)]
        for call in _CALLS
    }
