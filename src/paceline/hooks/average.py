"""The plain mean over the ranks."""

from paceline.comm import Comm, Pending
from paceline.hooks.bucket import GradBucket


def average(bucket: GradBucket, comm: Comm) -> Pending:
    """Take the mean of the bucket over all ranks, in place."""
    return comm.total(bucket.flat) if bucket.is_scaled else comm.average(bucket.flat)
