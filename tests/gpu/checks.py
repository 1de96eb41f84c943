"""The finite check and the audit on a GPU: `PYTHONPATH=src:. python3 tests/gpu/checks.py`.

Two and three ranks share the GPU over Gloo with CUDA tensors; that the host never waits for the GPU is shown
in a world of one over NCCL. Needs torch and this repository, nothing else. Prints a line per check, the costs
at the end, and ends with a non-zero status if one failed.
"""

import contextlib
import logging
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import paceline
import paceline.finite
from paceline.auditing import held_by
from paceline.fingerprint import Prints, fingerprint, read_each

CUDA = torch.device("cuda", 0)
NAN, INF = float("nan"), float("inf")

Check = Callable[[int], None]


class Poison(torch.autograd.Function):
    """Pass on what comes in, and put one number into the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: float) -> torch.Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        gradient.view(-1)[0] = ctx.number
        return gradient, None


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).to(
        CUDA, dtype
    )


def batch(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(CUDA, dtype)


def loss_of(model: nn.Sequential, x: torch.Tensor, number: float | None = None) -> torch.Tensor:
    """Compute a loss; the first layer's gradient gets a number, if one is given."""
    y = model[0](x)
    y = y if number is None else Poison.apply(y, number)
    for layer in model[1:]:
        y = layer(y)
    return y.float().square().mean()


def gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


