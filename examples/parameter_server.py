"""Train a model that is part data-parallel, part remote: two trainers share the table of a parameter server.

    paceline run -n 3 examples/parameter_server.py

The last rank is the server. It holds the vectors of many thousand pairs of characters, far too many for each
trainer to keep a copy, and hands out those that a batch asks for. The trainers hold the same small network,
which is replicated: it gets the gradient of everybody's batch. All of it learns to predict the next character
of Python's own standard library. Rank 0 checks the first steps against one process that does all by itself.
"""

import functools
import hashlib
import sys
import warnings
from argparse import ArgumentParser, Namespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import autograd, rpc

import paceline
from display import Progress, print_table
from gpt import VOCABULARY, read_text

warnings.simplefilter("ignore")  # torch's RPC and its scripted optimizers warn of their own parts
from torch.distributed.optim import DistributedOptimizer  # noqa: E402

CONTEXT = 6  # characters that the next one is predicted from
WIDTH = 32
RATE = 0.5
CHECKED_STEPS = 3  # compared with a one-process run
REPORT_EVERY = 10  # steps


def new_table() -> nn.Embedding:
    """Make the table: a vector for each pair of neighbouring characters. Its gradients are sparse."""
    torch.manual_seed(1)
    return nn.Embedding(VOCABULARY**2, WIDTH, sparse=True)


def new_network() -> nn.Module:
    """Make what each trainer holds."""
    torch.manual_seed(2)
    hidden = 4 * WIDTH
    return nn.Sequential(
        nn.Flatten(), nn.Linear((CONTEXT - 1) * WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, VOCABULARY)
    )


def batch_of_step(text: Tensor, step: int, rows: int, rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """Return a trainer's share of a step: pairs of characters (rows, context - 1), and what follows them."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (rows, 1), generator=generator)[rank::size]
    text = text[starts + torch.arange(CONTEXT + 1)].long()
    return text[:, : CONTEXT - 1] * VOCABULARY + text[:, 1:CONTEXT], text[:, -1]


class Server:
    """What runs in the last process, for whoever calls it."""

    def __init__(self) -> None:
        self.table = new_table()

    def look_up(self, pairs: Tensor) -> Tensor:
        """Return the vectors of some pairs."""
        return self.table(pairs)

    def parameters(self) -> list[rpc.RRef]:
        """Return references to what is trained here."""
        return [rpc.RRef(parameter) for parameter in self.table.parameters()]

    def weights(self) -> Tensor:
        """Return the table."""
        return self.table.weight.detach()


@functools.cache
def the_server() -> Server:
    """Return the one server of this process."""
    return Server()


def train(args: Namespace, server: rpc.RRef, trainers: dist.ProcessGroup) -> int:
    """Train as one of the trainers, and report; return the exit code."""
    rank, size = dist.get_rank(trainers), dist.get_world_size(trainers)
    text, _ = read_text()
    network = paceline.replicate(new_network(), group=trainers)
    # Each trainer steps the table on its own gradient: the sum of these steps is one of their mean.
    shared = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameters(), lr=RATE / size)
    own = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in network.parameters()], lr=RATE)
    alone = one_process_run(text, args) if rank == 0 else None
    progress = Progress(0, args.steps, args.batch)
    for step in range(args.steps):
        pairs, following = batch_of_step(text, step, args.batch, rank, size)
        with autograd.context() as context:
            loss = F.cross_entropy(network(server.rpc_sync().look_up(pairs)), following)
            autograd.backward(context, [loss])  # reduces the network's gradients, in this context
            own.step(context)
            for turn in range(size):  # the server takes one step at a time, and none while others look up
                if turn == rank:
                    shared.step(context)
                dist.barrier(trainers)
        if step % REPORT_EVERY == 0 or step + 1 == args.steps:
            mean_loss = gather(loss.detach().reshape(1), trainers).mean().item()
            if rank == 0:
                progress.update(step + 1, mean_loss)
        if alone is not None and step + 1 == CHECKED_STEPS:
            difference = largest_difference(alone, [server.rpc_sync().weights(), *network.parameters()])

    hashes = [bytes(row.tolist()).hex() for row in gather(hash_of_weights(network), trainers)]
    if rank == 0:
        print_table(
            {
                "trainers": f"{size}, and a server with {VOCABULARY**2:,} vectors",
                "steps": f"{args.steps}, {args.batch} characters to predict in each",
                "loss, first to last": f"{progress.losses[0]:.3f} to {progress.losses[-1]:.3f}",
                **{f"network on rank {number}": value for number, value in enumerate(hashes)},
                "networks equal": "yes" if len(set(hashes)) == 1 else "NO",
                f"one process, {CHECKED_STEPS} steps": f"largest difference {difference:.1e}",
            }
        )
    return 0 if len(set(hashes)) == 1 else 1


def one_process_run(text: Tensor, args: Namespace) -> list[Tensor]:
    """Take the first steps on whole batches, all in this process, and return the weights."""
    model = nn.Sequential(new_table(), new_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(CHECKED_STEPS):
        pairs, following = batch_of_step(text, step, args.batch)
        F.cross_entropy(model(pairs), following).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return by how much the weights differ where they differ most."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all trainers, one row for each."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows)


def hash_of_weights(module: nn.Module) -> Tensor:
    """Return eight bytes that differ if any bit of the weights does."""
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(bytes(value.view(torch.uint8).flatten().tolist()))
    return torch.tensor(list(digest.digest()[:8]), dtype=torch.uint8)


def main() -> None:
    """Read the arguments, and train or serve, as this process's place in the world says."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256, help="characters to predict in a step, by all")
    args = parser.parse_args()
    code = 0
    with paceline.world(device="cpu") as world:
        if world.size < 3:
            parser.error("it takes two trainers and a server: paceline run -n 3 examples/parameter_server.py")
        if args.batch % (world.size - 1) or args.steps < CHECKED_STEPS:
            parser.error(f"--batch has to fit {world.size - 1} trainers, and --steps {CHECKED_STEPS} or more")
        trainers = dist.new_group(list(range(world.size - 1)))
        is_server = world.rank == world.size - 1
        if is_server:
            the_server()  # is ready before the first call
        rpc.init_rpc(f"rank{world.rank}", rank=world.rank, world_size=world.size)
        if not is_server:
            code = train(args, rpc.remote(f"rank{world.size - 1}", the_server), trainers)
        rpc.shutdown()  # the server serves until all trainers are here, too
    sys.exit(code)


if __name__ == "__main__":
    main()
