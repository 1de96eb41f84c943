"""Buckets that travel in another dtype than the gradients have."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.comm import Comm, Pending
from paceline.hooks.average import average
from paceline.hooks.bucket import (
    GradBucket,
    Hook,
    Named,
    StatefulHook,
    Way,
    is_sure,
    may_join,
    name_of,
    way_of,
)
from paceline.hooks.checks import check_inner

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def in_dtype(dtype: torch.dtype, inner: Hook = average) -> Hook:
    """Run ``inner`` on the bucket in another dtype: down to send less, or up to add more exactly.

    float16 is finer than bfloat16 but ends at 65504: what is larger becomes infinite.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"in_dtype() takes a torch.dtype, got {type(dtype).__name__}")
    if dtype not in DTYPES:
        raise ValueError(
            f"in_dtype() sends gradients as one of {', '.join(map(str, DTYPES))}, not as {dtype}"
        )
    check_inner("in_dtype", inner)
    if isinstance(inner, StatefulHook):
        return StatefulInDtype(dtype, inner)
    return InDtype(dtype, inner)


class InDtype:
    """See ``in_dtype()``."""

    def __init__(self, dtype: torch.dtype, inner: Hook) -> None:
        self.dtype = dtype
        self.inner = inner
        self.label = f"in_dtype({dtype}, {name_of(inner)})"

    @property
    def is_sure(self) -> bool:
        """As the hook inside."""
        return is_sure(self.inner)

    @property
    def may_join(self) -> bool:
        """As the hook inside."""
        return may_join(self.inner)

    @property
    def way(self) -> Way:
        """As the hook inside, which may change its way from step to step."""
        return way_of(self.inner)

    def __call__(self, bucket: GradBucket, comm: Comm) -> Pending:
        if bucket.flat.is_complex():
            return _CastBack(
                self.inner(self._as_pairs(bucket), comm), torch.view_as_real(bucket.flat), bucket
            )
        if bucket.flat.dtype is self.dtype:
            return self.inner(bucket, comm)
        return _CastBack(self.inner(self._cast(bucket, comm), comm), bucket.flat, bucket)

    def _cast(self, bucket: GradBucket, comm: Comm) -> GradBucket:
        flat = bucket.flat
        is_scaled = False
        if self.inner is average and self._narrows(flat) and comm.mean_factor(flat.device) != 1:
            # The division is exact before the cast, and the fastest: in 16 bits a CPU takes twice as long.
            flat, is_scaled = flat.mul_(1 / comm.divisor), True
        return replace(bucket, flat=flat.to(self.dtype), is_scaled=is_scaled)

    def _narrows(self, flat: torch.Tensor) -> bool:
        return self.dtype.itemsize < flat.dtype.itemsize

    def _as_pairs(self, bucket: GradBucket) -> GradBucket:
        """Take complex numbers as pairs of reals, of which there are more dtypes."""
        pairs = torch.view_as_real(bucket.flat).to(self.dtype).view(-1)
        if pairs.data_ptr() == bucket.flat.data_ptr():
            pairs = pairs.clone()
        return replace(bucket, flat=pairs, split=self._refuse_to_split)

    def _refuse_to_split(self, _flat: torch.Tensor) -> Sequence[torch.Tensor]:
        raise TypeError(
            f"{name_of(self.inner)} looks at gradients one by one, and cannot do so inside in_dtype() where "
            "they are complex: they travel as pairs of reals there"
        )

    def __repr__(self) -> str:
        return self.label


class StatefulInDtype(InDtype, StatefulHook):
    """The same around a hook that remembers something: its memory is that one's."""

    inner: StatefulHook

    def bind(self, named: Named, comm: Comm) -> None:
        self.inner.bind(named, comm)

    def begin(self) -> None:
        self.inner.begin()

    def settle(self) -> None:
        self.inner.settle()

    def average_now(self) -> None:
        """Average the weights, if the hook inside lets them differ. A collective."""
        self.inner.settle()

    def unbind(self) -> None:
        self.inner.unbind()

    def forget(self) -> None:
        self.inner.forget()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    @property
    def planned(self) -> tuple[str, ...]:
        """The inner hook's, which saves it."""
        return self.inner.planned

    @planned.setter
    def planned(self, order: tuple[str, ...]) -> None:
        self.inner.planned = order

    @property
    def plan_to_take(self) -> tuple[str, ...] | None:
        """The inner hook's, which loads it."""
        return self.inner.plan_to_take

    @plan_to_take.setter
    def plan_to_take(self, order: tuple[str, ...] | None) -> None:
        self.inner.plan_to_take = order


class _CastBack(Pending):
    """What came of the hook inside, put back where it came from."""

    def __init__(self, inner: Pending, target: torch.Tensor, bucket: GradBucket) -> None:
        self._inner = inner
        self._target = target
        self._bucket = bucket
        self._is_back = False

    def advance(self) -> bool:
        return self._inner.advance()

    def linger(self) -> bool:
        return self._inner.linger()

    def wait(self) -> torch.Tensor:
        if not self._is_back:
            self._target.copy_(self._inner.wait().view_as(self._target))
            self._is_back = True
        return self._bucket.flat
