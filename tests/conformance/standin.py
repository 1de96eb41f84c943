"""Stand in for two GPUs on a machine that has none, so that torch's own tests can run on CPU and Gloo.

Most of torch's DDP tests ask for GPUs although what they check needs none. ``open_skips()`` opens the
decorators that would skip them; ``install()`` makes every CUDA device mean the CPU, and streams and events
mean nothing. Of DistributedDataParallel it touches the device arguments, their two fields in the logging data
and the refusal of SyncBatchNorm on a CPU, and does the same to any class that takes its place: both libraries
run under the same layer. docs/conformance.md tells readers what that leaves unproven.

For the conformance run only, in processes that do nothing else: nothing is ever put back.
"""

import functools
import itertools
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # before its subjects are replaced
import torch.distributed as dist
import torch.distributed.device_mesh
from torch import nn

# torch's test helpers derive from its TestCase, and use none of it here.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).TestCase = unittest.TestCase  # type: ignore[attr-defined]

import torch.testing._internal.common_distributed as common  # noqa: E402

Test = Callable[..., Any]

CPU = torch.device("cpu")
PICTURE = 64  # pixels, each way

FACTORIES = ["as_tensor", "tensor", "arange", "linspace", "eye", "randint", "randperm"]
FACTORIES += [
    f"{name}{like}" for name in ("empty", "full", "ones", "rand", "randn", "zeros") for like in ("", "_like")
]


def install() -> None:
    """Put everything in place; last, because some imports compile TorchScript out of torch's functions."""
    _move_tensors()
    _quiet_streams()
    _replace_cuda()
    _allow_sync_batch_norm()
    _mesh_on_cpu()


def drop_devices(ddp: type[nn.Module]) -> None:
    """Let a class in the place of DistributedDataParallel be told CUDA devices for a module on the CPU."""
    construct, figures = ddp.__init__, getattr(ddp, "_get_ddp_logging_data", None)

    @functools.wraps(construct)
    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ):
        construct(self, module, None, None, *args, **kwargs)
        self.told_devices = device_ids

    def _get_ddp_logging_data(self: Any) -> Any:
        """Answer for the devices that were taken away."""
        data = figures(self)
        if told := getattr(self, "told_devices", None):
            data = {**data, "device_ids": ", ".join(map(str, told)), "output_device": told[0]}
        return data

    ddp.__init__ = __init__  # type: ignore[assignment]
    if figures is not None:
        ddp._get_ddp_logging_data = _get_ddp_logging_data
    if hasattr(ddp, "_passing_sync_batchnorm_handle"):
        ddp._passing_sync_batchnorm_handle = lambda self, module: None  # refuses SyncBatchNorm on the CPU


# ---- what would skip --------------------------------------------------------------------------------


def open_skips() -> None:
    """Let nothing be skipped; before torch's test modules are imported."""
    common.skip_if_lt_x_gpu = _wants_gpus
    common.skip_if_no_gpu = lambda test: test
    common.nccl_skip_if_lt_x_gpu = lambda backend, count: lambda test: test
    common.require_n_gpus_for_nccl_backend = lambda count, backend: lambda test: test
    unittest.skip = _switched_off  # type: ignore[assignment]
    unittest.skipIf = lambda condition, why: _switched_off(why) if condition else lambda test: test  # type: ignore[assignment]


def _wants_gpus(count: int, **_: Any) -> Callable[[Test], Test]:
    """Remember how many GPUs a test asks for: it gets as many ranks."""

    def mark(test: Test) -> Test:
        test.gpus = count  # type: ignore[attr-defined]
        return test

    return mark


def _switched_off(why: str) -> Callable[[Test], Test]:
    """Remember that torch itself does not run a test, and run it."""

    def mark(test: Test) -> Test:
        if isinstance(test, type):
            return test
        test.__unittest_skip_why__ = why  # type: ignore[attr-defined]
        return test

    return mark


# ---- where tensors are ------------------------------------------------------------------------------


def on_cpu(device: Any) -> Any:
    """Give the CPU for every way of naming a CUDA device; anything else is given back."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def _with_devices_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return function(*_smaller(args), **kwargs)

    return call


def _smaller(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make pictures small: a CPU takes minutes to convolve what one test gives a GPU."""
    is_picture = len(shape) == 4 and all(isinstance(size, int) and size >= PICTURE for size in shape[2:])
    return (*shape[:2], PICTURE, PICTURE) if is_picture else shape


def _moving_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return to(self, *(on_cpu(arg) if i == 0 else arg for i, arg in enumerate(args)), **kwargs)

    return call


