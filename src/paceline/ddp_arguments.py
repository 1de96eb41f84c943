"""The constructor arguments of torch's wrapper, read and checked."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.nested import map_tensors
from paceline.places import here
from paceline.plan import Caps
from paceline.settings import check_names


def deprecated(message: str) -> None:
    """Warn whoever constructs the wrapper."""
    warnings.warn(message, FutureWarning, stacklevel=5)  # by way of what keeps compilers out


def check_one_group(process_group: Any, device_mesh: Any) -> None:
    """Refuse two answers to the question of who takes part, with torch's exception and its words."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError(
            "Cannot specify both process_group and device_mesh arguments. Each says over which ranks to "
            "reduce; leave one of them out"
        )
    if getattr(device_mesh, "ndim", 1) != 1:
        names = getattr(device_mesh, "mesh_dim_names", None) or f"{device_mesh.ndim} dimensions"
        raise RuntimeError(
            f"Only 1D device mesh is supported, and this one has {names}; give one of them, such as "
            'mesh["dp"]'
        )


def syncs_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Tell whether buffers are taken from rank 0 before each forward."""
    if broadcast_buffers is None:
        return forward_sync_buffers is None or forward_sync_buffers
    deprecated(
        "broadcast_buffers is deprecated: use forward_sync_buffers, which means the same here"
        if forward_sync_buffers is None
        else "broadcast_buffers is deprecated, and ignored because forward_sync_buffers is given"
    )
    return broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers


def delayed_names(module: nn.Module, named: Any, trigger: Any) -> frozenset[str]:
    """Check torch's arguments for delayed parameters. They go out last, so nobody has to be told when."""
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time. "
            "Give both, or neither"
        )
    names = [name for name, _ in named or ()]
    check_names(module, "delay_all_reduce_named_params", names, [*module.named_parameters()])
    return frozenset(names)


def caps_from(cap_mb: float | None, caps_mb: Sequence[float] | None) -> Caps:
    """Read bucket sizes as torch's users give them."""
    if cap_mb is not None and caps_mb is not None:
        raise ValueError(f"give bucket_cap_mb ({cap_mb}) or bucket_cap_mb_list ({list(caps_mb)}), not both")
    if caps_mb is not None:
        return Caps.of_mib(caps_mb)
    return Caps(is_first_free=True) if cap_mb is None else Caps.of_mib([cap_mb])


def single_device(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Check torch's device arguments: one GPU that holds the whole module, or nothing."""
    if (not device_ids and output_device is None) or here().is_pretended:
        return None, None
    devices = sorted({str(p.device) for p in module.parameters()})
    if device_ids and len(device_ids) > 1:
        raise ValueError(
            "device_ids can only be None or contain a single element. One process trains on one GPU: give "
            f"the one that its module is on, got {list(device_ids)}"
        )
    if not device_ids or len(devices) != 1 or devices[0] == "cpu":
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


def move_to(device: torch.device, value: Any) -> Any:
    """Move every tensor in nested containers to a device; leave everything else as it is."""
    return map_tensors(lambda tensor: tensor.to(device), value)
