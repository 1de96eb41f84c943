"""Train a small character-level GPT on the source text of Python's own standard library.

    paceline run -n 2 examples/train.py                          two ranks on this machine
    torchrun --nproc-per-node 2 examples/train.py                the same, started by torchrun
    python examples/train.py                                     a world of one
    paceline run -n 2 examples/train.py --resume --steps 3000    go on from the checkpoint

The global batch of a step depends on the step alone, never on the number of ranks: each rank takes its share
of the rows, and the averaged gradient is the gradient of the whole batch. Rank 0 checks that by taking the
first steps in one process as well. Ctrl-C saves and stops.
"""

import copy
import hashlib
import os
import pickle
import signal
import sys
import threading
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW, Optimizer

import paceline
from display import Progress, print_table
from gpt import GPT, read_text

CHECKED_STEPS = 3  # compared with a one-process run
REPORT_EVERY = 5  # steps


def rows_of_step(text: Tensor, step: int, args: Namespace, rank: int = 0, size: int = 1) -> Tensor:
    """Return this rank's rows of a step's global batch: (batch / size, context + 1)."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=generator)
    places = starts[rank::size] + torch.arange(args.context + 1)
    return text[places.to(text.device)].long()


def take_step(model: GPT, optimizer: Optimizer, rows: Tensor, step: int) -> Tensor:
    """Take one optimizer step and return the loss of these rows."""
    # The rate depends on the step and not on --steps: a resumed run goes on as if it had never stopped.
    optimizer.param_groups[0]["lr"] = 6e-3 * min((step + 1) / 50, (50 / (step + 1)) ** 0.5)
    loss = model.loss(rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def one_process_run(model: GPT, optimizer: Optimizer, text: Tensor, steps: range, args: Namespace) -> GPT:
    """Take the same steps on whole global batches in a copy, and return the copy."""
    model, optimizer = copy.deepcopy((model, optimizer))  # the copy of a replica is a plain module
    for step in steps:
        take_step(model, optimizer, rows_of_step(text, step, args), step)
    return model


def train(args: Namespace, world: paceline.World) -> int:
    """Train, save and report; return the exit code."""
    leader = world.rank == 0
    text, held_out = (part.to(world.device) for part in read_text())
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, args.context).to(world.device)
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    start = restore(args, model, optimizer) if args.resume else 0
    paceline.replicate(model)  # in place: same object, same class, same state_dict keys

    checked = range(start, min(start + CHECKED_STEPS, args.steps))
    alone = one_process_run(model, optimizer, text, checked, args) if leader else None
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    progress = Progress(start, args.steps, args.batch * args.context)
    for step in range(start, args.steps):
        loss = take_step(model, optimizer, rows_of_step(text, step, args, world.rank, world.size), step)
        if alone and step == checked[-1]:
            difference = largest_difference(model, alone)
        if (step - start) % REPORT_EVERY == 0 or step + 1 == args.steps:
            mean_loss, stop = gather([loss.item(), interrupted.is_set()], world).mean(0).tolist()
            if leader:
                progress.update(step + 1, mean_loss)
            if stop:  # agreed by all ranks, so they leave the loop together
                break

    if leader:
        save(args, model, optimizer, step + 1)
        if stop:
            print(f"\nstopped after step {step + 1}, saved {args.checkpoint}; --resume goes on from there")
    if stop:
        return 130
    held_out_loss = evaluate(model, held_out, args, world)
    hashes = [bytes(map(int, row)).hex() for row in gather(hash_of_weights(model), world).tolist()]
    equal = len(set(hashes)) == 1
    if leader:
        print(f"\n{model.write('    def __init__(self', 400)}\n")
        print_table(
            {
                "ranks": f"{world.size} on {world.device.type}",
                "steps": f"{start} to {args.steps}, {args.batch} x {args.context} tokens each",
                "loss, first to last": f"{progress.losses[0]:.3f} to {progress.losses[-1]:.3f}",
                "loss on held-out text": f"{held_out_loss:.3f}",
                "throughput": progress.summary(),
                **{f"weights on rank {rank}": value for rank, value in enumerate(hashes)},
                "weights equal": "yes" if equal else "NO",
                f"one process, {len(checked)} steps": f"largest difference {difference:.1e}",
                "checkpoint": str(args.checkpoint),
            }
        )
    return 0 if equal else 1


@torch.no_grad()
def evaluate(model: GPT, text: Tensor, args: Namespace, world: paceline.World) -> float:
    """Return the loss on twenty batches of a text, each rank doing its share."""
    shares = [rows_of_step(text, step, args, world.rank, world.size) for step in range(20)]
    return gather([model.loss(rows).item() for rows in shares], world).mean().item()


def gather(values: Sequence[float], world: paceline.World) -> Tensor:
    """Return the values of all ranks: (ranks, values)."""
    mine = torch.tensor(values, dtype=torch.float64, device=world.device)
    rows = [mine.clone() for _ in range(world.size)]
    if world.size > 1:
        dist.all_gather(rows, mine)
    return torch.stack(rows)


def largest_difference(model: GPT, other: GPT) -> float:
    """Return by how much two models differ in the parameter that differs most."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def hash_of_weights(model: GPT) -> list[int]:
    """Return eight bytes that differ if any bit of the weights does."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(bytes(value.cpu().view(torch.uint8).flatten().tolist()))
    return list(digest.digest()[:8])


def save(args: Namespace, model: GPT, optimizer: Optimizer, step: int) -> None:
    """Write the checkpoint; whoever reads it never finds half of one."""
    partial = args.checkpoint.with_name(args.checkpoint.name + ".partial")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "step": step, "run": shape(args)}, partial)
    os.replace(partial, args.checkpoint)


def restore(args: Namespace, model: GPT, optimizer: Optimizer) -> int:
    """Load the checkpoint on this rank and return the step to go on from."""
    if not args.checkpoint.is_file():
        raise SystemExit(f"--resume: there is no checkpoint at {args.checkpoint}")
    try:
        state = torch.load(args.checkpoint, map_location="cpu")
        made_with = state["run"]
    except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise SystemExit(f"--resume: {args.checkpoint} is no checkpoint of this script: {error!r}") from None
    if made_with != shape(args):
        raise SystemExit(f"--resume: {args.checkpoint} was made with {made_with}, not {shape(args)}")
    if state["step"] >= args.steps:
        raise SystemExit(f"--resume: {args.checkpoint} is at step {state['step']}; give a larger --steps")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def shape(args: Namespace) -> dict[str, int]:
    """Return the arguments that a resumed run has to share with the first."""
    return {name: getattr(args, name) for name in ("layers", "width", "context", "batch")}


def positive(text: str) -> int:
    """Read a whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def main() -> None:
    """Read the arguments and train in the world this process was started in."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=1000, help="train up to this step")
    parser.add_argument("--batch", type=positive, default=32, help="rows in a global batch of all ranks")
    parser.add_argument("--context", type=positive, default=64, help="characters in a row")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/train.pt"), metavar="PATH")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    if args.width % 4:
        parser.error(f"--width {args.width} cannot be split into 4 heads")
    if args.checkpoint.is_dir():
        parser.error(f"--checkpoint {args.checkpoint} is a folder")
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with paceline.world() as world:
        if args.batch % world.size:
            parser.error(f"--batch {args.batch} cannot be split evenly over {world.size} ranks")
        code = train(args, world)
    sys.exit(code)


if __name__ == "__main__":
    main()
