"""Fingerprints: one number for a tensor, by which ranks find out whether they hold the same bits.

    ████████ ████████ ████████ ███     words of 8 bytes are added up, wrapping, and what is left byte by byte

One flipped bit changes one word by a power of two, and so the sum. Nothing depends on where a tensor lies in
memory or on its strides; what lies there without gaps is not copied. On a GPU nothing is waited for.
"""

from collections.abc import Sequence

import torch

from paceline.torch_private import flatten

WORD_NBYTES = 8
MIXING = 0x9E3779B97F4A7C1  # odd, and without a pattern
SMALL_NBYTES = 64 * 1024  # below this, an operator for each tensor costs more than a copy


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bytes, as one number on its device."""
    words, rest = _words_of(tensor)
    total = words.sum()
    return total + rest.sum() if rest.numel() else total


def _words_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor's memory as words, and the bytes that are left."""
    raw = _bytes_of(tensor)
    whole = raw.numel() - raw.numel() % WORD_NBYTES
    words, rest = raw[:whole], raw[whole:]
    if words.data_ptr() % WORD_NBYTES or words.storage_offset() % WORD_NBYTES:
        words = words.clone()
    return words.view(torch.int64), rest


def fingerprint_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return numbers that stand for all tensors together, by few operators.

    The tensors are the same ones in the same order on every rank.
    """
    prints: list[torch.Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes < SMALL_NBYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        else:
            prints.append(fingerprint(tensor))
    return [*prints, *(fingerprint(_joined(group)) for group in small.values())]


@torch.no_grad()
def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return flatten([_plain(tensor) for tensor in tensors])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = _plain(tensor).contiguous().view(-1)
    if plain.is_complex():
        plain = torch.view_as_real(plain).view(-1)
    return plain.view(torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers themselves, where a tensor only says that they are to be conjugated or negated."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


class Prints:
    """The fingerprints of some tensors, on their way to the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parts: list[torch.Tensor] = []  # on the host, or going to be
        self._events: list[torch.cuda.Event] = []
        found: dict[torch.device, list[torch.Tensor]] = {}
        for each in fingerprint_all(tensors):
            found.setdefault(each.device, []).append(each)
        for device, prints in found.items():
            self._fetch(device, torch.stack(prints))

    def _fetch(self, device: torch.device, prints: torch.Tensor) -> None:
        if device.type != "cuda":
            self._parts.append(prints.cpu())
            return
        host = torch.empty(prints.shape, dtype=prints.dtype, pin_memory=True, device="cpu")
        host.copy_(prints, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._parts.append(host)
        self._events.append(event)

    @property
    def is_here(self) -> bool:
        """Whether they can be read without waiting."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def read(self) -> list[int]:
        """Return them. Waits for the device, if ``is_here`` has not said that they are here."""
        for event in self._events:
            event.synchronize()
        return [number for part in self._parts for number in part.tolist()]


@torch.no_grad()
def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number in which it counts where each word is: every place has an odd factor of its own."""
    words, rest = _words_of(tensor)
    words = torch.cat([words, rest.to(torch.int64)])
    factors = (2 * torch.arange(len(words), device=words.device) + 1) * MIXING
    return words.mul_(factors).sum()


def read_in_order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor in which the order of its elements counts, too. Waits for the device.

    The sum does for bits that flip, but not for gradients: two ranks may have the same rows in other places.
    """
    return _read([_ordered(tensor) for tensor in tensors])


def read_each(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the fingerprint of each tensor. Waits for the device."""
    return _read([fingerprint(tensor) for tensor in tensors])


def _read(prints: Sequence[torch.Tensor]) -> list[int]:
    numbers = [0] * len(prints)
    for device in {each.device for each in prints}:
        places = [place for place, each in enumerate(prints) if each.device == device]
        for place, number in zip(places, torch.stack([prints[p] for p in places]).tolist(), strict=True):
            numbers[place] = number
    return numbers
