"""The GPT of train.py on a mesh: its matrices are cut over one dimension, its batches over the other.

    paceline run -n 4 examples/tensor_parallel.py                2 (data) x 2 (tensor) ranks on this machine
    paceline run -n 2 examples/tensor_parallel.py --steps 50     1 x 2

The base is train.py; what tensor parallelism adds is marked. The first steps are compared with one process.
"""

import copy
from argparse import ArgumentParser, Namespace

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

import paceline
from display import Progress, print_table
from gpt import GPT, read_text
from train import rows_of_step, take_step

CHECKED_STEPS = 3  # compared with a one-process run


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Cut the large matrices of the model over the ranks of a mesh; the rest is the same on all of them."""
    column, row = ColwiseParallel(), RowwiseParallel()
    gathered, whole = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    for block in model.blocks:
        plan = {"qkv": gathered, "project": whole, "expand": column, "contract": row}
        parallelize_module(block, mesh, plan)
    parallelize_module(model.head, mesh, gathered)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Put the parts of a tensor together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(args: Namespace, world: paceline.World) -> None:
    """Train, save and report."""
    tensor_ranks = min(2, world.size)
    mesh = init_device_mesh(  # <- the ranks in rows and columns
        world.device.type, (world.size // tensor_ranks, tensor_ranks), mesh_dim_names=("dp", "tp")
    )
    text, _ = read_text()
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, args.context)
    alone = copy.deepcopy(model)
    shard(model, mesh["tp"])  # <- its large matrices are DTensors now
    paceline.replicate(model, mesh=mesh["dp"])  # <- averaged over the ranks that have the same parts
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    optimizer_alone = AdamW(alone.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    progress = Progress(0, args.steps, args.batch * args.context)
    place, places = mesh["dp"].get_local_rank(), mesh["dp"].size()
    difference = 0.0
    for step in range(args.steps):
        # <- ranks that have parts of one model take the same rows
        loss = take_step(model, optimizer, rows_of_step(text, step, args, place, places), step)
        if step < CHECKED_STEPS:
            take_step(alone, optimizer_alone, rows_of_step(text, step, args), step)
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            difference = max((whole(p) - q).abs().max().item() for p, q in pairs)
        if world.rank == 0 and (step % 5 == 0 or step + 1 == args.steps):
            progress.update(step + 1, loss.item())

    checkpoint.save({"model": model.state_dict()}, checkpoint_id=args.checkpoint)  # <- each rank its parts
    parts = sum(isinstance(p, DTensor) for p in model.parameters())
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    if world.rank == 0:
        print_table(
            {
                "mesh": f"{places} (data) x {tensor_ranks} (tensor) ranks",
                "parameters": f"{sum(p.numel() for p in model.parameters()):,}, {held:,} of them here; "
                f"{parts} of {len(list(model.parameters()))} tensors are cut",
                "loss, first to last": f"{progress.losses[0]:.3f} to {progress.losses[-1]:.3f}",
                "throughput": progress.summary(),
                f"one process, {CHECKED_STEPS} steps": f"largest difference {difference:.1e}",
                "checkpoint": str(args.checkpoint),
            }
        )


def main() -> None:
    """Read the command line, and train."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--checkpoint", default="checkpoints/tensor_parallel")
    with paceline.world() as world:
        train(parser.parse_args(), world)


if __name__ == "__main__":
    main()
