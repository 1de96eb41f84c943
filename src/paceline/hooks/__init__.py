"""What is done with a bucket on its way: functions of a bucket and a comm, which nest.

A hook gets a full bucket, starts its collectives and returns a ``Pending`` whose tensor replaces the bucket's
contents. It is called in plan order on every rank, and must start the same collectives on every rank.
"""

from paceline.hooks.average import average
from paceline.hooks.bucket import GradBucket, Hook

__all__ = ["GradBucket", "Hook", "average"]
