"""The check of the link and the norm of gradients on a GPU: `PYTHONPATH=src python3 tests/gpu/norms.py`.

Two ranks share the GPU over Gloo with CUDA tensors. Needs torch and this repository, nothing else. Prints a
line per check and ends with a non-zero status if one failed.
"""

import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import paceline
from paceline import preflight
from paceline.comm import GroupComm, Pending
from paceline.torch_private import store_of

CUDA = torch.device("cuda", 0)


def deep(layers: int = 100, width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(CUDA)


def trained(rank: int, layers: int = 100) -> nn.Module:
    model = paceline.replicate(deep(layers))
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        (model(torch.randn(4, 16, device=CUDA)).square().sum() * 1e6).backward()
    return model


def the_group_has_a_store(rank: int) -> None:
    assert store_of(dist.group.WORLD) is not None
    assert store_of(dist.new_group()) is not None


def cuda_tensors_are_checked_if_one_rank_has_them(rank: int) -> None:
    seen: list[str] = []
    total = GroupComm.total

    def noting(comm: GroupComm, flat: torch.Tensor) -> Pending:
        seen.append(flat.device.type)
        return total(comm, flat)

    with mock.patch.object(GroupComm, "total", noting):
        preflight.preflight(GroupComm(dist.new_group()), nn.Linear(2, 2).to(CUDA if rank else "cpu"))
    assert set(seen) == {"cpu", "cuda"}, seen


def wrong_data_on_the_gpu_is_a_fault_of_the_link(rank: int) -> None:
    total = GroupComm.total

    def garbled(comm: GroupComm, flat: torch.Tensor) -> Pending:
        result = total(comm, flat).wait()
        if flat.is_cuda and rank == 1:
            result[-1] += 1
        return Pending(result)

    text = "nothing was raised"
    with mock.patch.object(GroupComm, "total", garbled):
        try:
            paceline.replicate(deep(1), group=dist.new_group())
        except paceline.CommunicationFault as fault:
            text = str(fault)
    assert "total by gloo on cuda returned wrong data on rank 1" in text, text


def norms_are_torchs_and_nothing_is_waited_for(rank: int) -> None:
    model = trained(rank)
    for order in (2.0, 1.0, math.inf, 3.0):
        copies = [p.grad.clone() for p in model.parameters()]
        expected = torch.nn.utils.get_total_norm(copies, order)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm = paceline.replica(model).clip_grad_norm_(0.5, order)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert norm.device == CUDA
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        factor = torch.clamp(0.5 / (expected + 1e-6), max=1.0)
        for p, copy in zip(model.parameters(), copies, strict=True):
            torch.testing.assert_close(p.grad, copy * factor, rtol=1e-5, atol=1e-12)
        model.zero_grad()
        (model(torch.randn(4, 16, device=CUDA)).square().sum() * 1e6).backward()


def gradients_on_two_devices_have_one_norm(rank: int) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).to(CUDA)])
    paceline.replicate(model)
    for _ in range(2):
        model.zero_grad()
        model[1](model[0](torch.ones(1, 3)).to(CUDA)).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = paceline.replica(model).clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, expected)
    assert norm.device.type == "cpu"
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=0)


def the_host_is_done_sooner_than_with_torchs_clip(rank: int) -> None:
    model = trained(rank, 201)
    parameters = list(model.parameters())

    def median(clip: Callable[[], object]) -> float:
        seconds = []
        for _ in range(40):
            torch.cuda.synchronize()
            start = time.perf_counter()
            clip()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[20] * 1e6

    theirs = median(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0))
    ours = median(lambda: paceline.replica(model).clip_grad_norm_(1.0))
    if rank == 0:
        print(f"       {len(parameters)} tensors: torch {theirs:.0f} us of the host, here {ours:.0f} us")


CHECKS = (
    the_group_has_a_store,
    cuda_tensors_are_checked_if_one_rank_has_them,
    wrong_data_on_the_gpu_is_a_fault_of_the_link,
    norms_are_torchs_and_nothing_is_waited_for,
    gradients_on_two_devices_have_one_norm,
    the_host_is_done_sooner_than_with_torchs_clip,
)


def run_rank(rank: int, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    failed = False
    for check in CHECKS:
        try:
            check(rank)
        except Exception:
            failed = True
            traceback.print_exc()
        if rank == 0:
            print(f"{'FAILED' if failed else 'ok    '} {check.__name__.replace('_', ' ')}", flush=True)
        if failed:
            sys.exit(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
