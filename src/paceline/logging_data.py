"""torch's ``_get_ddp_logging_data()``, made of our own figures.

The names and units are torch's: nanoseconds, bytes, 0 and 1, texts with commas. ``Replica.stats()`` says the
same and more. Fields that mean nothing here are left out; ``can_set_static_graph`` is one of them, since no
graph has to be declared static.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paceline.facts import backend_name
from paceline.plan import Plan
from paceline.recorder import StepRecord
from paceline.replication import Replica
from paceline.stats import Seconds, Times

Data = dict[str, str | int]

GLOO_THREADS = 2  # what a Gloo group gets from torch

# torch shows its C++ names.
DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
VARIABLES_OF = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}


@dataclass
class Notes:
    """What a wrapper notes as it goes, for this dictionary only."""

    hook: str = ""  # the name under which a communication hook was registered
    has_joined: bool = False  # inside join() at some time
    error: str = ""  # the last one that a method of the wrapper raised


class Wrapper(Protocol):
    """The attributes that are shown; a DistributedDataParallel has them."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def device_ids(self) -> Sequence[int] | None: ...
    @property
    def output_device(self) -> int | None: ...
    @property
    def is_multi_device_module(self) -> bool: ...
    @property
    def broadcast_buffers(self) -> bool: ...
    @property
    def bucket_bytes_cap(self) -> int: ...
    @property
    def find_unused_parameters(self) -> bool: ...
    @property
    def gradient_as_bucket_view(self) -> bool: ...
    @property
    def static_graph(self) -> bool: ...


def logging_data(wrapper: Wrapper, replica: Replica, notes: Notes) -> Data:
    """Return the dictionary as it is now."""
    return {
        **_construction(wrapper, replica),
        **_environment(backend_name(replica)),
        **_plans(wrapper, replica),
        **_runtime(replica),
        **_noted(replica, notes),
    }


def _construction(wrapper: Wrapper, replica: Replica) -> Data:
    sizes = [replica.plan.specs[index].nbytes for index in replica.plan.members]
    return {
        "world_size": replica.size,
        "rank": replica.rank,
        "module_name": type(wrapper.module).__name__,
        "device_ids": _join(wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "is_multi_device_module": int(wrapper.is_multi_device_module),
        "broadcast_buffers": int(wrapper.broadcast_buffers),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "static_graph": int(wrapper.static_graph),
        "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in wrapper.module.modules())),
        "num_parameter_tensors": len(sizes),
        "total_parameter_size_bytes": sum(sizes),
        "dtypes": _join(sorted({_dtype_name(bucket.dtype) for bucket in replica.plan.buckets})),
    }


def _environment(backend: str) -> Data:
    names = (*VARIABLES, *VARIABLES_OF.get(backend, ()))
    found: Data = {name.lower(): os.environ.get(name, "N/A") for name in names}
    found["backend_name"] = backend
    if backend == "gloo":
        found["gloo_num_threads"] = GLOO_THREADS
    return found


def _plans(wrapper: Wrapper, replica: Replica) -> Data:
    found: Data = {"bucket_sizes": _sizes(replica.first_plan)}
    if replica.step == 0:
        return found
    # torch keeps its first buckets where it looks for unused parameters in each step, and says so here. What
    # becomes of our plan in any case is Stats.plan_changes.
    looks_each_step = wrapper.find_unused_parameters and not wrapper.static_graph
    is_learned = replica.reducer is not None and replica.reducer.is_plan_learned
    found["has_rebuilt_buckets"] = int(is_learned and not looks_each_step)
    if found["has_rebuilt_buckets"]:
        places = _places(replica.plan)
        buckets = ([places[slot.parameter] for slot in bucket.slots] for bucket in replica.plan.buckets)
        found["rebuilt_bucket_sizes"] = _sizes(replica.plan)
        found["rebuilt_per_bucket_param_indices"] = _join(" ".join(map(str, bucket)) for bucket in buckets)
    return found


def _runtime(replica: Replica) -> Data:
    stats = replica.stats()
    recorder = replica.reducer.recorder if replica.reducer else None
    found: Data = {"iteration": stats.timed_step or 0}
    if recorder is None or recorder.last is None:
        return found
    specs = {spec.name: spec for spec in replica.plan.specs}
    places = _places(replica.plan)
    return {
        **found,
        "num_buckets_reduced": stats.buckets_reduced,
        "unused_parameter_size": sum(specs[name].nbytes for name in stats.unused),
        "prev_iteration_grad_ready_order_indices": _join(
            places[index] for index in recorder.last.arrival if index in places
        ),
        **_durations("", stats.last),
        **_durations("avg_", stats.mean),
        **_moments(recorder.last_timed),
    }


def _durations(prefix: str, times: Times) -> Data:
    return {
        f"{prefix}forward_compute_time": _ns(times.forward_seconds),
        f"{prefix}backward_compute_time": _ns(times.computation_seconds),
        f"{prefix}backward_comm_time": _ns(times.communication_seconds),
        f"{prefix}backward_compute_comm_overlap_time": _ns(times.overlapped_seconds),
    }


def _moments(record: StepRecord | None) -> Data:
    """Say when things happened, by the host's clock, in nanoseconds of the epoch."""
    if record is None:
        return {}
    host = record.readings[0]
    epoch_ns = time.time_ns() - _ns(host.clock.now())
    seen: dict[str, Any] = {
        "forward_compute_time_start": host.forward[0] if host.forward else None,
        "backward_compute_time_start": host.began,
        "backward_compute_time_end": host.computed,
        "backward_comm_time_start": host.handed,
        "backward_comm_time_end": host.landed,
    }
    return {name: epoch_ns + _ns(reading) for name, reading in seen.items() if reading is not None}


def _noted(replica: Replica, notes: Notes) -> Data:
    found: Data = {}
    if notes.hook:
        found["comm_hook"] = notes.hook
    if notes.has_joined:
        found["join_uneven_inputs"] = 1
    error = notes.error or (replica.reducer.recorder.error if replica.reducer else "")
    if error:
        found |= {"has_error": 1, "error": error, "iteration": replica.step}
    return found


def _places(plan: Plan) -> dict[int, int]:
    """Give the trained parameters torch's numbers: as registered, without the frozen ones."""
    return {index: place for place, index in enumerate(sorted(plan.members))}


def _sizes(plan: Plan) -> str:
    return _join(bucket.nbytes for bucket in plan.buckets)


def _dtype_name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _join(values: Any) -> str:
    return ", ".join(str(value) for value in values)


def _ns(seconds: Seconds) -> int:
    return 0 if seconds is None else int(seconds * 1e9)