@contextlib.contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[list[Any]]:
    """Run what has to raise on every rank, with one text that holds these words."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    text = str(caught[0]) if caught else "nothing was raised"
    texts = gather(text)
    assert len(set(texts)) == 1, texts
    assert caught, text
    assert all(word in text for word in words), text


def flip(tensor: torch.Tensor, bit: int = 22) -> None:
    tensor.data.view(torch.int32).view(-1)[0] ^= 1 << bit


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def assert_equal_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = held_by(model.named_parameters(), [optimizer])
    prints = read_each([value for value in held.values() if isinstance(value, torch.Tensor)])
    assert all(other == prints for other in gather(prints))


# ---- several ranks, Gloo ----------------------------------------------------------------------------


def not_finite_is_named_on_every_rank(rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for number, kind in ((NAN, "NaN"), (INF, "Inf")):
            model = paceline.replicate(mlp(dtype), check_finite=True, bucket_mb=0.01)
            for step in range(2):
                loss_of(model, batch(rank, step, dtype)).backward()
            model.zero_grad()
            with raises(
                paceline.NotFinite, "step 2: the gradient of 0.", f"holds {kind} on rank 1"
            ) as caught:
                loss_of(model, batch(rank, 2, dtype), number if rank == 1 else None).backward()
            assert caught[0].rank == 1, caught
            assert set(caught[0].found[1]) == {"0.weight", "0.bias"}, caught[0].found
            assert all(p.grad is None for p in model.parameters())
            loss_of(model, batch(rank, 3, dtype)).backward()
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def not_finite_is_skipped_on_every_rank(rank: int) -> None:
    model = paceline.replicate(mlp(), check_finite="skip")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, batch(rank), NAN if rank == 1 else None).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert paceline.replica(model).stats().skipped_steps == 1
    train(model, optimizer, rank, 2)
    assert_equal_everywhere(model, optimizer)


def sparse_gradients_are_looked_at(rank: int) -> None:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)).to(CUDA)
    paceline.replicate(model, check_finite=True)
    words = torch.tensor([1, 2, 2, 9], device=CUDA)
    with raises(paceline.NotFinite, "the gradient of 0.weight holds NaN on rank 1"):
        loss_of(model, words, NAN if rank == 1 else None).backward()
    loss_of(model, words).backward()


def finite_numbers_with_a_large_sum_pass(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 1, bias=False).to(CUDA), check_finite=True)
    model(torch.full((1, 4), 3e38, device=CUDA)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((1, 4), 3e38, device=CUDA))


def fingerprints_are_those_of_the_cpu(rank: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)
    for dtype in dtypes:
        tensor = (torch.arange(105) % 2).to(dtype).view(3, 5, 7)
        for view in (tensor, tensor.transpose(0, 2), tensor.view(-1)[1:], tensor[:0]):
            assert int(fingerprint(view)) == int(fingerprint(view.to(CUDA)))
    tensors = [torch.randn(size, device=CUDA) for size in (3, 5, 100_000, 100_001)]
    assert Prints(tensors).read() == Prints([tensor.cpu() for tensor in tensors]).read()


def a_flipped_bit_is_found(rank: int) -> None:
    for fused in (False, True):
        model = paceline.replicate(mlp())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        paceline.audit(model, every=3)
        train(model, optimizer, rank, 4)
        if rank == 1:
            flip(optimizer.state[model[2].weight]["exp_avg"])
        # Seen at step 6, told at a later opening.
        with raises(paceline.RanksDisagree, "2.weight"):
            for step in range(8):
                train(model, optimizer, rank, 1)
                torch.cuda.synchronize()
                assert step < 6
        paceline.audit(model, every=0)


def a_flipped_bit_is_healed(rank: int) -> None:
    model = paceline.replicate(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    paceline.audit(model, every=2, heal=True)
    train(model, optimizer, rank, 4)
    if rank == 1:
        flip(model[0].weight)
        flip(optimizer.state[model[2].bias]["exp_avg_sq"])
    for _ in range(6):
        train(model, optimizer, rank, 1)
        torch.cuda.synchronize()
    assert_equal_everywhere(model, optimizer)
    assert paceline.replica(model).stats().skipped_steps == 1


# ---- a world of one, NCCL ---------------------------------------------------------------------------


def the_host_never_waits_for_an_audit(rank: int) -> None:
    model = paceline.replicate(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    paceline.audit(model, every=1)
    x = batch(rank)
    loss_of(model, x).backward()
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            loss_of(model, x).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def the_host_waits_once_for_the_finite_check(rank: int) -> None:
    model = paceline.replicate(mlp(), check_finite=True, bucket_mb=0.01)
    x = batch(rank)
    for _ in range(3):
        loss_of(model, x).backward()
    assert len(paceline.replica(model).plan.buckets) > 1
    looks = []
    wait = paceline.finite._Verdicts.wait

    def spy(verdicts: Any) -> Any:
        looks.append(1)
        torch.cuda.set_sync_debug_mode("default")
        return wait(verdicts)

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # which does not see an event that is waited for
    try:
        with mock.patch("paceline.finite._Verdicts.wait", spy):
            loss_of(model, x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert looks == [1], looks


def what_they_cost(rank: int) -> None:
    """Print the ratio of steps with and without, in turns: 100 M parameters, and 1,000 small tensors."""
    for name, make in (("100 M parameters", _wide), ("1,000 small tensors", _many)):
        model, x = make()
        paceline.replicate(model)
        replica = paceline.replica(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
        plain = _ratios(model, x, optimizer, lambda on: None)
        finite = _ratios(model, x, optimizer, replica.check_finite)
        audit = _ratios(model, x, optimizer, lambda on: replica.audit(50 if on else 0))  # noqa: B023
        print(f"{name}: nothing {plain}, check_finite {finite}, audit(every=50) {audit}", flush=True)


def _wide() -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(24) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    return nn.Sequential(*layers).to(CUDA), torch.randn(4096, 2048, device=CUDA)


def _many() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(500))).to(CUDA), torch.randn(64, 64, device=CUDA)


def _ratios(
    model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, switch: Callable[[bool], None]
) -> str:
    def block() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 50

    block()
    ratios, seconds = [], []
    for _ in range(4):
        times = {}
        for on in (False, True):
            switch(on)
            times[on] = block()
        ratios.append(times[True] / times[False])
        seconds.append(times[False])
    switch(False)
    return f"x{statistics.median(ratios):.4f} of {statistics.median(seconds) * 1e3:.2f} ms"


TWO = (
    fingerprints_are_those_of_the_cpu,
    not_finite_is_named_on_every_rank,
    not_finite_is_skipped_on_every_rank,
    sparse_gradients_are_looked_at,
    finite_numbers_with_a_large_sum_pass,
    a_flipped_bit_is_found,
)
THREE = (a_flipped_bit_is_found, a_flipped_bit_is_healed)
ONE = (the_host_never_waits_for_an_audit, the_host_waits_once_for_the_finite_check, what_they_cost)


def run_rank(rank: int, store: str, size: int, backend: str, checks: Sequence[Check]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("paceline").setLevel(logging.ERROR)
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    for check in checks:
        failed = False
        try:
            check(rank)
        except Exception:
            failed = True
            traceback.print_exc()
        if rank == 0 or failed:
            print(f"{'FAILED' if failed else 'ok    '} {check.__name__.replace('_', ' ')}", flush=True)
        if failed:
            sys.exit(1)
    if size == 1:
        dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for size, backend, checks in ((2, "gloo", TWO), (3, "gloo", THREE), (1, "nccl", ONE)):
            mp.spawn(run_rank, args=(f"{folder}/{size}", size, backend, checks), nprocs=size)


if __name__ == "__main__":
    main()
