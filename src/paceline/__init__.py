"""Data-parallel training for PyTorch that cannot silently go wrong.

The public names are loaded when they are first used, so that ``import paceline`` and the command line cost
milliseconds and never touch CUDA.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import compile as compile
    from paceline.checking import check as check
    from paceline.ddp import DistributedDataParallel as DistributedDataParallel
    from paceline.doors import accumulate as accumulate
    from paceline.doors import audit as audit
    from paceline.doors import batch as batch
    from paceline.doors import busy as busy
    from paceline.doors import no_sync as no_sync
    from paceline.doors import replicate as replicate
    from paceline.doors import skip as skip
    from paceline.doors import weight as weight
    from paceline.errors import CommunicationFault as CommunicationFault
    from paceline.errors import InputsExhausted as InputsExhausted
    from paceline.errors import LaunchError as LaunchError
    from paceline.errors import NotFinite as NotFinite
    from paceline.errors import PacelineError as PacelineError
    from paceline.errors import PeerFailed as PeerFailed
    from paceline.errors import PeerLost as PeerLost
    from paceline.errors import PeerTimeout as PeerTimeout
    from paceline.errors import RanksDisagree as RanksDisagree
    from paceline.errors import UnsyncedGradients as UnsyncedGradients
    from paceline.errors import UnusedParameters as UnusedParameters
    from paceline.hooks import average as average
    from paceline.joining import join as join
    from paceline.launch.world import World as World
    from paceline.launch.world import world as world
    from paceline.precision import Precision as Precision
    from paceline.rehearsal import rehearse as rehearse
    from paceline.replication import Replica as Replica
    from paceline.replication import replica as replica

__version__ = "0.1.0"

_HOMES = {
    "paceline.checking": ["check"],
    "paceline.ddp": ["DistributedDataParallel"],
    "paceline.doors": ["accumulate", "audit", "batch", "busy", "no_sync", "replicate", "skip", "weight"],
    "paceline.errors": [
        "CommunicationFault",
        "InputsExhausted",
        "LaunchError",
        "NotFinite",
        "PacelineError",
        "PeerFailed",
        "PeerLost",
        "PeerTimeout",
        "RanksDisagree",
        "UnsyncedGradients",
        "UnusedParameters",
    ],
    "paceline.hooks": ["average"],
    "paceline.joining": ["join"],
    "paceline.launch.world": ["World", "world"],
    "paceline.precision": ["Precision"],
    "paceline.rehearsal": ["rehearse"],
    "paceline.replication": ["Replica", "replica"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name == "compile":
        return importlib.import_module("paceline.compile")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
