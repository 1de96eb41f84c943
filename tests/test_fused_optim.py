"""The optimizer inside backward: the same weights, and gradients that never exist all at once."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.fused_optim import StepInBackward
from paceline.testing import ranks

with warnings.catch_warnings():  # torch's own import warns of torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import _apply_optimizer_in_backward

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def net(width: int = 8, depth: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def share(rank: int, step: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = 5) -> None:
    for step in range(steps):
        model(share(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("per", ["bucket", "parameter"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_the_weights_are_those_of_a_step_after_backward(rank: int, name: str, per: str) -> None:
    inside, after = (paceline.replicate(net(), bucket_mb=1e-4) for _ in range(2))
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (inside, after)]
    paceline.replica(inside).step_in_backward(optimizers[0], per=per)

    train(inside, optimizers[0], rank)
    train(after, optimizers[1], rank)

    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert len(optimizers[0].state_dict()["state"]) == len(optimizers[1].state_dict()["state"])


@ranks(2)
def test_a_scheduler_and_accumulation_work_as_before(rank: int) -> None:
    inside, after = (paceline.replicate(net(), bucket_mb=1e-4) for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (inside, after)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    paceline.replica(inside).step_in_backward(optimizers[0])

    for model, optimizer, schedule in zip((inside, after), optimizers, schedules, strict=True):
        for step in range(3):
            with paceline.no_sync(model):
                model(share(rank, 100 + step)).square().mean().backward()
            model(share(rank, step)).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@ranks(2)
def test_peak_gradient_memory_is_about_one_bucket(rank: int) -> None:
    width, depth = 64, 24
    bucket = width * width + width  # floats: one layer a bucket
    cap = bucket * 4 / 2**20
    model = paceline.replicate(net(width, depth), bucket_mb=cap, first_bucket_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    paceline.replica(model).step_in_backward(optimizer)
    seen: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: seen.append(alive(model)))

    for step in range(3):
        seen.clear()
        model(share(rank, step, width)).square().mean().backward()

    # The bucket that is on its way and the one that fills; everything before has been stepped and freed.
    assert max(seen) <= 3 * bucket
    assert depth * bucket > 20 * bucket
    assert alive(model) == 0


def alive(model: nn.Module) -> int:
    """Count the floats of memory that gradients hold at this moment, whole buckets where they are views."""
    memory = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return sum({storage.data_ptr(): storage.nbytes() // 4 for storage in memory}.values())


@ranks(2)
def test_a_parameter_that_no_rank_uses_is_not_stepped(rank: int) -> None:
    model = net()
    model.spare = nn.Linear(8, 8)
    before = model.spare.weight.detach().clone()
    paceline.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    paceline.replica(model).step_in_backward(optimizer)

    for step in range(3):
        nn.Sequential.forward(model[:4], share(rank, step)).square().mean().backward()

    assert torch.equal(model.spare.weight, before)
    assert model.spare.weight.grad is None


@ranks(2)
def test_a_parameter_that_one_rank_uses_is_stepped_on_all(rank: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    paceline.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.replica(model).step_in_backward(optimizer)
    before = model["b"].weight.detach().clone()

    for _ in range(3):
        x = model["a"](torch.ones(2, 4))
        (model["b"](x) if rank == 0 else x).sum().backward()

    everyone = [torch.empty_like(before) for _ in range(2)]
    dist.all_gather(everyone, model["b"].weight.detach())
    assert torch.equal(everyone[0], everyone[1])
    assert not torch.equal(before, everyone[0])


@ranks(2)
def test_a_rank_that_fails_leaves_equal_weights_and_a_message_that_says_so(rank: int) -> None:
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("boom")

    model = paceline.replicate(net(), bucket_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.replica(model).step_in_backward(optimizer)
    hidden = model[:2](share(rank))
    loss = model[2:](Boom.apply(hidden) if rank == 1 else hidden).square().mean()

    with pytest.raises((ValueError, paceline.PeerFailed)) as caught:
        loss.backward()

    if rank == 0:
        assert "the weights are those of a step that lacks gradients" in str(caught.value)
    for p in model.parameters():
        everyone = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(everyone, p.detach())
        assert torch.equal(everyone[0], everyone[1])
    model(share(rank)).square().mean().backward()


@ranks(2)
def test_optimizers_that_torch_put_into_backward_wait_for_the_reduction(rank: int) -> None:
    inside, after = net(), net()
    _apply_optimizer_in_backward(torch.optim.SGD, inside.parameters(), {"lr": 0.1})
    inside = paceline.DistributedDataParallel(inside)
    after = paceline.DistributedDataParallel(after)
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)

    for step in range(3):
        inside(share(rank, step)).square().mean().backward()
    train(after, optimizer, rank, steps=3)

    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert p.grad is None


@ranks(2)
def test_a_fused_optimizer_of_some_parameters_leaves_the_others_gradients(rank: int) -> None:
    model = paceline.DistributedDataParallel(net())
    chosen = [model.module[0].weight]
    before = [p.detach().clone() for p in model.parameters()]
    model._register_fused_optim(torch.optim.SGD, 0.1, optim_params=chosen)

    model(share(rank)).square().mean().backward()

    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old) == (p is not chosen[0])
        assert (p.grad is None) == (p is chosen[0])


# ---- bad input --------------------------------------------------------------------------------------


@ranks(2)
def test_asking_for_norm_clipping_is_refused(rank: int) -> None:
    model = paceline.replicate(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"max_norm=1.0: clipping by norm needs all gradients at once"):
        paceline.replica(model).step_in_backward(optimizer, max_norm=1.0)


@ranks(2)
def test_a_hook_that_may_fail_and_an_optimizer_in_backward_exclude_each_other(rank: int) -> None:
    def mine(bucket, comm):
        return comm.average(bucket.flat)

    model = paceline.replicate(net(), hook=mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="mine and an optimizer inside backward exclude each other"):
        paceline.replica(model).step_in_backward(optimizer)


def test_bad_arguments() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got int"):
        StepInBackward(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='per has to be "bucket" or "parameter", got \'layer\''):
        StepInBackward(torch.optim.SGD(parameters), "layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS needs all gradients at once"):
        StepInBackward(torch.optim.LBFGS(parameters))


def test_a_process_alone_steps_inside_backward_as_many_do() -> None:
    inside, after = paceline.replicate(net()), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (inside, after)]
    paceline.replica(inside).step_in_backward(optimizers[0])

    for step in range(3):
        with paceline.no_sync(inside):
            inside(share(0, 100 + step)).square().mean().backward()
        inside(share(0, step)).square().mean().backward()
        assert all(p.grad is None for p in inside.parameters())
        after.zero_grad()
        for number in (100 + step, step):
            after(share(0, number)).square().mean().backward()
        optimizers[1].step()

    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@ranks(2)
def test_a_second_optimizer_is_refused(rank: int) -> None:
    model = paceline.DistributedDataParallel(net())
    model._register_fused_optim(torch.optim.SGD, 0.1)

    with pytest.raises(ValueError, match="an optimizer steps inside this model's backward already"):
        model._register_fused_optim(torch.optim.SGD, 0.1)


@ranks(2)
def test_clipping_by_norm_after_backward_is_refused(rank: int) -> None:
    model = paceline.replicate(net())
    paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    model(share(rank)).square().mean().backward()

    with pytest.raises(ValueError, match=r"clip_grad_norm_\(\) needs all gradients at once"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(net().parameters(), 1.0)  # somebody else's


@ranks(2)
def test_unused_error_and_an_optimizer_in_backward_exclude_each_other(rank: int) -> None:
    model = paceline.replicate(net(), unused="error")

    with pytest.raises(ValueError, match="inside backward exclude each other: parameters are stepped"):
        paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("buckets", [1e-4, 25])
@ranks(2)
def test_an_optimizer_that_raises_on_one_rank_stops_every_rank(rank: int, buckets: float) -> None:
    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            if rank == 1:
                raise ValueError("no step today")
            return super().step(closure)

    model = paceline.replicate(net(), bucket_mb=buckets)
    paceline.replica(model).step_in_backward(Picky(model.parameters(), lr=0.1))
    seen = []
    for _ in range(2):
        try:
            model(share(rank)).square().mean().backward()
        except (ValueError, paceline.PacelineError) as error:
            seen.append(str(error))

    assert "no step today" in seen[-1]
    assert rank == 0 or seen[0] == "no step today"


@ranks(2)
def test_an_optimizer_with_attributes_and_hooks_of_its_own(rank: int) -> None:
    class Mine(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.factor = 2

        def step(self, closure=None):
            assert self.factor == 2
            return super().step(closure)

    model = paceline.replicate(net())
    optimizer = Mine(model.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    paceline.replica(model).step_in_backward(optimizer)

    model(share(rank)).square().mean().backward()

    assert calls
    assert len(optimizer.param_groups[0]["params"]) == 8


@ranks(2)
def test_a_failure_after_a_local_backward_reaches_the_other_rank(rank: int) -> None:
    model = paceline.replicate(net(), bucket_mb=1e-4)
    paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with paceline.no_sync(model):
        model(share(rank)).square().mean().backward()
    handle = None
    if rank == 1:
        handle = model[0].weight.register_hook(lambda _: (_ for _ in ()).throw(ValueError("boom")))

    with pytest.raises((ValueError, paceline.PeerFailed), match="boom"):
        model(share(rank)).square().mean().backward()

    if handle:
        handle.remove()
    model(share(rank)).square().mean().backward()


@ranks(2)
def test_a_sparse_table_is_stepped_too(rank: int) -> None:
    def bag() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))

    inside, after = paceline.replicate(bag()), paceline.replicate(bag())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (inside, after)]
    paceline.replica(inside).step_in_backward(optimizers[0])
    words = torch.tensor([[1, 2], [2, 7]])[rank]

    for _ in range(2):
        inside(words).square().mean().backward()
        optimizers[1].zero_grad()
        after(words).square().mean().backward()
        optimizers[1].step()

    for p, q in zip(inside.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(p, q)
