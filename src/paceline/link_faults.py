"""What ranks saw of a link that does not return what was sent, and the words for it; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import CommunicationFault, name_ranks, name_some

How = Literal["wrong", "raised", "hung", "left"]  # left: given up because another rank had reported

# The first ones say most about the cause.
VERBS: dict[How, str] = {
    "wrong": "returned wrong data",
    "raised": "broke off",
    "hung": "did not end",
    "left": "did not end",
}
PLACES_SHOWN = 8


@dataclass(frozen=True)
class Fault:
    """What one rank saw of one collective."""

    collective: str
    device: str
    backend: str
    how: How
    words: str

    @property
    def where(self) -> str:
        """The collective, and the device that its tensors were on."""
        return f"{self.collective} on {self.device}"


def communication_fault(
    faults: Mapping[int, Sequence[Fault]], silent: Sequence[int], places: Mapping[int, str]
) -> CommunicationFault:
    """Make the exception that every rank raises, from what each of them saw.

    ``silent`` are ranks that have not reported, ``places`` says where each rank runs.
    """
    everything = [(rank, fault) for rank, own in sorted(faults.items()) for fault in own]
    witness, first = min(everything, key=lambda pair: list(VERBS).index(pair[1].how))
    certain = [(rank, fault) for rank, fault in everything if fault.how != "left" or fault is first]
    ranks = list(dict.fromkeys(rank for rank, fault in certain if fault.where == first.where))
    others = list(dict.fromkeys(fault.where for _, fault in certain if fault.where != first.where))
    what = (
        f"{first.collective} by {first.backend} on {first.device} {VERBS[first.how]} on {name_ranks(ranks)}"
    )
    words = first.words if len(ranks) == 1 else f"{first.words} (on rank {witness})"
    more = f" {name_some(others)} did not come through either." if others else ""
    quiet = f" {name_ranks(silent).capitalize()} did not report." if silent else ""
    return CommunicationFault(
        f"the link between the ranks is at fault, not the model: {what}: {words}.{more}{quiet} Known values "
        f"are sent before models are compared. The ranks are {_list_places(ranks, places)}. Look at the "
        "interface, the cables and the driver between them, and at the version of "
        f"{first.backend}'s library on each; try another interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) "
        "or another backend.",
        collective=first.collective,
        backend=first.backend,
        ranks=ranks,
        places=places,
    )


def _list_places(first: Sequence[int], places: Mapping[int, str]) -> str:
    """Say where the ranks run: first those that saw it, as the list may be cut."""
    order = dict.fromkeys((*first, *sorted(places)))
    listed = [f"rank {rank} on {places.get(rank, 'a machine that did not answer')}" for rank in order]
    return name_some(listed, limit=PLACES_SHOWN)
