"""A bucket seen as matrices.

    by parameter   [ a: 64x32 | b: 64x32 | c: 128x64 | d: 64 | e: 10 ]
                    └─ one block of two ┘ └─ block ─┘ └── rest ──┘
    as one         [ the whole bucket as one square          | rest ]

A block is a view of the flat tensor: matrices of one shape side by side, for one batched product. The rest
is what is not worth compressing. A parameter's rows are its outermost dimension in memory, so that nothing
is copied where the strides are unusual.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paceline.hooks.bucket import GradBucket


@dataclass(frozen=True)
class Block:
    """Matrices of one shape, side by side in a bucket; ``keys`` names them from step to step."""

    keys: tuple[str, ...]
    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """Where the block ends in the flat tensor."""
        return self.start + len(self.keys) * self.rows * self.columns

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View the block as (matrices, rows, columns)."""
        return flat[self.start : self.end].view(len(self.keys), self.rows, self.columns)

    def can_take(self, other: "Block") -> bool:
        """Tell whether another block goes on where this one ends, with matrices of the same shape."""
        return (self.end, self.rows, self.columns) == (other.start, other.rows, other.columns)


IsWorth = Callable[[Block], bool]  # whether a matrix is to be compressed


@dataclass(frozen=True)
class Cut:
    """A bucket cut into blocks of matrices and the rest, in (start, end) spans of the flat tensor."""

    blocks: tuple[Block, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def rest_numel(self) -> int:
        """How many numbers are not in matrices."""
        return sum(end - start for start, end in self.rest)


def by_parameter(bucket: GradBucket, is_worth: IsWorth) -> Cut:
    """Take every parameter as a matrix, where that is worth it."""
    pieces = zip(bucket.names, bucket.gradients(), strict=True)
    placed = sorted(
        (_placed(name, view, bucket.flat) for name, view in pieces), key=lambda block: block.start
    )
    return _cut(placed, bucket.flat, is_worth)


def as_one(bucket: GradBucket, is_worth: IsWorth) -> Cut:
    """Take the whole bucket as one matrix that is as square as can be. The last numbers may not fit in."""
    numel = bucket.flat.numel()
    rows = max(1, math.isqrt(numel))
    key = hashlib.blake2b("\n".join(bucket.names).encode(), digest_size=16).hexdigest()
    square = Block((f"bucket {key}",), 0, rows, numel // rows)
    last = Block(("last",), square.end, 1, numel - square.end)
    return _cut([square, last], bucket.flat, is_worth)


def _placed(name: str, view: torch.Tensor, flat: torch.Tensor) -> Block:
    sizes = [(stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1]
    rows = max(sizes)[1] if sizes else 1
    start = int(view.storage_offset() - flat.storage_offset())
    return Block((name,), start, rows, view.numel() // rows)


def _cut(placed: Iterable[Block], flat: torch.Tensor, is_worth: IsWorth) -> Cut:
    """Join neighbours: equal matrices to blocks, what is not worth compressing to spans."""
    blocks: list[Block] = []
    rest: list[tuple[int, int]] = []
    for block in placed:
        if not flat.is_floating_point() or not is_worth(block):
            start = rest.pop()[0] if rest and rest[-1][1] == block.start else block.start
            rest.append((start, block.end))
        elif blocks and blocks[-1].can_take(block):
            last = blocks.pop()
            blocks.append(Block(last.keys + block.keys, last.start, last.rows, last.columns))
        else:
            blocks.append(block)
    return Cut(tuple(blocks), tuple((start, end) for start, end in rest if end > start))