def _stay(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _move_tensors() -> None:
    for name in FACTORIES:
        setattr(torch, name, _with_devices_on_cpu(getattr(torch, name)))
    torch.Tensor.to = _moving_to_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    nn.Module.to = _moving_to_cpu(nn.Module.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = _stay  # type: ignore[method-assign, assignment]
    nn.Module.cuda = _stay  # type: ignore[method-assign, assignment]
    torch.device = _Device  # type: ignore[misc, assignment]


class _DeviceType(type):
    """A class whose instances are torch's devices."""

    real = torch.device

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if args and isinstance(args[0], int):
            return CPU
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, cls.real)


class _Device(metaclass=_DeviceType):
    pass


def _mesh_on_cpu() -> None:
    mesh = dist.device_mesh.init_device_mesh

    @functools.wraps(mesh)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return mesh("cpu", *args, **kwargs)

    dist.device_mesh.init_device_mesh = dist.init_device_mesh = init_device_mesh


# ---- streams and events -----------------------------------------------------------------------------


class NoStream:
    """A stream or an event on a device where everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CPU

    def __enter__(self) -> "NoStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        """Give an event that has happened."""
        return event or NoStream()

    def query(self) -> bool:
        """Say that it has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Give a time that is not zero."""
        return 1.0

    def wait(self, *_: Any, **__: Any) -> None:
        """Do nothing: it has happened."""

    record = synchronize = wait_event = wait_stream = wait


def _new(kind: type) -> Callable[..., Any]:
    return lambda *args, **kwargs: kind()  # a new one every time: dynamo knows torch's functions by identity


def _quiet_streams() -> None:
    for home, name in itertools.product((torch, torch.cuda), ("Stream", "Event")):
        setattr(home, name, type(name, (NoStream,), {}))
    torch.cuda.stream = torch.cuda.device = NoStream
    torch.accelerator.current_stream = _new(NoStream)
    torch.cuda.current_stream, torch.cuda.default_stream = _new(NoStream), _new(NoStream)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


class _Current:
    """The CUDA device that a process thinks it is on."""

    index = 0

    @classmethod
    def set(cls, device: Any) -> None:
        cls.index = device if isinstance(device, int) else torch.device(device).index or 0

    @classmethod
    def get(cls) -> int:
        return cls.index


def _replace_cuda() -> None:
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device, torch.cuda.current_device = _Current.set, _Current.get
    for name in ("synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, _new(type(None)))


# ---- SyncBatchNorm, whose kernels exist for GPUs alone ----------------------------------------------


def _allow_sync_batch_norm() -> None:
    for function in (_stats, _gather_stats_with_counts, _elemt, _backward_reduce, _backward_elemt):
        setattr(torch, f"batch_norm{function.__name__}", function)
    forward = nn.SyncBatchNorm.forward

    @functools.wraps(forward)
    def on_any_device(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
        name = torch._C._get_privateuse1_backend_name
        torch._C._get_privateuse1_backend_name = lambda: input.device.type
        try:
            return forward(self, input)
        finally:
            torch._C._get_privateuse1_backend_name = name

    nn.SyncBatchNorm.forward = on_any_device  # type: ignore[method-assign]


def _dims(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _channel(v: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return v.reshape([1, -1] + [1] * (like.dim() - 2))


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
    return x.mean(_dims(x)), (x.var(_dims(x), correction=0) + eps).rsqrt()


def _gather_stats_with_counts(
    x: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    weight, total = counts.to(means.dtype).unsqueeze(1), counts.sum()
    mean = (weight * means).sum(0) / total
    var = (weight * (invstds.pow(-2) - eps + (means - mean).pow(2))).sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def _elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    scale = invstd if weight is None else invstd * weight
    out = (x - _channel(mean, x)) * _channel(scale, x)
    return (out if bias is None else out + _channel(bias, x)).to(x.dtype)


def _backward_reduce(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    dy = dy.to(mean.dtype)
    sum_dy, sum_dy_xmu = dy.sum(_dims(x)), (dy * (x - _channel(mean, x))).sum(_dims(x))
    grad_dtype = mean.dtype if weight is None else weight.dtype
    grad_weight = (sum_dy_xmu * invstd).to(grad_dtype) if for_weight else None
    return sum_dy, sum_dy_xmu, grad_weight, sum_dy.to(grad_dtype) if for_bias else None


def _backward_elemt(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    total = counts.sum()
    slope = _channel(invstd.pow(2) * sum_dy_xmu / total, x)
    centred = dy - _channel(sum_dy / total, x) - (x - _channel(mean, x)) * slope
    scale = invstd if weight is None else invstd * weight
    return (centred * _channel(scale, x)).to(x.dtype)
