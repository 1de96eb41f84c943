"""torch's contract on a GPU: `PYTHONPATH=src python3 tests/gpu/contract.py`.

Hooks, sparse gradients, join, SyncBatchNorm, the optimizer inside backward. Two ranks share the GPU over Gloo
with CUDA tensors; what torch refuses on Gloo (its quantisation and ZeRO hooks) runs in a world of one over
NCCL. Needs torch and this repository, nothing else. Prints a line per check and ends with a non-zero status
if one failed.
"""

import copy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import paceline
from paceline import hooks

CUDA = torch.device("cuda", 0)

Check = Callable[[int], None]


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(CUDA)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(CUDA)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model: nn.Module, rank: int, steps: int = 4) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return weights(model)


def reference(size: int, steps: int = 4) -> torch.Tensor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(model(batch(rank, step)).square().mean() for rank in range(size)) / size).backward()
        optimizer.step()
    return weights(model)


def assert_equal_everywhere(flat: torch.Tensor) -> None:
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    assert all(torch.equal(rows[0], row) for row in rows)


# ---- two ranks, Gloo --------------------------------------------------------------------------------


def our_hooks(rank: int) -> None:
    for hook, tolerance in (
        (hooks.average, 1e-5),
        (hooks.in_dtype(torch.bfloat16, hooks.average), 0.02),
        (hooks.in_dtype(torch.float64, hooks.average), 1e-5),
        (hooks.powersgd(rank=2, start_step=1), 0.2),
        (hooks.powersgd(rank=2, start_step=1, batched=True), 0.5),
        (hooks.quantized(bits=8), 0.05),
    ):
        flat = train(paceline.replicate(mlp(), hook=hook, bucket_mb=0.01), rank)
        assert_equal_everywhere(flat)
        torch.testing.assert_close(flat, reference(2), rtol=tolerance, atol=tolerance)


def sparse_gradients(rank: int) -> None:
    def bag(sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 2)).to(CUDA)

    words = torch.tensor([[1, 2, 2, 9], [2, 40, 9, 9]], device=CUDA)
    model, alone = paceline.replicate(bag(True)), bag(False)
    for _ in range(2):
        model.zero_grad()
        model(words[rank] if rank else words[0][:0]).square().sum().backward()
    (alone(words[1]).square().sum() / 2).backward()
    got = model[0].weight.grad
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), alone[0].weight.grad)
    torch.testing.assert_close(model[1].weight.grad, alone[1].weight.grad)


def join_with_uneven_batches(rank: int) -> None:
    for wrapped in (True, False):
        model = paceline.DistributedDataParallel(mlp()) if wrapped else paceline.replicate(mlp())
        with model.join() if wrapped else paceline.join(model):
            train(model, rank, steps=2 + 2 * rank)
        assert_equal_everywhere(weights(model))


def sync_batch_norm(rank: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(CUDA)

    alone = model()
    ours = paceline.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)))
    for step in range(3):
        for m, x in ((ours, batch(rank, step)), (alone, torch.cat([batch(0, step), batch(1, step)]))):
            m.zero_grad()
            m(x).square().mean().backward()
        for p, q in zip(ours.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.module[1].running_var, alone[1].running_var)


def the_optimizer_inside_backward(rank: int) -> None:
    model = paceline.replicate(mlp(), bucket_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.replica(model).step_in_backward(optimizer)
    for step in range(4):
        model(batch(rank, step)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
    assert_equal_everywhere(weights(model))
    torch.testing.assert_close(weights(model), reference(2))


def a_hook_that_raises(rank: int) -> None:
    def broken(bucket: hooks.GradBucket, comm: object) -> object:
        if rank == 1:
            raise KeyError("no such codec")
        return hooks.average(bucket, comm)

    model = paceline.replicate(mlp(), hook=broken)
    seen = ""
    try:
        model(batch(rank)).sum().backward()
    except (KeyError, paceline.PeerFailed) as error:
        seen = str(error)
    assert "no such codec" in seen


def figures(rank: int) -> None:
    model = paceline.DistributedDataParallel(mlp())
    train(model, rank)
    print(paceline.replica(model).explain()) if rank == 0 else None
    stats = paceline.replica(model).stats()
    assert stats.step == 3, stats


# ---- a world of one, NCCL ---------------------------------------------------------------------------


def torchs_quantisation_hooks(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as q

    for hook in (q.quantization_pertensor_hook, q.quantization_perchannel_hook):
        results = []
        for wrapper in (paceline.DistributedDataParallel, nn.parallel.DistributedDataParallel):
            model = wrapper(mlp())
            model.register_comm_hook(dist.group.WORLD, hook)
            results.append(train(model, 0))
        torch.testing.assert_close(*results, rtol=0.05, atol=1e-3)  # blocks follow the order in the bucket


def torchs_sixteen_bit_and_powersgd_hooks(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as d
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as p

    def power() -> tuple[object, object]:
        return p.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), p.powerSGD_hook

    for make in (lambda: (None, d.bf16_compress_hook), lambda: (None, d.fp16_compress_hook), power):
        results = []
        for wrapper in (paceline.DistributedDataParallel, nn.parallel.DistributedDataParallel):
            model = wrapper(mlp())
            model.register_comm_hook(*make())
            results.append(train(model, 0))
        # torch keys PowerSGD's state by bucket, ours has one bucket as torch has here.
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def torchs_zero_hook(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as d
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def run(wrapper: Callable[..., nn.Module]) -> tuple[list[bool], torch.Tensor]:
        model = wrapper(mlp(), static_graph=True, gradient_as_bucket_view=True)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        model.register_comm_hook(None, hook_with_zero_step(d.allreduce_hook, model, zero))
        moved = []
        for step in range(6):
            before = weights(model)
            model.zero_grad()
            model(batch(0, step)).square().mean().backward()
            torch.cuda.synchronize()
            moved.append(not torch.equal(before, weights(model)))
        return moved, weights(model)

    moved, got = run(paceline.DistributedDataParallel)
    moved_by_torch, expected = run(nn.parallel.DistributedDataParallel)
    assert moved == moved_by_torch, (moved, moved_by_torch)  # it learns the buckets in the first backwards
    assert moved[-1]
    torch.testing.assert_close(got, expected)


TWO = (
    our_hooks,
    sparse_gradients,
    join_with_uneven_batches,
    sync_batch_norm,
    the_optimizer_inside_backward,
    figures,
    a_hook_that_raises,  # last: the ranks' collectives do not match afterwards
)
ONE = (torchs_quantisation_hooks, torchs_sixteen_bit_and_powersgd_hooks, torchs_zero_hook)


def run_rank(rank: int, store: str, size: int, backend: str, checks: Sequence[Check]) -> None:
    warnings.simplefilter("ignore")
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    failed = 0
    for check in checks:
        try:
            check(rank)
        except Exception:
            failed += 1
            traceback.print_exc()
        if rank == 0:
            print(f"{'FAILED' if failed else 'ok    '} {check.__name__.replace('_', ' ')}", flush=True)
        if failed:
            sys.exit(1)
    if size == 1:
        dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(f"{folder}/two", 2, "gloo", TWO), nprocs=2)
        mp.spawn(run_rank, args=(f"{folder}/one", 1, "nccl", ONE), nprocs=1)


if __name__ == "__main__":
    main()
