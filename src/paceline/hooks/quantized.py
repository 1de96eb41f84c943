"""Gradients as small integers: in each block of numbers, how many times the block's step each one is.

    block of 1024 numbers     ->  step = largest / 127, codes = round(number / step)
    bucket                    ->  [ steps | codes ], bytes that every rank gathers from all ranks
    result                    ->  the mean of what the ranks' bytes stand for, added up in rank order
    residual                  ->  number - code * step stays here and is added to the next gradient

What a rank receives grows with the number of ranks: at 8 ranks, 8 bits are as much as a plain all-reduce.
"""

from collections.abc import Mapping
from typing import Any

import torch

from paceline.comm import Comm, Pending
from paceline.hooks.bucket import GradBucket
from paceline.hooks.checks import check_whole
from paceline.hooks.remembering import RememberingHook, Shapes
from paceline.hooks.residuals import Residuals
from paceline.hooks.widened import widened

LEVELS = {8: 127, 4: 7}
WORD = 16  # blocks are a multiple of this, so that steps and codes of all ranks lie at whole addresses


def quantized(bits: int = 8, block: int = 1024, *, error_feedback: bool = True) -> "Quantized":
    """Send every number as ``bits`` bits (8 or 4), on a scale of its own for each ``block`` of numbers."""
    if not isinstance(bits, int) or bits not in LEVELS:
        raise ValueError(f"quantized() sends 8 or 4 bits for a number, got {bits!r}")
    check_whole("quantized", "block", block, WORD)
    if block % WORD:
        raise ValueError(f"quantized() needs block to be a multiple of {WORD}, got {block}")
    return Quantized(bits, block, error_feedback=bool(error_feedback))


class Quantized(RememberingHook):
    """See ``quantized()``."""

    is_sure = True

    def __init__(self, bits: int, block: int, *, error_feedback: bool) -> None:
        super().__init__()
        self._code = Code(bits, block)
        self._error_feedback = error_feedback
        self._residuals = Residuals()

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        numbers = _reals(bucket.flat)
        if not self._error_feedback:
            return _Mean(comm.gather(self._code.encode(numbers)[0]), self._code, bucket, comm.divisor)
        residuals = _reals(self._residuals.of(bucket))
        numbers.add_(residuals)
        encoded, missed = self._code.encode(numbers)
        residuals.copy_(missed)
        return _Mean(comm.gather(encoded), self._code, bucket, comm.divisor)

    def forget(self) -> None:
        super().forget()
        self._residuals.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "residuals": self._residuals.save()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._residuals.load(state["residuals"])

    def _shapes(self) -> Shapes:
        return self._residuals.shapes()

    def __repr__(self) -> str:
        code = f"bits={self._code.bits}, block={self._code.block}"
        return f"quantized({code}, error_feedback={self._error_feedback})"


class Code:
    """Numbers to bytes and back."""

    def __init__(self, bits: int, block: int) -> None:
        self.bits = bits
        self.block = block

    def encode(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes that stand for the numbers, and what they miss of them."""
        count = -(-numbers.numel() // self.block)
        blocks = numbers.new_zeros(count, self.block, dtype=widened(numbers.dtype))
        blocks.view(-1)[: numbers.numel()] = numbers
        steps = blocks.abs().amax(dim=1, keepdim=True).div_(LEVELS[self.bits])
        steps.clamp_min_(torch.finfo(steps.dtype).tiny)
        codes = torch.div(blocks, steps).round_()
        missed = blocks.addcmul_(codes, steps, value=-1)
        # A block with an infinity is lost as a whole; what it misses would never go away.
        missed.masked_fill_(~steps.isfinite(), 0)
        encoded = torch.cat([steps.view(torch.uint8).view(-1), self._pack(codes).view(-1)])
        return encoded, missed.view(-1)[: numbers.numel()]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return codes.to(torch.int8).view(torch.uint8)
        small = codes.add_(8).to(torch.uint8)
        return small[:, 0::2].bitwise_left_shift(4).bitwise_or_(small[:, 1::2])

    def mean(self, rows: torch.Tensor, numel: int, dtype: torch.dtype, divisor: int) -> torch.Tensor:
        """Decode every rank's bytes, and divide their sum. The order is fixed, so the bits are too."""
        exact = widened(dtype)
        count = -(-numel // self.block)
        head = count * exact.itemsize
        result = torch.zeros(count, self.block, dtype=exact, device=rows.device)
        for row in rows:
            steps = row[:head].view(exact).view(count, 1) / divisor
            result.addcmul_(self._unpack(row[head:].view(count, -1)).to(exact), steps)
        return result.view(-1)[:numel]

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        if self.bits == 8:
            return packed.view(torch.int8)
        pairs = torch.stack([packed.bitwise_right_shift(4), packed.bitwise_and(15)], dim=2)
        return pairs.view(len(packed), -1).to(torch.int8).sub_(8)


class _Mean(Pending):
    """Every rank's bytes on their way, to be decoded when they are here."""

    def __init__(self, gathered: Pending, code: Code, bucket: GradBucket, divisor: int) -> None:
        self._gathered: Pending | None = gathered
        self._code = code
        self._bucket = bucket
        self._divisor = divisor

    def linger(self) -> bool:
        return self._gathered is None or self._gathered.linger()

    def wait(self) -> torch.Tensor:
        if self._gathered is not None:
            numbers = _reals(self._bucket.flat)
            rows = self._gathered.wait()
            numbers.copy_(self._code.mean(rows, numbers.numel(), numbers.dtype, self._divisor))
            self._gathered = None
        return self._bucket.flat


def _reals(flat: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
