"""What is done with a bucket on its way: functions of a bucket and a comm, which nest.

A hook gets a full bucket, starts its collectives and returns a ``Pending`` whose tensor replaces the bucket's
contents. It is called in plan order on every rank, and must start the same collectives on every rank.
"""

from paceline.hooks.average import average, noop, total
from paceline.hooks.averaging import average_parameters
from paceline.hooks.bucket import GradBucket, Hook, StatefulHook, is_sure, may_join, name_of, surely, way_of
from paceline.hooks.fixed_order import InOrder
from paceline.hooks.in_dtype import in_dtype
from paceline.hooks.local_sgd import local_sgd
from paceline.hooks.powersgd import powersgd
from paceline.hooks.quantized import quantized
from paceline.hooks.staged import Staged, Stages
from paceline.hooks.torch_form import FromTorch, sends_by_comm

__all__ = [
    "FromTorch",
    "GradBucket",
    "Hook",
    "InOrder",
    "Staged",
    "Stages",
    "StatefulHook",
    "average",
    "average_parameters",
    "in_dtype",
    "is_sure",
    "local_sgd",
    "may_join",
    "name_of",
    "noop",
    "powersgd",
    "quantized",
    "sends_by_comm",
    "surely",
    "total",
    "way_of",
]
