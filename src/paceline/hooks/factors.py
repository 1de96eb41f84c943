"""What PowerSGD multiplies with: last step's Q for each matrix.

They are kept lying down, as (matrices, rank, length): products of long rows are several times faster on a CPU
than those of two or four long columns.
"""

import hashlib
from collections.abc import Mapping

import torch

from paceline.hooks.matrices import Block
from paceline.hooks.widened import widened


class Factors:
    """Last step's Q for each matrix, in rows of length 1; random ones, alike on all ranks, at first."""

    def __init__(self, rank: int, seed: int, *, is_warm: bool) -> None:
        self._rank = rank
        self._seed = seed
        self._is_warm = is_warm
        self._by_key: dict[str, torch.Tensor] = {}
        self._blocks: dict[Block, torch.Tensor] = {}
        self._spare: dict[Block, torch.Tensor] = {}  # takes the place of rows that came to nothing

    def of(self, block: Block, like: torch.Tensor, step: int) -> torch.Tensor:
        """Return (matrices, rank, columns) to multiply a block with."""
        if not self._is_warm:
            return self._random(block, like, step)
        factors = self._blocks.get(block)
        if factors is None or factors.dtype is not like.dtype or factors.device != like.device:
            factors = self._lay_out(block, like)
        return factors

    def _lay_out(self, block: Block, like: torch.Tensor) -> torch.Tensor:
        moved = set(block.keys)
        self._blocks = {other: q for other, q in self._blocks.items() if moved.isdisjoint(other.keys)}
        self._spare = {other: q for other, q in self._spare.items() if other in self._blocks}
        self._spare[block] = self._random(block, like)
        factors = self._blocks[block] = self._spare[block].clone()
        for key, factor in zip(block.keys, factors.unbind(), strict=True):
            old = self._by_key.get(key)
            if old is not None and old.shape == factor.shape:
                factor.copy_(old)
            self._by_key[key] = factor
        return factors

    def _random(self, block: Block, like: torch.Tensor, step: int = 0) -> torch.Tensor:
        drawn = [_draw(f"{self._seed} {step} {key}", self._rank, block.columns) for key in block.keys]
        rows = torch.stack(drawn)
        rows /= torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        return rows.to(like)

    def keep(self, block: Block, factors: torch.Tensor) -> torch.Tensor:
        """Keep the new Q for the next step, and tell for each matrix whether it is all numbers.

        Only directions count, so rows get length 1: in 16 bits their squares would vanish.
        """
        lengths: torch.Tensor = torch.linalg.vector_norm(
            factors, dim=2, keepdim=True, dtype=widened(factors.dtype)
        )
        is_finite = lengths.isfinite()
        if self._is_warm:
            units = (factors / lengths).to(factors.dtype)
            torch.where(is_finite & (lengths > 0), units, self._spare[block], out=self._blocks[block])
        return is_finite.all(dim=1, keepdim=True)

    def clear(self) -> None:
        """Start anew from random ones."""
        self._by_key, self._blocks, self._spare = {}, {}, {}

    def save(self) -> dict[str, torch.Tensor]:
        """Copy everything, by matrix."""
        return {key: factor.clone() for key, factor in self._by_key.items()}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take up what ``save()`` returned."""
        odd = {factor.shape[0] for factor in saved.values()} - {self._rank}
        if odd:
            raise ValueError(
                f"the saved factors of powersgd() are of rank {odd.pop()}, this hook's of rank {self._rank}"
            )
        self.clear()
        self._by_key = dict(saved)


def _draw(seed: str, rows: int, columns: int) -> torch.Tensor:
    """Draw normal numbers that depend on the seed only: neither on the device nor on other draws."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number), device="cpu")
