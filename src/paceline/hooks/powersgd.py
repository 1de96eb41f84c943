"""PowerSGD: a matrix M of gradients travels as two thin factors, and what they miss is added next time.

                        M ≈ P Qᵀ          M: rows x columns, P: rows x rank, Q: columns x rank

    first collective    the mean of M Q, with last step's Q (warm start), and what is not compressed
                        P: an orthonormal basis of it, the same on every rank
    second collective   the mean of Mᵀ P, which is the new Q
    residual            M - P (Mᵀ P)ᵀ, with this rank's own M: it stays here and is added to the next M

P Qᵀ is linear in M, so the mean of the ranks' residuals is what the result lacks of the mean, no more and no
less. After Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", 2019.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from paceline.comm import Comm, Pending
from paceline.errors import name_some
from paceline.hooks.average import average
from paceline.hooks.bucket import GradBucket, Hook, Named, Way, may_join, name_of, way_of
from paceline.hooks.checks import check_number, check_stateless, check_whole, read_patterns
from paceline.hooks.factors import Factors
from paceline.hooks.matrices import Block, Cut, as_one, by_parameter
from paceline.hooks.orthonormal import orthonormal
from paceline.hooks.remembering import RememberingHook, Shapes
from paceline.hooks.residuals import Residuals
from paceline.hooks.staged import Staged, Stages

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


def powersgd(
    rank: int = 2,
    start_step: int = 10,
    *,
    warm_start: bool = True,
    error_feedback: bool = True,
    min_compression: float = 2.0,
    uncompressed: Collection[str] = (),
    batched: bool = False,
    seed: int = 0,
    inner: Hook = average,
) -> "PowerSGD":
    """Send each matrix of gradients as factors of ``rank`` columns, after ``start_step`` plain steps.

    Parameters with one dimension, those that would not shrink ``min_compression`` times, and those whose
    names match a pattern in ``uncompressed``, travel as they are. ``batched`` takes each bucket as one square
    matrix: fewer operators, a coarser picture. ``inner`` takes the means: of whole buckets in the plain
    steps, of factors afterwards.
    """
    check_whole("powersgd", "rank", rank, 1)
    check_whole("powersgd", "start_step", start_step, 0)
    check_whole("powersgd", "seed", seed, 0)
    check_number("powersgd", "min_compression", min_compression, 1.0)
    check_stateless("powersgd", inner)
    patterns = read_patterns("powersgd", "uncompressed", uncompressed)
    if batched and patterns:
        raise ValueError(
            "powersgd() takes batched=True or uncompressed, not both: a bucket that is one matrix has no "
            "parameters in it"
        )
    return PowerSGD(
        rank=rank,
        start_step=start_step,
        warm_start=bool(warm_start),
        error_feedback=bool(error_feedback),
        min_compression=float(min_compression),
        uncompressed=patterns,
        batched=bool(batched),
        seed=seed,
        inner=inner,
    )


class PowerSGD(RememberingHook):
    """See ``powersgd()``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings = settings
        self._rank: int = settings["rank"]
        self._inner: Hook = settings["inner"]
        self._residuals = Residuals()
        self._factors = Factors(self._rank, settings["seed"], is_warm=settings["warm_start"])
        self._cuts: dict[tuple[str, ...], Cut] = {}

    @property
    def way(self) -> Way:
        """As the hook inside, which takes the means."""
        return way_of(self._inner)

    @property
    def may_join(self) -> bool:
        """As the hook inside."""
        return may_join(self._inner)

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        if self.step <= self._settings["start_step"]:
            return self._inner(bucket, comm)
        cut = self._cut(bucket)
        if cut.blocks:
            return Staged(self._stages(bucket, comm, cut))
        self._residuals.pay_out(bucket)
        return self._inner(bucket, comm)

    def _stages(self, bucket: GradBucket, comm: Comm, cut: Cut) -> Stages:
        residuals = self._residuals.of(bucket) if self._settings["error_feedback"] else None
        matrices = Compression(bucket.flat, cut, self._rank, residuals)
        old = [self._factors.of(block, bucket.flat, self.step) for block in cut.blocks]
        sent = yield self._send(bucket, comm, matrices.times(old))
        second = matrices.onto_basis_of(sent)
        own = second.clone()  # the collective works in place
        pending = self._send(bucket, comm, second)
        matrices.leave_residuals(own)  # while the factors travel
        matrices.restore((yield pending), self._factors)
        return bucket.flat

    def _send(self, bucket: GradBucket, comm: Comm, sent: torch.Tensor) -> Pending:
        names = [f"factors of bucket {bucket.index}"]
        carrier = replace(bucket, flat=sent, parameters=[sent], names=names, split=lambda flat: [flat])
        return self._inner(carrier, comm)

    def _cut(self, bucket: GradBucket) -> Cut:
        names = tuple(bucket.names)
        cut = self._cuts.get(names)
        if cut is None:
            moved = set(names)
            self._cuts = {other: cut for other, cut in self._cuts.items() if moved.isdisjoint(other)}
            take = as_one if self._settings["batched"] else by_parameter
            cut = self._cuts[names] = take(bucket, self._is_worth)
        return cut

    def _is_worth(self, block: Block) -> bool:
        factors = (block.rows + block.columns) * self._rank
        is_smaller = block.rows * block.columns > factors * self._settings["min_compression"]
        return is_smaller and not any(self._is_chosen(key) for key in block.keys)

    def _is_chosen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._settings["uncompressed"])

    def bind(self, named: Named, comm: Comm) -> None:
        for pattern in self._settings["uncompressed"]:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise ValueError(
                    f"powersgd(uncompressed=...) names {pattern!r}, which no parameter here matches. "
                    f"Its parameters are {name_some([name for name, _ in named])}"
                )
        super().bind(named, comm)

    def unbind(self) -> None:
        super().unbind()
        self._cuts = {}  # another model may have other shapes under the same names

    def forget(self) -> None:
        super().forget()
        self._residuals.clear()
        self._factors.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "residuals": self._residuals.save(), "factors": self._factors.save()}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._factors.load(state["factors"])
        self._residuals.load(state["residuals"])

    def _shapes(self) -> Shapes:
        return self._residuals.shapes()

    def __repr__(self) -> str:
        settings = {**self._settings, "inner": name_of(self._inner)}
        return f"powersgd({', '.join(f'{name}={value}' for name, value in settings.items())})"


