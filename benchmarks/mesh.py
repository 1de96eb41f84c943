"""Two dimensions on four ranks, 2 (data) x 2 (tensor): ``python -m benchmarks mesh``. There is no bar for it.

The same sharded MLP with torch's DDP, which makes local tensors of its parameters first, and with ours, which
takes them as they are, and localized. Four ranks on two cores hide nothing: what is measured is what each way
costs beside what DTensors themselves do.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from benchmarks.cycles import Cycle, Variant, merge, run_cycles
from benchmarks.models import Task
from benchmarks.ranks import on_ranks, say
from benchmarks.steps import from_rank_0, listed
from benchmarks.table import Row
from benchmarks.variants import TORCH_FLAGS, guarded, training_step
from paceline.guard import guard
from paceline.tensor_parallel import localize

RANKS = 4
OURS, LOCALIZED, BARE = "paceline", "paceline, localized", "tensor-parallel alone"


class Pairs(nn.Module):
    """Pairs of linear layers, the first cut by columns and the second by rows."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x


def mesh(seconds: float, *, tiny: bool = False) -> list[Row]:
    """Compare a step of ours with torch's best flags."""
    say(f"  {RANKS} ranks: {seconds:.0f} s")
    samples = merge(on_ranks(RANKS, cycles_of, seconds, tiny))
    say(f"    kept {samples.kept}; ms a step: " + listed(samples))
    best = min(TORCH_FLAGS, key=samples.median)
    return [
        Row(
            0,
            f"2 x 2 mesh: step, {one} / {other}",
            samples.ratio(one, other),
            goal,
            f"CPU {samples.cpu_ratio(one, other)}; {samples.kept}",
            samples.medians,
            samples.is_quiet,
        )
        for one, other, goal in ((OURS, best, "<= 1.03"), (LOCALIZED, best, "<= 1.03"), (OURS, BARE, ">= 1"))
    ]


def cycles_of(seconds: float, tiny: bool) -> list[Cycle]:
    """Run on each rank: build the variants and time them."""
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return run_cycles(
        variants(made, tiny), seconds=seconds, slot_seconds=0.001 if tiny else 0.05, share=from_rank_0
    )


def variants(made: DeviceMesh, tiny: bool) -> Sequence[Variant]:
    torchs = [
        Variant(
            name,
            training_step(*_with(made, tiny, lambda m, f=flags: TorchDDP(m, device_mesh=made["dp"], **f))),
        )
        for name, flags in TORCH_FLAGS.items()
    ]
    return [
        Variant(BARE, training_step(*_with(made, tiny, lambda m: m))),
        _ours(OURS, made, tiny),
        _ours(LOCALIZED, made, tiny, is_localized=True),
        *torchs,
    ]


def _ours(name: str, made: DeviceMesh, tiny: bool, *, is_localized: bool = False) -> Variant:
    def replicate(model: nn.Module) -> nn.Module:
        return paceline.replicate(localize(model) if is_localized else model, mesh=made["dp"])

    task, model = _with(made, tiny, replicate)
    reducer = paceline.replica(model).reducer
    guard.remove(reducer)
    return Variant(name, training_step(task, model), lambda: guarded(reducer))


def _with(made: DeviceMesh, tiny: bool, wrap) -> tuple[Task, nn.Module]:
    layers, width = (1, 8) if tiny else (6, 256)
    torch.manual_seed(0)
    model = Pairs(layers, width)
    plan = {f"up.{i}": ColwiseParallel() for i in range(layers)}
    plan |= {f"down.{i}": RowwiseParallel() for i in range(layers)}
    parallelize_module(model, made["tp"], plan)
    task = Task(model, torch.randn(16, width), lambda out: out.square().mean())
    return task, wrap(model)
