"""The norm of the gradients is torch's, and costs a few operators a bucket."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.testing import ranks
from tests.promises.measure import gather

ORDERS = (2.0, 1.0, math.inf, 3.0, -math.inf)
orders = pytest.mark.parametrize("order", ORDERS)


class Counting(TorchDispatchMode):
    """Count what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def deep(layers: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def train(model: nn.Module, rank: int, steps: int = 2, width: int = 8) -> None:
    """Run backwards, so that the plan has been learnt; leave the gradients of the last one."""
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(10 * step + rank)
        (model(torch.randn(4, width)).square().sum() * 100).backward()


def copies(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def torchs_norm(model: nn.Module, order: float) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(copies(model), order)


def torchs_clip(model: nn.Module, limit: float, order: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Clip copies of the gradients as torch does."""
    twins = []
    for gradient in copies(model):
        twin = nn.Parameter(torch.zeros_like(gradient))
        twin.grad = gradient
        twins.append(twin)
    return torch.nn.utils.clip_grad_norm_(twins, limit, order), [t.grad for t in twins]


def check_like_torch(model: nn.Module, order: float = 2.0, limit: float = 0.5) -> None:
    handle = paceline.replica(model)
    torch.testing.assert_close(handle.grad_norm(order), torchs_norm(model, order), rtol=1e-6, atol=0)
    expected_norm, expected = torchs_clip(model, limit, order)

    got = handle.clip_grad_norm_(limit, order)

    torch.testing.assert_close(got, expected_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(copies(model), expected, rtol=1e-6, atol=1e-12)


# ---- equal to torch's ---------------------------------------------------------------------------------


@orders
@pytest.mark.parametrize("steps", [1, 3])
@ranks(2)
def test_norm_and_clipped_gradients_are_torchs(rank: int, order: float, steps: int) -> None:
    model = paceline.replicate(deep(5), bucket_mb=0.001, first_bucket_mb=0.0005)
    train(model, rank, steps)
    assert len(paceline.replica(model).plan.buckets) > 1

    check_like_torch(model, order)

    one, two = gather(copies(model))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@ranks(2)
def test_small_gradients_are_left_as_they_are(rank: int) -> None:
    model = paceline.replicate(deep(2))
    train(model, rank)
    before = copies(model)

    norm = paceline.replica(model).clip_grad_norm_(1e9)

    assert norm < 1e9
    assert all(torch.equal(a, b) for a, b in zip(before, copies(model), strict=True))


@ranks(2)
def test_the_wrapper_has_it_by_its_replica(rank: int) -> None:
    model = paceline.DistributedDataParallel(deep(3))
    train(model, rank)

    check_like_torch(model)


@orders
@ranks(2)
def test_a_gradient_that_is_gone_does_not_count(rank: int, order: float) -> None:
    model = paceline.replicate(deep(4))
    train(model, rank)
    model[1].bias.grad = None
    model[2].weight.grad = None

    check_like_torch(model, order)


@ranks(2)
def test_what_nobody_used_does_not_count(rank: int) -> None:
    model = deep(4)
    model.unused = nn.Linear(8, 8)
    paceline.replicate(model)
    for _ in range(2):
        model.zero_grad()
        model[1](model[0](torch.randn(3, 8))).sum().backward()
    assert model.unused.weight.grad is None

    check_like_torch(model, -math.inf)  # a slot of zeros would make this 0


@ranks(2)
def test_gradients_that_were_replaced_are_taken_as_they_are(rank: int) -> None:
    model = paceline.replicate(deep(4))
    train(model, rank)
    model[0].weight.grad = torch.full((8, 8), 7.0)
    model[2].bias.grad = model[2].bias.grad * 3

    check_like_torch(model)


@ranks(2)
def test_several_dtypes_and_strides(rank: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4).double())
    model[0].to(memory_format=torch.channels_last)
    paceline.replicate(model)
    for _ in range(2):
        model.zero_grad()
        y = model[1](model[0](torch.randn(2, 3, 4, 4)))
        model[2](y.double()).square().sum().backward()

    check_like_torch(model)
    assert paceline.replica(model).grad_norm().dtype is torch.float64


@ranks(2)
def test_sixteen_bits_are_added_up_in_thirty_two(rank: int) -> None:
    model = paceline.replicate(deep(4).bfloat16())
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 8, dtype=torch.bfloat16)).square().sum().backward()
    exact = torch.nn.utils.get_total_norm([g.double() for g in copies(model)])

    norm = paceline.replica(model).clip_grad_norm_(float(exact) / 2)

    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    half = torch.nn.utils.get_total_norm([g.double() for g in copies(model)])
    torch.testing.assert_close(half, exact / 2, rtol=1e-2, atol=0)


@orders
@ranks(2, timeout=90)
def test_a_large_bucket_loses_no_digits(rank: int, order: float) -> None:
    model = nn.ParameterList([torch.zeros(1000, 1001), torch.zeros(7)])
    paceline.replicate(model)
    torch.manual_seed(3)
    wanted = [torch.rand(1000, 1001), torch.rand(7)]
    for _ in range(2):
        model.zero_grad()
        sum((p * w).sum() for p, w in zip(model, wanted, strict=True)).backward()
    exact = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in copies(model)]), order)

    got = paceline.replica(model).grad_norm(order)

    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


@ranks(2)
def test_sparse_gradients_count_row_by_row(rank: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    paceline.replicate(model)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 1, rank + 2])).square().sum().backward()
    whole = [p.grad.to_dense() if p.grad.is_sparse else p.grad.clone() for p in model.parameters()]
    exact = torch.nn.utils.get_total_norm(whole)

    norm = paceline.replica(model).clip_grad_norm_(float(exact) / 4)

    torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)
    assert model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad.to_dense(), whole[0] / 4, rtol=1e-5, atol=0)
    torch.testing.assert_close(model[1].weight.grad, whole[1] / 4, rtol=1e-5, atol=0)


@ranks(2)
def test_parameters_that_are_left_out_do_not_count(rank: int) -> None:
    """Each rank has its own there: a norm with them would scale the shared gradients differently."""
    model = paceline.replicate(deep(2), left_out=["1.bias"])
    train(model, rank)
    own = model[1].bias.grad.clone()
    shared = [p.grad for name, p in model.named_parameters() if name != "1.bias"]
    expected = torch.nn.utils.get_total_norm(shared)

    norm = paceline.replica(model).clip_grad_norm_(0.1)

    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert len({float(n) for n in gather(norm)}) == 1
    assert torch.equal(model[1].bias.grad, own)


# ---- one process, none, nothing -----------------------------------------------------------------------


@orders
def test_a_process_alone(order: float) -> None:
    model = paceline.replicate(deep(3))
    train(model, 0)

    check_like_torch(model, order)


@ranks(1)
def test_a_group_of_one_takes_gradients_of_no_sync_too(rank: int) -> None:
    model = paceline.replicate(deep(3))
    with paceline.no_sync(model):
        train(model, rank, 1)

    check_like_torch(model)


def test_without_gradients_the_norm_is_zero() -> None:
    model = paceline.replicate(deep(2))

    assert paceline.replica(model).grad_norm().item() == 0
    assert paceline.replica(model).clip_grad_norm_(1.0, math.inf).item() == 0
    assert paceline.replica(model).grad_norm().device == torch.device("cpu")


@ranks(2)
def test_an_empty_parameter_has_no_part_in_the_norm(rank: int) -> None:
    model = deep(2)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    paceline.replicate(model)
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(1, 8)).sum() + model.empty.sum()).backward()
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in copies(model)]), math.inf)

    assert torch.equal(paceline.replica(model).grad_norm(math.inf), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_several_devices() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).cuda()])
    paceline.replicate(model)
    model[1](model[0](torch.ones(1, 3)).cuda()).square().sum().backward()

    assert paceline.replica(model).grad_norm().device.type == "cpu"
    check_like_torch(model)


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["grad_norm", "clip_grad_norm_"])
@ranks(2)
def test_gradients_of_this_rank_alone_are_refused_by_name(rank: int, ask: str) -> None:
    model = paceline.replicate(deep(2))
    with paceline.no_sync(model):
        train(model, rank, 1)
    before = copies(model)
    arguments = (1.0,) if ask == "clip_grad_norm_" else ()

    with pytest.raises(paceline.UnsyncedGradients, match="only this rank has: 0.weight, 0.bias") as caught:
        getattr(paceline.replica(model), ask)(*arguments)

    assert f"{ask}() would use gradients" in str(caught.value)
    assert caught.value.parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert all(torch.equal(a, b) for a, b in zip(before, copies(model), strict=True))
    train(model, rank, 1)
    check_like_torch(model)


@ranks(2)
def test_the_optimizer_inside_backward_leaves_nothing_to_clip(rank: int) -> None:
    model = paceline.replicate(deep(2))
    paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, rank)

    for ask in (paceline.replica(model).grad_norm, lambda: paceline.replica(model).clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="the optimizer inside backward has stepped and freed these"):
            ask()


@ranks(2)
def test_a_norm_that_is_not_finite_raises_where_asked_and_names_the_parameter(rank: int) -> None:
    model = paceline.replicate(deep(2))
    train(model, rank)
    model[1].bias.grad[3] = math.nan
    before = copies(model)

    with pytest.raises(
        RuntimeError, match="is nan, so nothing was clipped. NaN or Inf in: 1.bias. "
    ) as caught:
        paceline.replica(model).clip_grad_norm_(1.0, error_if_nonfinite=True)

    assert len(set(gather(str(caught.value)))) == 1
    torch.testing.assert_close(copies(model), before, rtol=0, atol=0, equal_nan=True)
    assert math.isnan(paceline.replica(model).clip_grad_norm_(1.0))  # as torch's: everything is nan then
    assert model[0].weight.grad.isnan().all()


@pytest.mark.parametrize("order", [0, math.nan])
def test_an_order_that_is_none_is_refused(order: float) -> None:
    with pytest.raises(ValueError, match="norm_type has to be a number other than 0"):
        paceline.replica(paceline.replicate(deep(1))).grad_norm(order)


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_a_limit_below_zero_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="max_norm has to be a number of 0 or more"):
        paceline.replica(paceline.replicate(deep(1))).clip_grad_norm_(limit)


# ---- what it costs ------------------------------------------------------------------------------------


def operators_for(layers: int, rank: int, steps: int) -> Counter[str]:
    """Count what clipping a model of some layers asks of torch."""
    model = paceline.replicate(deep(layers))
    assert len(paceline.replica(model).plan.buckets) == 1
    train(model, rank, steps)
    with Counting() as counting:
        paceline.replica(model).clip_grad_norm_(1.0)
    return counting.operators


@pytest.mark.parametrize("steps", [1, 2])
@ranks(2)
def test_a_bucket_costs_the_same_however_many_parameters_it_has(rank: int, steps: int) -> None:
    few, many = operators_for(20, rank, steps), operators_for(60, rank, steps)

    assert few == many
    assert sum(many.values()) < 20
    assert many["aten.linalg_vector_norm.default"] <= 3
    assert many["aten._foreach_mul_.Tensor"] == 1


@ranks(2)
def test_a_gap_costs_one_stretch_more(rank: int) -> None:
    model = paceline.replicate(deep(60))
    train(model, rank)
    model[30].weight.grad = None
    with Counting() as counting:
        paceline.replica(model).clip_grad_norm_(1.0)

    assert sum(counting.operators.values()) < 30


@ranks(2)
def test_nothing_is_sent(rank: int) -> None:
    model = paceline.replicate(deep(3))
    train(model, rank)
    dist.barrier()
    if rank == 0:  # the other rank need not be there
        assert paceline.replica(model).clip_grad_norm_(1.0) > 0
    dist.barrier()
