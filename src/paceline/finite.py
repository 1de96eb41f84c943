"""The finite check: a NaN or an Inf of one rank is found before any rank steps on it.

    a bucket goes out    its sum, by one operator: finite only if all its numbers are
    closing              "all is well here", or not; on a GPU the sums are looked at only now
    closed               if not: the ranks tell each other which parameters, and all drop the step

A sum of finite numbers may be too large for its dtype, so what is suspicious is looked at number by number.
On a GPU the bucket has been reduced by then: what is not finite in it now, in a bucket that was suspicious
here, is this rank's.

Of sharded parameters each rank has a part. What is found in one part is told to the ranks with the others by
the step's verdict, see paceline.across.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from paceline.errors import NotFinite, name_ranks
from paceline.hooks import GradBucket
from paceline.riders import Rider

ROW_NUMEL = 1024

Mode = Literal["raise", "skip"]
Tell = Callable[[bytes], Sequence[bytes]]  # tells every rank, and returns what every rank told
Odd = dict[str, str]  # what a parameter's gradient holds: NaN, Inf
Gradients = Callable[[], Sequence[torch.Tensor]]

logger = logging.getLogger("paceline")


def read_mode(check_finite: Any) -> Mode | None:
    """Read the setting as users give it; None is off."""
    modes: dict[Any, Mode | None] = {False: None, None: None, True: "raise", "raise": "raise", "skip": "skip"}
    if not isinstance(check_finite, bool | str | None) or check_finite not in modes:
        raise ValueError(f'check_finite has to be True, False, "raise" or "skip", got {check_finite!r}')
    return modes[check_finite]


def refuse_beside_optimizer(mode: Mode | None) -> None:
    """Refuse what an optimizer inside backward cannot wait for."""
    if mode is not None:
        raise ValueError(
            "check_finite and an optimizer inside backward exclude each other: buckets are stepped before "
            "all ranks have said that their gradients are finite. Take check_finite=False, or step after "
            "backward()"
        )


class FiniteCheck(Rider):
    """Lets all ranks raise, or skip, the step in which one of them has a gradient that is not finite."""

    def __init__(self, mode: Mode, tell: Tell) -> None:
        self.label = f'check_finite="{mode}"'
        self._mode = mode
        self._tell = tell
        self._odd: Odd = {}
        self._sums: list[tuple[torch.Tensor, Sequence[str], Gradients]] = []  # on devices, not looked at yet
        self._suspects: list[tuple[Sequence[str], Gradients]] = []

    def goes_out(self, bucket: GradBucket) -> None:
        self._look(bucket.flat, bucket.names, bucket.gradients)

    def goes_apart(self, name: str, gradient: torch.Tensor) -> None:
        self._look(gradient.detach(), [name], lambda: [gradient])

    def _look(self, flat: torch.Tensor, names: Sequence[str], gradients: Gradients) -> None:
        if not flat.numel():
            return
        with torch.no_grad():
            total = sum_of(flat)
            if _waits(flat.device):
                self._sums.append((total, names, gradients))
            elif not _is_finite(total):
                self._odd |= find_odd(names, gradients())

    def closes(self, step: int) -> bytes:
        with torch.no_grad():
            fine = _all_finite([total for total, _, _ in self._sums])
        found = zip(self._sums, fine, strict=True)
        self._suspects = [(names, gradients) for (_, names, gradients), is_fine in found if not is_fine]
        self._sums = []
        return b"!" if self._odd or self._suspects else b""

    def closed(self, step: int, told: Sequence[bytes]) -> bool:
        if not any(told):
            return False
        with torch.no_grad():
            for names, gradients in self._suspects:
                self._odd |= find_odd(names, gradients())
        frames = self._tell(json.dumps(self._odd).encode())
        found = {rank: odd for rank, frame in enumerate(frames) if (odd := json.loads(frame))}
        self.dropped()
        if not found:
            return False  # a sum was too large, and nothing else
        if self._mode == "raise":
            raise not_finite(step, found)
        logger.warning("paceline: step %d was skipped on every rank: %s", step, words_for(found))
        return True

    def handed_out(self, step: int) -> None:
        self.dropped()

    def dropped(self) -> None:
        self._odd, self._sums, self._suspects = {}, [], []


# ---- words ----------------------------------------------------------------------------------------------


def words_for(found: Mapping[int, Odd]) -> str:
    """Say what was found: the first parameter of the first rank, and how many more there are."""
    rank, odd = min(found.items(), key=lambda item: item[0])
    name, kind = next(iter(odd.items()))
    more = []
    if len(odd) > 1:
        more.append(f"{len(odd) - 1} more parameter{'s' if len(odd) > 2 else ''} there")
    if len(found) > 1:
        more.append(f"others on {name_ranks(sorted(found)[1:])}")
    return f"the gradient of {name} holds {kind} on rank {rank}" + (
        f" (and {', '.join(more)})" if more else ""
    )


def not_finite(step: int, found: Mapping[int, Odd]) -> NotFinite:
    """Say that a step cannot be used, on every rank alike."""
    rank = min(found)
    return NotFinite(
        f"step {step}: {words_for(found)}. The gradients were dropped on every rank, and no weight has "
        "moved. Look at that rank's batch and loss (torch.autograd.set_detect_anomaly(True) names the "
        'operation), or catch this on every rank and go on; check_finite="skip" does so by itself.',
        rank,
        next(iter(found[rank])),
        step,
        {each: tuple(odd) for each, odd in sorted(found.items())},
    )


# ---- arithmetic -----------------------------------------------------------------------------------------


def sum_of(flat: torch.Tensor) -> torch.Tensor:
    """Add up a tensor, in 32 bits at least, without a copy of it. Not finite if one of its numbers is not."""
    if flat.dtype.itemsize > 2:
        return flat.sum()
    if flat.device.type != "cpu":
        return flat.sum(dtype=torch.float32)
    # Asked for another dtype, a CPU copies the tensor first. Within a row it adds up in 32 bits anyway.
    flat = flat.reshape(-1)
    whole = flat.numel() - flat.numel() % ROW_NUMEL
    rows = flat[:whole].view(-1, ROW_NUMEL).sum(1) if whole else flat[:0]
    return torch.cat([rows, flat[whole:]]).sum(dtype=torch.float32)


def find_odd(names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Odd:
    """Name the parameters whose gradient is not finite, and say what it holds."""
    return {name: kind for name, g in zip(names, gradients, strict=True) if (kind := _kind_of(g))}


def _kind_of(gradient: torch.Tensor) -> str:
    if bool(gradient.isfinite().all()):
        return ""
    return "NaN" if bool(gradient.isnan().any()) else "Inf"


def _waits(device: torch.device) -> bool:
    """Tell whether the host would have to wait for a number that was computed there."""
    return device.type != "cpu"


def _is_finite(total: torch.Tensor) -> bool:
    value = total.item()
    return math.isfinite(value.real) and math.isfinite(value.imag)


def _all_finite(totals: Sequence[torch.Tensor]) -> list[bool]:
    """Look at sums on devices; the host waits once for each device."""
    fine = [True] * len(totals)
    devices = {total.device for total in totals}
    for device in devices:
        places = [place for place, total in enumerate(totals) if total.device == device]
        seen = torch.stack([totals[place].isfinite() for place in places]).tolist()
        for place, is_fine in zip(places, seen, strict=True):
            fine[place] = is_fine
    return fine
