"""What compression left out, kept for the next step.

Kept by parameter, since the plan puts parameters into other buckets now and then; laid out like the bucket,
so that adding it takes one operator.
"""

from collections.abc import Mapping

import torch

from paceline.hooks.bucket import GradBucket


class Residuals:
    """A tensor for each parameter, zero at first. Those of one bucket are views of one flat tensor."""

    def __init__(self) -> None:
        self._by_name: dict[str, torch.Tensor] = {}
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}

    def of(self, bucket: GradBucket) -> torch.Tensor:
        """Return the flat tensor that belongs to a bucket. Write the new residuals into it."""
        names = tuple(bucket.names)
        flat = self._flats.get(names)
        if flat is None or flat.dtype is not bucket.flat.dtype or flat.device != bucket.flat.device:
            flat = self._lay_out(names, bucket)
        return flat

    def _lay_out(self, names: tuple[str, ...], bucket: GradBucket) -> torch.Tensor:
        moved = set(names)
        self._flats = {other: flat for other, flat in self._flats.items() if moved.isdisjoint(other)}
        flat = self._flats[names] = torch.zeros_like(bucket.flat)
        for name, view in zip(names, bucket.split(flat), strict=True):
            old = self._by_name.get(name)
            if old is not None:
                view.copy_(old)
            self._by_name[name] = view
        return flat

    def pay_out(self, bucket: GradBucket) -> None:
        """Add what is left of a bucket to it, and keep nothing: it is not compressed any more."""
        if not self._by_name.keys().isdisjoint(bucket.names):
            bucket.flat.add_(self.of(bucket))
            del self._flats[tuple(bucket.names)]
            for name in bucket.names:
                del self._by_name[name]

    def clear(self) -> None:
        """Start anew from zeros."""
        self._by_name, self._flats = {}, {}

    def save(self) -> dict[str, torch.Tensor]:
        """Copy everything, by parameter."""
        return {name: residual.clone() for name, residual in self._by_name.items()}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take up what ``save()`` returned."""
        self._by_name, self._flats = dict(saved), {}

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the parameters that there is something of."""
        return {name: residual.shape for name, residual in self._by_name.items()}