class Compression:
    """The matrices of one bucket in one step, in place of the gradients in its flat tensor."""

    def __init__(self, flat: torch.Tensor, cut: Cut, rank: int, residuals: torch.Tensor | None) -> None:
        self._cut = cut
        self._rank = rank
        self._rest = [flat[start:end] for start, end in cut.rest]
        self._matrices = [block.of(flat) for block in cut.blocks]
        self._residuals = [] if residuals is None else [block.of(residuals) for block in cut.blocks]
        self._bases: Tensors = []
        if residuals is not None:
            flat.add_(residuals)
            if cut.rest:  # sent in full. Where buckets are matrices, it may have been in one in the last plan
                torch._foreach_zero_([residuals[start:end] for start, end in cut.rest])

    def times(self, factors: Tensors) -> torch.Tensor:
        """Return what travels first: the rest as it is, and M Q of all matrices."""
        heights = self._numel_of_factors(1)
        sent = self._matrices[0].new_empty(self._cut.rest_numel + sum(heights))
        if self._rest:
            torch._foreach_copy_(self._rest_in(sent), self._rest)
        for matrix, factor, product in zip(self._matrices, factors, self._factors_in(sent, 1), strict=True):
            torch.bmm(factor, matrix.mT, out=product)
        return sent

    def onto_basis_of(self, sent: torch.Tensor) -> torch.Tensor:
        """Take what came of that, and return what travels next: Mᵀ P of all matrices."""
        if self._rest:
            torch._foreach_copy_(self._rest, self._rest_in(sent))
        self._bases = [orthonormal(rows) for rows in self._factors_in(sent, 1)]
        factors = sent.new_empty(sum(self._numel_of_factors(2)))
        for matrix, basis, product in zip(
            self._matrices, self._bases, self._factors_in(factors, 2), strict=True
        ):
            torch.bmm(basis, matrix, out=product)
        return factors

    def leave_residuals(self, own: torch.Tensor) -> None:
        """Keep what the factors miss of this rank's matrices."""
        for place, residual in enumerate(self._residuals):
            factor = self._factors_in(own, 2)[place]
            torch.baddbmm(self._matrices[place], self._bases[place].mT, factor, alpha=-1, out=residual)

    def restore(self, sent: torch.Tensor, factors: Factors) -> None:
        """Put the product of the factors in place of the matrices, and remember the new Q."""
        for place, factor in enumerate(self._factors_in(sent, 2)):
            torch.bmm(self._bases[place].mT, factor, out=self._matrices[place])
            is_finite = factors.keep(self._cut.blocks[place], factor)
            if self._residuals:
                _clear_unless(is_finite, self._residuals[place])

    def _numel_of_factors(self, side: int) -> list[int]:
        return [len(matrix) * matrix.shape[side] * self._rank for matrix in self._matrices]

    def _factors_in(self, sent: torch.Tensor, side: int) -> Tensors:
        """View a tensor that travels as a factor for each block: of its rows (1) or of its columns (2)."""
        numels = self._numel_of_factors(side)
        pieces = sent[sent.numel() - sum(numels) :].split_with_sizes(numels)
        return [
            p.view(len(m), self._rank, m.shape[side]) for p, m in zip(pieces, self._matrices, strict=True)
        ]

    def _rest_in(self, sent: torch.Tensor) -> Tensors:
        return sent[: self._cut.rest_numel].split_with_sizes([span.numel() for span in self._rest])


def _clear_unless(is_finite: torch.Tensor, residuals: torch.Tensor) -> None:
    """Drop what a step that was infinite or not a number has left behind, or it would never go away."""
    if is_finite.device.type != "cpu" or not bool(is_finite.all()):
        residuals.masked_fill_(~is_finite, 0)
