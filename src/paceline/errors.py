"""Everything paceline raises at run time.

    PacelineError
    ├── RanksDisagree       the ranks hold different models, plans or steps
    ├── UnsyncedGradients   optimizer.step() would use gradients that only this rank has
    ├── UnusedParameters    unused="error", and a rank did not use a parameter
    ├── NotFinite           check_finite=True, and a rank's gradient holds NaN or Inf
    ├── PeerFailed          another rank raised; its words are in the message
    ├── PeerLost            another rank is gone, or does not answer any more
    │   └── PeerTimeout     the time that ranks may keep each other waiting is over
    ├── CommunicationFault  the link between the ranks returns wrong data, or none
    ├── InputsExhausted     join(early="stop"), and a rank has run out of batches
    └── LaunchError         world() or `paceline run` could not start

A bad argument is a plain ``ValueError`` or ``TypeError`` at the call. Messages say what happened,
what disagrees by name, and what to do next, and they are the same on every rank that raises.
"""

from collections.abc import Mapping, Sequence

WORDS_LIMIT = 2000  # characters of an exception's text that travel to the other ranks


class PacelineError(RuntimeError):
    """The root of paceline's exceptions."""


class RanksDisagree(PacelineError):
    """Ranks that have to be alike are not: different models, plans, steps or weights.

    After an audit, ``tensors`` names what differs, and ``ranks`` are those that are not of the majority.
    """

    is_known = False  # every rank has raised this by itself, so nobody has to be told
    is_about_steps = False  # the ranks have made different numbers of optimizer steps

    def __init__(self, message: str, tensors: Sequence[str] = (), ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)
        self.ranks = tuple(ranks)


class UnsyncedGradients(PacelineError):
    """An optimizer was about to step on gradients that only this rank has.

    ``parameters`` holds every name; the message shows the first few.
    """

    def __init__(self, message: str, parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.parameters = tuple(parameters)


class UnusedParameters(PacelineError):
    """A backward left parameters without a gradient on some ranks, and ``unused="error"`` was asked for.

    ``missing`` maps each parameter's name to the ranks that did not use it.
    """

    def __init__(self, message: str, missing: dict[str, tuple[int, ...]] | None = None) -> None:
        super().__init__(message)
        self.missing = dict(missing or {})


class NotFinite(PacelineError):
    """A rank's gradient holds NaN or Inf, and ``check_finite`` was asked for.

    ``rank`` and ``parameter`` are the first; ``found`` maps each rank to the names of all its parameters.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        parameter: str = "",
        step: int = -1,
        found: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.step = step
        self.found = dict(found or {})


class PeerFailed(PacelineError):
    """Another rank raised in this step. ``rank``, ``type`` (a name) and ``text`` say who and what."""

    def __init__(self, message: str, rank: int = -1, text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.text = text
        self.type = text.partition(":")[0]


class PeerLost(PacelineError):
    """Another rank closed its connection or stayed silent past the time limit. ``rank`` is -1 if unknown."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CommunicationFault(PacelineError):
    """A collective did not return what it has to: the link or its library is at fault, not the model.

    ``ranks`` are those that saw it, ``places`` says where each rank runs.
    """

    def __init__(
        self,
        message: str,
        collective: str = "",
        backend: str = "",
        ranks: Sequence[int] = (),
        places: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.collective = collective
        self.backend = backend
        self.ranks = tuple(ranks)
        self.places = dict(places or {})


class PeerTimeout(PeerLost):
    """Others were waited for until the time budget was over. ``rank`` is the first one that is missing."""


class InputsExhausted(PacelineError):
    """Ranks ran out of batches inside ``join(early="stop")``. ``ranks`` says which."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LaunchError(PacelineError):
    """A world could not be started: a half-set environment, or a rendezvous that nobody answers."""


def name_some(names: Sequence[str], limit: int = 5) -> str:
    """Join the first names, and count the rest."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def name_ranks(ranks: Sequence[int]) -> str:
    """Say ``rank 1`` or ``ranks 0, 1 and 3 more``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + name_some([str(rank) for rank in ranks], limit=8)


def words_of(error: BaseException) -> str:
    """Say what an exception says, with its type, for the other ranks."""
    return f"{type(error).__name__}: {error}"[:WORDS_LIMIT]


def first_line(error: BaseException) -> str:
    """Return what an exception says, less what a library adds below."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]
