"""Mixed precision on a GPU: `PYTHONPATH=src python3 tests/gpu/precision.py`.

Casts run on a stream of their own, forward waits for each where it reads it, nobody waits on the host. What
could be a race is made one: the casts are slowed down, and a control without the wait has to come out wrong.
Needs torch and this repository, nothing else. Prints a line per check and ends with a non-zero status if
one failed.
"""

import copy
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import casts
from paceline.precision import LowPrecision, Precision

CUDA = torch.device("cuda", 0)
FULL, LOW = torch.float32, torch.bfloat16
BF16 = Precision(LOW, FULL)
A_WHILE = 100_000_000  # cycles: some 50 ms
PRODUCTS = ("gemm", "nvjet", "cutlass")  # in the names of kernels that multiply matrices
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def mlp(width: int = 256, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts).to(CUDA)


def batch(width: int = 256, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).to(CUDA)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: nn.Module, x: torch.Tensor, run: Callable[..., Any] | None = None
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = (run or model)(x)
    output = output[0] if isinstance(output, tuple) else output
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(CUDA)
    (output.float() * weights).mean().backward()
    return gradients(model)


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Return the largest distance relative to the length of what it should be."""
    assert got.keys() == want.keys()
    assert {gradient.dtype for gradient in got.values()} == {FULL}
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)


@contextmanager
def slow_casts() -> Iterator[None]:
    """Have every batch of casts start late on its stream."""
    plain = casts.Batch.fill_beside

    def slowly(self: casts.Batch, main: torch.cuda.Stream) -> None:
        torch.cuda._sleep(A_WHILE)
        plain(self, main)

    casts.Batch.fill_beside = slowly
    try:
        yield
    finally:
        casts.Batch.fill_beside = plain
        torch.cuda.synchronize()


@contextmanager
def without(owner: type, name: str) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(owner, name, plain)


# ---- right numbers ---------------------------------------------------------------------------------


def gradients_are_those_of_full_precision() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    LowPrecision(model, BF16)
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (model, reference)]
    for step in range(5):
        got, want = (train(m, batch() + step) for m in (model, reference))
        assert distance(got, want) < 0.1, distance(got, want)
        for optimizer in optimizers:
            optimizer.step()
    assert {p.dtype for p in model.parameters()} == {FULL}


def layers_of_many_kinds() -> None:
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).to(CUDA)
    image = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Tanh(), nn.Flatten(), nn.Linear(576, 8))
    image = image.to(CUDA, memory_format=torch.channels_last)
    recurrent = nn.LSTM(64, 32, num_layers=2).to(CUDA)
    pictures = torch.randn(8, 3, 8, 8, device=CUDA).to(memory_format=torch.channels_last)
    image(pictures)
    rows = torch.randn(6, 5, 64, device=CUDA)
    for model, x in ((attention, rows), (image, pictures), (recurrent, rows)):
        reference = copy.deepcopy(model)
        LowPrecision(model, BF16)
        for _ in range(2):
            got, want = train(model, x), train(reference, x)
        # Gradients that are nothing but rounding: a bias before a batch norm, and that of attention's keys.
        for grads in (got, want):
            grads.pop("0.bias", None)
            grads.pop("self_attn.in_proj_bias", None)
        assert distance(got, want) < 0.1, (type(model).__name__, distance(got, want))


def checkpointing_of_both_kinds() -> None:
    model = mlp()
    LowPrecision(model, BF16)
    plain = copy.deepcopy(model)
    LowPrecision(plain, BF16)
    want = train(plain, batch())

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = model[1](model[0](x))
        x = checkpoint(model[2:6], x, use_reentrant=reentrant)
        return model[7](model[6](x))

    model.forward = forward
    for reentrant in (False, True):
        got = train(model, batch())
        assert distance(got, want) < 1e-5, (reentrant, distance(got, want))


def replicated_over_nccl() -> None:
    model = mlp(layers=8)
    reference = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=0.25)
    LowPrecision(model, BF16)
    for step in range(3):
        assert distance(train(model, batch() + step), train(reference, batch() + step)) < 0.1


def a_step_can_be_captured_as_a_graph() -> None:
    model = mlp()
    LowPrecision(model, BF16)
    x = batch()
    with torch.no_grad():
        want = model(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model(x)
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


# ---- streams ---------------------------------------------------------------------------------------


def forward_waits_for_slow_casts() -> None:
    model = mlp()
    reference = copy.deepcopy(model)
    attention = nn.MultiheadAttention(256, 4).to(CUDA)  # reads out_proj.weight without calling out_proj
    LowPrecision(model, BF16)
    LowPrecision(attention, BF16)
    want = train(reference, batch())
    with torch.no_grad():
        want_attention = attention(batch(), batch(), batch())[0].float()
    with slow_casts():
        assert distance(train(model, batch()), want) < 0.05
        with torch.no_grad():
            got = attention(batch(), batch(), batch())[0].float()
        assert torch.equal(got, want_attention)
    # The control: without the wait the casts are read before they are written.
    garbage = [torch.full((256, 256), float("nan"), dtype=LOW, device=CUDA) for _ in range(64)]
    del garbage
    with torch.no_grad(), slow_casts(), without(casts.Batch, "_await"):
        wrong = model(batch()).float()
        torch.cuda.current_stream().synchronize()
        wrong = wrong.clone()
    assert not torch.equal(wrong.cpu(), model(batch()).detach().float().cpu())


def another_stream_waits_too() -> None:
    model = mlp()
    LowPrecision(model, BF16)
    want = model(batch()).detach()
    other = torch.cuda.Stream()
    plain = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = plain(x)
        torch.cuda.current_stream().wait_stream(other)
        return y

    model.forward = forward
    with slow_casts():
        assert torch.equal(model(batch()).detach(), want)
    del model.forward
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other), slow_casts():
        got = model(batch()).detach()
    other.synchronize()
    assert torch.equal(got, want)


def memory_of_unread_casts_is_not_reused_too_early() -> None:
    model = mlp(1024, 2)
    LowPrecision(model, BF16)
    model.forward = lambda x: x

    def overwritten() -> bool:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with slow_casts(), torch.no_grad():
            model(batch(1024))
            mine = [torch.full((1024, 1024), 7.0, dtype=LOW, device=CUDA) for _ in range(8)]
            torch.cuda.synchronize()
            return not all((tensor == 7).all() for tensor in mine)

    assert not overwritten()
    with without(casts.Forward, "close"):
        assert overwritten(), "the control should have gone wrong"


def trace_of(model: nn.Module, x: torch.Tensor) -> list[dict[str, Any]]:
    train(model, x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        torch.cuda._sleep(A_WHILE)  # so that the host is ahead of the GPU
        with torch.no_grad():
            model(x)
        train(model, x)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def casts_run_beside_the_computation() -> None:
    model = mlp(2048, 16)
    LowPrecision(model, BF16)
    events = trace_of(model, batch(2048, 4096))
    kernels = [event for event in events if event.get("cat") == "kernel"]
    products = [event for event in kernels if any(word in event["name"].lower() for word in PRODUCTS)]
    streams = {event["args"]["stream"] for event in products}
    beside = [event for event in kernels if event["args"]["stream"] not in streams]
    assert products, sorted({event["name"] for event in kernels})
    assert len(beside) >= 2 * 16, sorted((event["args"]["stream"], event["name"]) for event in kernels)
    overlapping = [product for product in products if any(overlap(product, cast) for cast in beside)]
    assert overlapping, "no cast ran while a product was computed"
    print(f"     {len(beside)} casts beside {len(products)} products; {len(overlapping)} had one beside them")


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]


def nobody_waits_on_the_host() -> None:
    model, plain = mlp(512, 8), mlp(512, 8).to(LOW)
    LowPrecision(model, BF16)
    x = batch(512)
    counts = []
    for m, given in ((model, x), (plain, x.to(LOW))):
        events = trace_of(m, given)
        counts.append(sum(event.get("name") in SYNCS for event in events))
    # The profile itself and the weights of the loss, which come from the host, are in both.
    assert counts[0] <= counts[1], counts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        output = model(x)
        output.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory_is_given_back() -> None:
    model = mlp(1024, 8)
    LowPrecision(model, BF16)
    x = batch(1024)
    train(model, x)
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        model(x)
    output = model(x)
    held = torch.cuda.memory_allocated() - before
    del output
    assert torch.cuda.memory_allocated() == before
    size = sum(p.numel() * LOW.itemsize for p in model.parameters())
    print(f"     {held / 2**20:.1f} MiB held for a backward, {size / 2**20:.1f} MiB of them casts")


def what_it_costs() -> None:
    """Print, not judge: forward and step in milliseconds, by the GPU's clock."""
    width, layers = 2048, 24
    x = batch(width, 2048)
    plain, low = mlp(width, layers).to(LOW), mlp(width, layers)
    LowPrecision(low, BF16)
    for name, model, given in (("all in bf16", plain, x.to(LOW)), ("mixed", low, x)):
        for label, run in (("forward", lambda m, y: m(y)), ("step", lambda m, y: m(y).sum().backward())):
            for _ in range(3):
                run(model, given)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                run(model, given)
            end.record()
            torch.cuda.synchronize()
            print(f"     {name}: {label} {begin.elapsed_time(end) / 10:.2f} ms")


CHECKS = [
    gradients_are_those_of_full_precision,
    layers_of_many_kinds,
    checkpointing_of_both_kinds,
    replicated_over_nccl,
    a_step_can_be_captured_as_a_graph,
    forward_waits_for_slow_casts,
    another_stream_waits_too,
    memory_of_unread_casts_is_not_reused_too_early,
    casts_run_beside_the_computation,
    nobody_waits_on_the_host,
    memory_is_given_back,
    what_it_costs,
]


def main() -> int:
    # torch warns when a gradient comes from another stream than its parameter's: none of ours may.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="RNN module weights")
    warnings.filterwarnings("ignore", message=".*[Pp]rofil.*")
    torch.cuda.set_device(CUDA)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=CUDA)
        failed = [check.__name__ for check in CHECKS if not passes(check)]
        dist.destroy_process_group()
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return bool(failed)


def passes(check: Callable[[], None]) -> bool:
    try:
        check()
        torch.cuda.synchronize()
    except Exception:
        traceback.print_exc()
        print(f"FAIL {check.__name__}", flush=True)
        return False
    print(f"ok   {check.__name__}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
