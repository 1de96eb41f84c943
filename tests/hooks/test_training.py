"""The hooks in training: they reach the loss of the plain mean, and survive what happens to a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.comm import comm_over
from paceline.hooks import Hook, average, in_dtype, local_sgd, noop, powersgd, quantized
from paceline.testing import ranks

HOOKS: dict[str, Callable[[], Hook]] = {
    "bf16": lambda: in_dtype(torch.bfloat16, average),
    "fp16": lambda: in_dtype(torch.float16, average),
    "powersgd": lambda: powersgd(rank=2, start_step=5),
    "powersgd batched": lambda: powersgd(rank=4, start_step=5, batched=True),
    "powersgd in bf16": lambda: in_dtype(torch.bfloat16, powersgd(rank=2, start_step=5)),
    "powersgd over bf16": lambda: powersgd(rank=2, start_step=5, inner=in_dtype(torch.bfloat16)),
    "quantized 8": lambda: quantized(bits=8),
    "quantized 4": lambda: quantized(bits=4),
    "local sgd": lambda: local_sgd(every=4),
}
EXACT = [name for name in HOOKS if name != "local sgd"]  # gradients, and so weights, are equal on all ranks


def classifier() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 5))


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 20, generator=generator)
    return x, (x @ torch.randn(20, 5, generator=torch.Generator().manual_seed(99))).argmax(dim=1)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def is_equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    rows = comm_over(None).gather(tensor).wait()
    return all(torch.equal(rows[0], row) for row in rows)


def run(model: nn.Module, rank: int, steps: int, lr: float = 0.3, start: int = 0) -> None:
    x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for count in range(start, start + steps):
        rows = torch.randperm(512, generator=torch.Generator().manual_seed(count)).chunk(8)[rank]
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model: nn.Module) -> float:
    x, y = problem()
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


@ranks(2)
@pytest.mark.parametrize("name", HOOKS)
def test_training_gets_where_the_plain_mean_gets(rank: int, name: str) -> None:
    plain = paceline.replicate(classifier(), bucket_mb=0.01)
    run(plain, rank, 120)
    model = paceline.replicate(classifier(), bucket_mb=0.01, hook=HOOKS[name]())
    before = loss_of(model)

    run(model, rank, 120)

    assert loss_of(plain) < 0.5 * before
    assert loss_of(model) < 1.15 * loss_of(plain)
    assert is_equal_on_all_ranks(flat(model))


@ranks(2)
def test_sending_nothing_does_not_train_as_one(rank: int) -> None:
    model = paceline.replicate(classifier(), hook=noop)

    run(model, rank, 2)

    assert not is_equal_on_all_ranks(flat(model))


@ranks(2, timeout=100)
def test_powersgd_starts_20_times_of_20(rank: int) -> None:
    for start in range(20):
        hook = powersgd(rank=1 + start % 3, start_step=start % 2, batched=start % 4 == 3)
        model = paceline.replicate(classifier(), bucket_mb=0.004, hook=hook)
        assert len(paceline.replica(model).plan.buckets) > 2

        run(model, rank, 4)

        assert hook.step == 4
        assert is_equal_on_all_ranks(flat(model))


@ranks(2)
@pytest.mark.parametrize("name", EXACT)
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(rank: int, name: str) -> None:
    hook = HOOKS[name]()
    model = paceline.replicate(classifier(), hook=hook)
    run(model, rank, 8)
    saved = {n: t.clone() for n, t in model.state_dict().items()}
    state = hook.state_dict() if hasattr(hook, "state_dict") else None
    run(model, rank, 5, start=8)

    again, resumed = classifier(), HOOKS[name]()
    again.load_state_dict(saved)
    if state is not None:
        resumed.load_state_dict(state)
    paceline.replicate(again, hook=resumed)
    run(again, rank, 5, start=8)

    assert torch.equal(flat(again), flat(model))


class Shuffled(nn.Module):
    """Gradients arrive in another order than the plan guesses at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(6))
        self.head = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place in (3, 0, 5, 2, 4, 1):
            x = torch.tanh(self.layers[place](x))
        return self.head(x)


RESUMED: dict[str, Callable[[], Any]] = {
    "quantized": lambda: quantized(bits=8, block=64),
    "powersgd": lambda: powersgd(rank=2, start_step=1, min_compression=1),
    "powersgd batched": lambda: powersgd(rank=2, start_step=1, batched=True),
    "quantized in bf16": lambda: in_dtype(torch.bfloat16, quantized(bits=8, block=64)),
}


@ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_takes_up_the_plan_that_the_saved_one_had_learned(
    rank: int, name: str, when: str, tmp_path: Path
) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, hook = Shuffled(), RESUMED[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, hook

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, counts: range) -> None:
        for count in counts:
            x, y = problem(10 * count + rank)
            F.cross_entropy(model(x[:32]), y[:32]).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer, hook = start()
    paceline.replicate(model, bucket_mb=0.004, first_bucket_mb=0.002, hook=hook)
    guessed = paceline.replica(model).plan
    steps(model, optimizer, range(3))
    learned = paceline.replica(model).plan
    assert learned.digest != guessed.digest
    assert len(learned.buckets) > 2
    torch.save([part.state_dict() for part in (model, optimizer, hook)], tmp_path / str(rank))
    steps(model, optimizer, range(3, 6))

    again, optimizer, resumed = start()
    states = torch.load(tmp_path / str(rank), weights_only=True)
    if when == "after":
        paceline.replicate(again, bucket_mb=0.004, first_bucket_mb=0.002, hook=resumed)
    for part, state in zip((again, optimizer, resumed), states, strict=True):
        part.load_state_dict(state)
    if when == "before":
        paceline.replicate(again, bucket_mb=0.004, first_bucket_mb=0.002, hook=resumed)
    steps(again, optimizer, range(3, 6))

    assert torch.equal(flat(again), flat(model))
    assert paceline.replica(again).plan.digest == paceline.replica(model).plan.digest
    assert resumed.state_dict()["planned"] == hook.state_dict()["planned"]


@ranks(2)
@pytest.mark.parametrize("name", EXACT)
def test_a_step_that_fails_on_one_rank_leaves_the_ranks_equal(rank: int, name: str) -> None:
    class Trouble(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    model = paceline.replicate(classifier(), bucket_mb=0.004, hook=HOOKS[name]())
    run(model, rank, 7)
    before = flat(model)

    hidden = model[1](model[0](problem()[0]))
    hidden = Trouble.apply(hidden) if rank == 1 else hidden
    with pytest.raises(ValueError if rank == 1 else paceline.PeerFailed, match="boom"):
        model[4](model[3](model[2](hidden))).sum().backward()
    assert torch.equal(flat(model), before)
    run(model, rank, 5, start=7)

    assert is_equal_on_all_ranks(flat(model))
    assert flat(model).isfinite().all()


@ranks(2)
def test_hooks_can_be_swapped_between_steps(rank: int) -> None:
    model = paceline.replicate(classifier(), bucket_mb=0.01)
    start = 0
    for name in EXACT:
        paceline.replica(model).set_hook(HOOKS[name]())
        run(model, rank, 8, start=start)
        start += 8
        assert is_equal_on_all_ranks(flat(model))

    assert loss_of(model) < loss_of(classifier())


@ranks(2)
@pytest.mark.parametrize("name", EXACT)
def test_accumulated_gradients_go_through_the_hook_once(rank: int, name: str) -> None:
    model = paceline.replicate(classifier(), hook=HOOKS[name]())
    x, y = problem(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        with paceline.no_sync(model):
            F.cross_entropy(model(x[:256]), y[:256]).backward()
        F.cross_entropy(model(x[256:]), y[256:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    hook = paceline.replica(model).hook
    hook = getattr(hook, "inner", hook)
    assert getattr(hook, "step", 8) == 8
    assert is_equal_on_all_ranks(flat(model))


@ranks(2)
@pytest.mark.parametrize("name", EXACT)
def test_a_parameter_that_one_rank_does_not_use_is_reduced_too(rank: int, name: str) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(20, 40), nn.Linear(40, 40)

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            x = self.always(x)
            return self.sometimes(x) if use else x

    torch.manual_seed(0)
    model = paceline.replicate(Half(), hook=HOOKS[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for count in range(8):
        model(problem()[0][:32], use=count % 2 == rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert is_equal_on_all_ranks(flat(model))


@ranks(2)
@pytest.mark.parametrize("name", ["powersgd", "quantized 8", "powersgd in bf16", "local sgd"])
def test_steps_are_counted_also_where_buckets_are_skipped(rank: int, name: str) -> None:
    heads = nn.ModuleList(nn.Linear(20, 5) for _ in range(3))
    model = paceline.DistributedDataParallel(heads, bucket_cap_mb=1e-4, skip_all_reduce_unused_params=True)
    hook = HOOKS[name]()
    paceline.replica(heads).set_hook(hook)
    remembering = getattr(hook, "inner", hook)

    counted = []
    for place in (2, 1, 0, 1):
        heads[place](problem()[0][:8]).sum().backward()
        model.zero_grad()
        counted.append(remembering.step)

    assert counted == [1, 2, 3, 4]


@ranks(2)
def test_ranks_with_different_settings_are_told_so(rank: int) -> None:
    with pytest.raises(paceline.RanksDisagree, match=r"quantized\(bits=(4|8)"):
        paceline.replicate(classifier(), hook=quantized(bits=4 if rank else 8))
