"""Which device a rank computes on, and which backend serves the ranks' devices."""

import socket

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.launch.place import Place

ON_GPU = "cpu:gloo,cuda:nccl"
ON_CPU = "gloo"


def choose_device(asked: str | torch.device | None, local_rank: int, backend: str | None) -> torch.device:
    """Return the device asked for, or the best one for this rank, and make it the current one."""
    device = torch.device(asked) if asked is not None else _best_device(backend)
    if device.type != "cuda":
        return device
    if device == torch.device("cuda"):
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def choose_backend(device: torch.device, place: Place, store: Store) -> str:
    """Return NCCL beside Gloo for ranks that have a GPU each, Gloo alone for all others."""
    if device.type != "cuda" or _share_gpus(place, store, device):
        return ON_CPU
    return ON_GPU


def _best_device(backend: str | None) -> torch.device:
    only_cpu = backend is not None and "cpu:" in backend and "cuda:" not in backend
    return torch.device("cuda" if torch.cuda.is_available() and not only_cpu else "cpu")


def _share_gpus(place: Place, store: Store, device: torch.device) -> bool:
    """Tell whether two ranks use one GPU, which NCCL refuses; all ranks of a run get the same answer."""
    local_size = place.local_size or (place.size if place.on_one_machine else None)
    if local_size is not None and local_size <= torch.cuda.device_count():
        return False
    # More ranks than visible GPUs: either they share, or the launcher shows each rank a GPU of its own.
    store.set(f"gpu/{place.rank}", f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}")
    gpus = [bytes(store.get(f"gpu/{rank}")) for rank in range(place.size)]
    return len(set(gpus)) < len(gpus)
