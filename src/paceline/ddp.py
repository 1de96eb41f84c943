"""``DistributedDataParallel``: torch's contract on paceline's engine.

The same constructor arguments, attributes, methods and ``module.`` prefix as torch's class, so that a
script switches by its import. Arguments that steer torch's reducer around its own limits are accepted and
have nothing left to do; docs/from-ddp.md goes through them one by one.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.buffers import BufferSync
from paceline.comm import Comm, GroupComm
from paceline.plan import Caps
from paceline.replication import Replica, Settings, comm_for

# Accepted by torch's class, and by this one in a later release.
NOT_YET = {
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "mixed_precision": None,
    "skip_all_reduce_unused_params": False,
}


class DistributedDataParallel(nn.Module):
    """Wrap a module so that all ranks train it as one, with torch's names for everything."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        given = locals()
        _refuse([name for name, default in NOT_YET.items() if given[name] is not default])
        if not isinstance(module, nn.Module):
            raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
        self.device_ids, self.output_device = _single_device(module, device_ids, output_device)
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.forward_sync_buffers = _first_given(forward_sync_buffers, broadcast_buffers, True)
        self.require_forward_param_sync = True
        self._sync_by_default = True
        self._settings = Settings(
            caps=_caps(bucket_cap_mb, bucket_cap_mb_list),
            take_state=init_sync,
            buffers_after_backward=False,
            left_out=frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ())),
        )
        self.parameters_to_ignore = set(self._settings.left_out)
        self.module = module
        self._attach(comm_for(process_group, device_mesh))

    def _attach(self, comm: Comm, original: Replica | None = None) -> None:
        self._group = _GroupReference(comm.group if isinstance(comm, GroupComm) else None)
        self._replica: Replica | None = Replica(self.module, comm, self._settings, original)
        self.require_backward_grad_sync = self._sync_by_default
        self._buffers_to_sync = BufferSync(self.module, comm, self._settings.left_out)
        # The wrapper is the user's handle: when it goes, the module is plain again and may be wrapped anew.
        weakref.finalize(self, self._replica.detach).atexit = False

    # ---- what torch's users and frameworks read --------------------------------------------------

    @property
    def process_group(self) -> Any:
        """The group over which gradients are reduced, or None for a process alone."""
        return self._group.group

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def device_type(self) -> str:
        """The kind of device that the module is on."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on several devices."""
        return len({p.device for p in self.module.parameters()}) > 1

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are taken from rank 0 before a forward."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = bool(value)

    @property
    def bucket_bytes_cap(self) -> int:
        """The size that buckets may have, in bytes."""
        return self._settings.caps.nbytes[-1]

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward started now would be reduced. Scripts set it to accumulate without
        ``no_sync()``.
        """
        reducer = self._replica.reducer if self._replica else None
        return reducer.sync if reducer else self._sync_by_default

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._sync_by_default = bool(value)
        if self._replica and self._replica.reducer:
            self._replica.reducer.sync = bool(value)

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; buffers are made equal first, as torch does."""
        if self._replica is None and torch.is_grad_enabled():
            self._attach(comm_for(self._group.group, None))
        if self.will_sync_module_buffers():
            self._buffers_to_sync.run()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = _move(inputs, device), _move(kwargs, device)
        output = self.module(*inputs, **kwargs)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward starts by taking rank 0's buffers."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self._replica is not None
            and self._replica.size > 1
            and not self._buffers_to_sync.is_empty()
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside local; the next backward outside reduces their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Iterable[str]) -> None:
        """Leave parameters and buffers to each rank; to be called before the module is wrapped."""
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]

    def _set_static_graph(self) -> None:
        """Accept torch's hint; nothing depends on it here."""
        self.static_graph = True

    # ---- copies and pickles ----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave the engine behind: what is loaded starts its own at the first forward with gradients."""
        return {**self.__dict__, "_replica": None, "_buffers_to_sync": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        """Copy the module; the copy is watched from the start, and no rank has to wait for the others."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin.require_forward_param_sync = False
        if self._replica is not None:
            twin._attach(self._replica.comm, self._replica)
        return twin


class _GroupReference:
    """A process group inside a module's state: shared by copies, forgotten by pickles."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "_GroupReference":
        return self

    def __reduce__(self) -> Any:
        return (_GroupReference, ())


def _refuse(names: Sequence[str]) -> None:
    if names:
        raise NotImplementedError(
            f"paceline's DistributedDataParallel does not take {', '.join(names)} yet; leave it out, or "
            "stay with torch's class for this model"
        )


def _first_given(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)


def _caps(cap_mb: float | None, caps_mb: Sequence[float] | None) -> Caps:
    if cap_mb is not None and caps_mb is not None:
        raise ValueError(f"give bucket_cap_mb ({cap_mb}) or bucket_cap_mb_list ({list(caps_mb)}), not both")
    if caps_mb is not None:
        return Caps.of_mib(caps_mb)
    return Caps() if cap_mb is None else Caps.of_mib([cap_mb])


def _single_device(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Check torch's device arguments: one GPU that holds the whole module, or nothing."""
    if not device_ids and output_device is None:
        return None, None
    devices = sorted({str(p.device) for p in module.parameters()})
    if not device_ids or len(device_ids) != 1 or len(devices) != 1 or devices[0] == "cpu":
        raise ValueError(
            f"device_ids={device_ids} and output_device={output_device} are for a module on one GPU, but "
            f"this one is on {', '.join(devices) or 'no device'}. Leave both out, or move the module to "
            "that one GPU first"
        )
    first = _index(device_ids[0])
    return [first], first if output_device is None else _index(output_device)


def _index(device: int | torch.device | str) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _move(value: Any, device: torch.device) -> Any:
    """Move every tensor in nested containers to a device; leave everything else as it is."""
    if isinstance(value, torch.Tensor) or type(value).__name__ == "PackedSequence":
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_move(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, _move(item, device)) for key, item in value.items())
    return value
