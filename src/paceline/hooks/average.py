"""The plain mean and the plain sum over the ranks."""

from paceline.comm import Comm, Pending
from paceline.hooks.bucket import GradBucket, surely


@surely
def average(bucket: GradBucket, comm: Comm) -> Pending:
    """Take the mean of the bucket over all ranks, in place."""
    return comm.total(bucket.flat) if bucket.is_scaled else comm.average(bucket.flat)


@surely
def total(bucket: GradBucket, comm: Comm) -> Pending:
    """Take the sum of the bucket over all ranks, in place."""
    return comm.total(bucket.flat)


@surely
def noop(bucket: GradBucket, comm: Comm) -> Pending:
    """Send nothing: every rank keeps its own gradients. For finding out what communication costs."""
    return Pending(bucket.flat)


total.way = "sum"  # type: ignore[attr-defined]
noop.way = "own"  # type: ignore[attr-defined]
