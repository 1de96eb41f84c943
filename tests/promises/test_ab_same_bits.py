"""AB: the same input gives the same bits: across steps, bucket sizes and numbers of ranks."""

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.testing import ranks
from tests.promises.libraries import TORCH, TORCH_SECONDS, Library, on_both
from tests.promises.measure import gather, story

MICRO_BATCHES = 8
CAPS_MB = (0.002, 25)
SAME, DIFFERENT = "same bits", "bits differ, silent"


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 48), nn.Linear(48, 5))


def wrap(library: Library, group: Any, cap_mb: float) -> nn.Module:
    # The drop-in class has torch's arguments, and no other.
    arguments: dict[str, Any] = {"deterministic": True} if library.name != TORCH.name else {}
    return library.wrap(model(), process_group=group, bucket_cap_mb=cap_mb, **arguments)


def step(library: Library, wrapped: nn.Module, group: Any) -> bytes:
    """Run this rank's micro-batches of the one global batch, and return the gradients' bits."""
    each = MICRO_BATCHES // group.size()
    generator = torch.Generator().manual_seed(11)
    batches = torch.randn(MICRO_BATCHES * 3, 32, generator=generator).chunk(MICRO_BATCHES)
    wrapped.zero_grad()
    for number in range(each):
        with library.no_sync(wrapped) if number + 1 < each else contextlib.nullcontext():
            (wrapped(batches[group.rank() * each + number]).square().mean() / each).backward()
    return b"".join(p.grad.numpy().tobytes() for p in wrapped.parameters())


def ab_same_bits(library: Library) -> str:
    """Say what differs among steps 0 and 1, two bucket sizes, and 1, 2 and 4 ranks."""
    torch.set_num_threads(1)
    seconds = timedelta(seconds=TORCH_SECONDS)
    groups = {size: dist.new_group(list(range(size)), timeout=seconds) for size in (1, 2, 4)}
    seen: dict[tuple[float, int, int], bytes] = {}
    for group in (group for size, group in groups.items() if dist.get_rank() < size):
        for cap_mb in CAPS_MB:
            wrapped = wrap(library, group, cap_mb)
            seen |= {(cap_mb, group.size(), n): step(library, wrapped, group) for n in range(2)}
    seen = {key: found for of_rank in gather(seen) for key, found in of_rank.items()}
    small, large = CAPS_MB
    pairs = {
        "steps 0 and 1": [((cap, 4, 0), (cap, 4, 1)) for cap in CAPS_MB],
        "two bucket sizes": [((small, 4, n), (large, 4, n)) for n in range(2)],
        "1, 2 and 4 ranks": [((large, 1, 0), (large, size, 0)) for size in (2, 4)],
    }
    return story(
        (what, SAME if all(seen[one] == seen[other] for one, other in between) else DIFFERENT)
        for what, between in pairs.items()
    )


@on_both
@ranks(4)
def test_a_fixed_order_gives_the_same_bits(library: Library) -> None:
    assert ab_same_bits(library) == SAME


@ranks(4, warnings="ignore")
def test_torchs_way_gives_others() -> None:
    assert DIFFERENT in ab_same_bits(TORCH)
