"""Whether gradients on a GPU are right: layouts, precisions, scaling, and two ranks that share the device."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline
from benchmarks.cycles import exactly
from benchmarks.gpu_tasks import Place, Task, gpt, many, resnet50
from benchmarks.models import Chain, resnet50_model
from benchmarks.ranks import say
from benchmarks.table import Row

SCALED_STEPS = 8


def check_gradients(place: Place) -> list[Row]:
    """Check that gradients are the plain model's, in the layouts and precisions that a GPU brings."""
    torch.backends.cudnn.deterministic = True
    checks: dict[str, Callable[[Place], float]] = {
        "gradients of the GPT equal bare": _check_gpt,
        "gradients of ResNet-50 equal bare": _check_resnet,
        "channels_last ResNet-50: values and strides equal bare": _check_channels_last,
        "bf16 parameters: gradients equal bare": _check_bf16,
        "GradScaler, fp16, clipping: parameters equal bare": _check_scaler,
        "two ranks on one device over Gloo: gradients of the whole batch": _check_two_ranks,
    }
    return [_check_row(what, check, place) for what, check in checks.items()]


def _check_row(what: str, check: Callable[[Place], float], place: Place) -> Row:
    """Run a check, which returns the largest relative difference or raises. A failure makes a row as well."""
    try:
        difference, note = check(place), "largest difference, relative to the largest value"
    except Exception as error:
        difference, note = float("inf"), f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        say(f"    FAILED {what}: {note}")
    return Row(0, what, exactly(difference), "<= 0.001", note)


def _check_gpt(place: Place) -> float:
    return _difference(gpt(Place(place.device, tiny=True)), gpt(Place(place.device, tiny=True)))


def _check_resnet(place: Place) -> float:
    return _difference(resnet50(place), resnet50(place))


def _check_channels_last(place: Place) -> float:
    plain, ours = resnet50(place), resnet50(place)
    for task in (plain, ours):
        task.model.to(memory_format=torch.channels_last)
    return _difference(plain, ours)


def _check_bf16(place: Place) -> float:
    tasks = [many(place) for _ in range(2)]
    for task in tasks:
        task.model.to(torch.bfloat16)
        batch = torch.randn(8, 64, device=place.device, generator=_generator(place)).to(torch.bfloat16)
        task.loss = lambda forward, batch=batch: forward(batch).square().mean()
    return _difference(*tasks)


def _generator(place: Place) -> torch.Generator:
    return torch.Generator(place.device).manual_seed(1)


def _difference(plain: Task, ours: Task) -> float:
    """Run two steps of each and compare the second's gradients: values, dtypes, strides."""
    paceline.replicate(ours.model)
    for task in (plain, ours):
        task.loss(task.model).backward()
        task.model.zero_grad()
        task.loss(task.model).backward()
    worst = 0.0
    for (name, a), b in zip(plain.model.named_parameters(), ours.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None, f"{name} has no gradient"
        assert b.grad.dtype == a.grad.dtype, f"{name}: {b.grad.dtype} gradient"
        assert _alike(b.grad, b), f"{name}: strides {b.grad.stride()}, parameter {b.stride()}"
        worst = max(worst, _relative(b.grad, a.grad))
    return worst


def _alike(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether two tensors lie in memory the same way; a dimension of one element may have any stride."""
    triples = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in triples)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = b.float().abs().max().clamp_min(1e-12)
    return ((a.float() - b.float()).abs().max() / scale).item()


def _check_scaler(place: Place) -> float:
    models = []
    for replicated in (False, True):
        task = many(place)
        if replicated:
            paceline.replicate(task.model)
        skipped = _train_scaled(place, task)
        assert 0 < skipped < SCALED_STEPS, f"{skipped} of {SCALED_STEPS} steps were skipped: nothing compared"
        models.append(task.model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return max(_relative(b, a) for a, b in pairs)


def _train_scaled(place: Place, task: Task) -> int:
    """Train, and return how many steps the scaler skipped."""
    skipped = 0
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
    # The first scale overflows fp16, so that skipped steps are in the comparison.
    scaler = torch.amp.GradScaler(place.device.type, init_scale=2.0**40, backoff_factor=2.0**-8)
    for _ in range(SCALED_STEPS):
        with torch.autocast(place.device.type, torch.float16):
            loss = task.loss(task.model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    return skipped


def _check_two_ranks(place: Place) -> float:
    # Spawned, not forked: this process has CUDA open.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, mp_context=context) as pool:
        store = str(Path(folder, "store"))
        futures = [pool.submit(_on_rank, rank, store, place) for rank in range(2)]
        differences, digests = zip(*(future.result(timeout=180) for future in futures), strict=True)
    assert digests[0] == digests[1], "the ranks ended with different weights or buffers"
    return max(differences)


def _on_rank(rank: int, store: str, place: Place) -> tuple[float, float]:
    """Compare the halves of a batch with the whole; return the difference, and a digest after training."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        reference = Chain(20, 64).to(place.device)
        batch = torch.randn(8, 64, device=place.device, generator=_generator(place))
        reference(batch).square().mean().backward()
        torch.manual_seed(rank)  # a different start on each rank: rank 0's has to win
        model = paceline.replicate(Chain(20, 64).to(place.device), bucket_mb=0.05)
        model(batch.chunk(2)[rank]).square().mean().backward()
        pairs = zip(reference.parameters(), model.parameters(), strict=True)
        return max(_relative(b.grad, a.grad) for a, b in pairs), _digest_after_training(rank, place)
    finally:
        dist.destroy_process_group()


def _digest_after_training(rank: int, place: Place) -> float:
    torch.manual_seed(rank)
    model = paceline.replicate(resnet50_model((1, 1)).to(place.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 3, 32, 32, device=place.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(tensor.double().sum().item() for tensor in model.state_dict().values())
