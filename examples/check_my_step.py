"""Check a training step for 256 ranks before any of them is paid for: one process, no GPU, seconds.

python examples/check_my_step.py           prints what every rank would send
python examples/check_my_step.py --bug     one rank logs with a collective of its own
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import paceline


def train(steps: int, *, has_bug: bool) -> None:
    """Train as on a cluster: what is written here is what runs there."""
    world = paceline.world()
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(world.device)
    paceline.replicate(model, bucket_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = torch.randn(32, 256, device=world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0 or not has_bug:
            dist.all_reduce(loss.detach())  # with the bug, rank 0 waits here for ever
        if world.rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")


def main() -> None:
    """Check, and show what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bug", action="store_true")
    arguments = parser.parse_args()
    try:
        print(paceline.check(lambda: train(steps=2, has_bug=arguments.bug), ranks=256))
    except paceline.RanksDisagree as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
