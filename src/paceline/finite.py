"""The finite check: a NaN or an Inf of one rank is found before any rank steps on it.

    a bucket goes out    its sum, by one operator: finite only if all its numbers are
    closing              "all is well here", or not; on a GPU: "not known yet"
    closed               on a GPU, when there is nothing else to do any more, the sums are looked at
                         if all is not well: the ranks tell each other which parameters, and all drop the step

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

from paceline.errors import NotFinite, name_ranks, words_of
from paceline.hooks import GradBucket
from paceline.riders import Rider
from paceline.tally import peer_failed

ROW_NUMEL = 1024

Mode = Literal["raise", "skip"]
Tell = Callable[[bytes], Sequence[bytes]]  # tells every rank, and returns what every rank told
Odd = dict[str, str]  # what a parameter's gradient holds: NaN, Inf
Gradients = Callable[[], Sequence[torch.Tensor]]
Suspect = tuple[Sequence[str], Gradients]

ODD, NOT_KNOWN, FAILED = b"!", b"?", b"#"

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
        self._sums: list[tuple[torch.Tensor, Suspect]] = []  # on devices, not looked at yet
        self._under_way: list[_Verdicts] = []  # what the devices say of them

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
                self._sums.append((total, (names, gradients)))
            elif not _is_finite(total):
                self._odd |= find_odd(names, gradients())

    def closes(self, step: int) -> bytes:
        if self._sums:
            # The device comes by while the ranks have other things to tell each other.
            self._under_way, self._sums = _ask(self._sums), []
        return ODD if self._odd else NOT_KNOWN if self._under_way else b""

    def closed(self, step: int, told: Sequence[bytes]) -> bool:
        if NOT_KNOWN in told:
            told = self._tell_late(step)
        if not any(told):
            return False
        frames = self._tell(json.dumps(self._odd).encode())
        found = {rank: odd for rank, frame in enumerate(frames) if (odd := json.loads(frame))}
        self.dropped()
        if not found:
            return False  # a sum was too large, and nothing else
        if self._mode == "raise":
            raise not_finite(step, found)
        logger.warning("paceline: step %d was skipped on every rank: %s", step, words_for(found))
        return True

    def _tell_late(self, step: int) -> Sequence[bytes]:
        """Look at what the devices have found, and tell it; who cannot look makes every rank raise."""
        failure: Exception | None = None
        try:
            with torch.no_grad():
                for names, gradients in [each for verdicts in self._under_way for each in verdicts.wait()]:
                    self._odd |= find_odd(names, gradients())
        except Exception as error:
            failure = error
        if failure is not None:
            self._tell(FAILED + words_of(failure).encode(errors="backslashreplace"))
            raise failure
        told = self._tell(ODD if self._odd else b"")
        failed = {rank: words[1:].decode() for rank, words in enumerate(told) if words.startswith(FAILED)}
        if failed:
            raise peer_failed(step, failed)
        return told

    def handed_out(self, step: int) -> None:
        self.dropped()

    def dropped(self) -> None:
        self._odd, self._sums, self._under_way = {}, [], []


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


class _Verdicts:
    """Whether sums on one device are finite, on the way to the host."""

    def __init__(self, totals: Sequence[torch.Tensor], suspects: Sequence[Suspect]) -> None:
        self._suspects = suspects
        on_gpu = totals[0].is_cuda
        with torch.no_grad():
            # Into pinned memory on a GPU, where the host does not wait before it is told to.
            self._fine = torch.stack(list(totals)).isfinite().to("cpu", non_blocking=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(totals[0].device))

    def wait(self) -> list[Suspect]:
        """Return what has to be looked at number by number."""
        if self._event is not None:
            self._event.synchronize()
        pairs = zip(self._suspects, self._fine.tolist(), strict=True)
        return [suspect for suspect, is_fine in pairs if not is_fine]


def _ask(sums: Sequence[tuple[torch.Tensor, Suspect]]) -> list[_Verdicts]:
    """Have sums on devices looked at, for each device and dtype at once."""
    kinds = dict.fromkeys((total.device, total.dtype) for total, _ in sums)
    groups = [[each for each in sums if (each[0].device, each[0].dtype) == kind] for kind in kinds]
    return [_Verdicts(*zip(*group, strict=True)) for group in groups]
