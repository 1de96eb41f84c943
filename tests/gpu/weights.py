"""Weights on a GPU: `PYTHONPATH=src python3 tests/gpu/weights.py`.

A world of one over NCCL, where gradient hooks run on the device thread of autograd. Prints a line per check
and ends with a non-zero status if one failed.
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline

CUDA = torch.device("cuda", 0)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4)).to(CUDA)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def accumulated_weights_give_the_whole_batch() -> None:
    whole = torch.randn(12, 6, device=CUDA)
    alone, net = model(), paceline.replicate(model())
    loss_of(alone, whole).backward()
    pieces = whole.split([5, 1, 4, 2])
    with paceline.accumulate(net, len(pieces)):
        for piece in pieces:
            with paceline.weight(net, len(piece)):
                loss_of(net, piece).backward()
    for got, want in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)


def another_model_in_the_same_backward_is_not_scaled() -> None:
    net, other = paceline.replicate(model()), model()
    plain, x = copy.deepcopy(other), torch.randn(3, 6, device=CUDA)
    for sync, weight in ((False, 5), (True, 1)):
        loss_of(plain, x).backward()
        with paceline.no_sync(net, not sync), paceline.weight(net, weight):
            (loss_of(net, x) + loss_of(other, x)).backward()
    for got, want in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def a_weight_of_zero_counts_for_nothing() -> None:
    net = paceline.replicate(model())
    with paceline.weight(net, 0):
        loss_of(net, torch.full((1, 6), float("nan"), device=CUDA)).backward()
    assert all(parameter.grad is None for parameter in net.parameters())


CHECKS = (
    accumulated_weights_give_the_whole_batch,
    another_model_in_the_same_backward_is_not_scaled,
    a_weight_of_zero_counts_for_nothing,
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        torch.cuda.set_device(CUDA)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CUDA)
        failed = 0
        for check in CHECKS:
            try:
                check()
                print("ok    ", check.__name__.replace("_", " "), flush=True)
            except Exception as error:
                failed += 1
                print("FAILED", check.__name__.replace("_", " "), error, flush=True)
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main())
