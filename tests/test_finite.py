"""The finite check: a NaN or an Inf of one rank stops the step on all of them, or is skipped by all."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
import paceline.finite
from paceline.finite import find_odd, read_mode, sum_of
from paceline.hooks import in_dtype, local_sgd, powersgd, quantized
from paceline.testing import ranks
from tests.promises.libraries import Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import loss_of, small_model

NAN, INF = math.nan, math.inf


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


def poisoned(model: nn.Module, ranks: tuple[int, ...] = (1,), number: float = NAN) -> torch.Tensor:
    """Compute a loss whose first layer, on some ranks, gets a gradient with this number."""
    first, *others = getattr(model, "module", model)
    y = first(share(batch()))
    if dist.get_rank() in ranks:
        y = Poison.apply(y, number)
    for layer in others:
        y = layer(y)
    return y.square().mean()


def raised(run: Callable[[], object]) -> paceline.NotFinite:
    """Run something that has to raise on every rank, with one text."""
    with pytest.raises(paceline.NotFinite) as caught:
        run()
    assert len(set(gather(str(caught.value)))) == 1
    return caught.value


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_trains(wrapped: nn.Module, bare: nn.Module) -> None:
    wrapped.zero_grad()
    expected = reference(bare, lambda m: loss_of(m, batch()).backward())
    loss_of(wrapped, share(batch())).backward()
    assert verdict(wrapped, expected) == EQUAL


# ---- what a user writes, and arithmetic ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "mode"),
    [(False, None), (None, None), (True, "raise"), ("raise", "raise"), ("skip", "skip")],
)
def test_the_setting_is_read_as_users_give_it(given: Any, mode: str | None) -> None:
    assert read_mode(given) == mode


@pytest.mark.parametrize("given", ["stop", 1, 0, 2.5, "", ["skip"]], ids=repr)
def test_another_setting_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match='check_finite has to be True, False, "raise" or "skip", got'):
        read_mode(given)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 1023, 1024, 5000])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_a_sum_is_finite_unless_a_number_is_not(dtype: torch.dtype, numel: int, number: float) -> None:
    flat = torch.ones(numel, dtype=dtype)
    assert bool(sum_of(flat).isfinite())

    flat[numel // 2] = number

    assert not bool(sum_of(flat).isfinite())


def test_a_sum_in_16_bits_does_not_overflow_where_its_numbers_are_small() -> None:
    assert bool(sum_of(torch.full((1_000_000,), 30.0, dtype=torch.float16)).isfinite())


def test_what_is_odd_is_named_with_what_it_holds() -> None:
    gradients = [torch.tensor([1.0]), torch.tensor([1.0, INF]), torch.tensor([INF, NAN])]

    assert find_odd(["a", "b", "c"], gradients) == {"b": "Inf", "c": "NaN"}


# ---- raise ----------------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("number", [NAN, INF, -INF])
@ranks(2)
def test_every_rank_raises_the_same_and_nothing_has_moved(library: Library, number: float) -> None:
    model = small_model()
    wrapped = library.wrap(model, bucket_cap_mb=1e-4)
    paceline.replica(wrapped).check_finite()
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        assert_trains(wrapped, model)
        optimizer.step()
    before = weights(model)

    error = raised(lambda: poisoned(wrapped, number=number).backward())
    optimizer.step()

    kind = "NaN" if number != number else "Inf"
    assert (error.rank, error.step) == (1, 2)
    assert error.parameter in ("0.weight", "0.bias")
    assert set(error.found) == {1}
    assert f"step 2: the gradient of {error.parameter} holds {kind} on rank 1" in str(error)
    assert "no weight has moved" in str(error)
    assert all(p.grad is None for p in model.parameters())
    assert_same(weights(model), before)
    assert_trains(wrapped, model)


@ranks(3)
def test_several_ranks_are_named(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite=True)

    error = raised(lambda: poisoned(model, ranks=(0, 2)).backward())

    assert error.rank == 0
    assert set(error.found) == {0, 2}
    assert set(error.found[2]) == {"0.weight", "0.bias"}
    assert "on rank 0 (and 1 more parameter there, others on rank 2)" in str(error)


@ranks(2)
def test_gradients_inside_no_sync_are_looked_at_when_they_are_reduced(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite=True)

    with paceline.no_sync(model):
        poisoned(model).backward()
    error = raised(lambda: loss_of(model, share(batch())).backward())

    assert error.rank == 1
    assert_trains(model, model)


@ranks(2)
def test_a_reduction_without_a_backward_is_looked_at(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite=True)

    def micro_batches() -> None:
        with paceline.accumulate(model, 3):
            for _ in range(2):
                poisoned(model).backward()

    assert raised(micro_batches).rank == 1
    assert_trains(model, model)


@ranks(2)
def test_a_rank_of_weight_0_may_have_anything(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite=True)
    expected = reference(model, lambda m: loss_of(m, batch().chunk(2)[0]).backward())

    with paceline.weight(model, 1 - rank):
        poisoned(model).backward()

    assert verdict(model, expected) == EQUAL


@ranks(2)
def test_a_rank_that_skips_its_batch_is_not_looked_at(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite=True)
    expected = reference(model, lambda m: loss_of(m, batch().chunk(2)[0]).backward())

    if rank:
        paceline.skip(model)
    else:
        loss_of(model, share(batch())).backward()

    assert verdict(model, expected) == EQUAL


@pytest.mark.parametrize("sparse_on", [(0, 1), (0,)], ids=["sparse", "sparse on one rank"])
@ranks(2)
def test_sparse_gradients_are_looked_at(rank: int, sparse_on: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2))
    paceline.replicate(model, check_finite=True)
    model[0].sparse = rank in sparse_on
    words = torch.tensor([1, 2, 2, 7])

    def loss(number: float) -> torch.Tensor:
        y = model[0](words + rank)
        return model[1](Poison.apply(y, number) if rank == 0 else y).square().sum()

    for _ in range(2):
        error = raised(lambda: loss(NAN).backward())
        assert error.found == {0: ("0.weight",)}
        loss(1.0).backward()
        assert model[0].weight.grad is not None
        model.zero_grad()


class LayerUsedTwice(nn.Module):
    """One layer under two re-entrant checkpoints: in the first step its second gradient comes too late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, number: float) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x = torch.tanh(Poison.apply(checkpoint(self.layer, x, use_reentrant=True), number))
        return self.head(torch.tanh(checkpoint(self.layer, x, use_reentrant=True)))


@ranks(2)
def test_a_gradient_that_comes_after_its_bucket_is_looked_at(rank: int) -> None:
    model = paceline.replicate(LayerUsedTwice(), bucket_mb=1e-6, check_finite=True)

    error = raised(lambda: model(share(batch()), NAN if rank else 1.0).square().mean().backward())

    assert set(error.found) == {1}
    assert set(error.found[1]) == {"layer.weight", "layer.bias"}


@ranks(2)
def test_finite_numbers_whose_sum_is_too_large_are_let_through(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 1, bias=False), check_finite=True)

    model(torch.full((1, 4), 3e38)).sum().backward()

    assert torch.equal(model.weight.grad, torch.full((1, 4), 3e38))


@ranks(2)
def test_models_in_16_bits_are_looked_at(rank: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = paceline.replicate(small_model().to(dtype), check_finite=True)
        x = share(batch()).to(dtype)
        model(x).sum().backward()
        y = model[0](x)

        error = raised(lambda: model[2](Poison.apply(y, INF) if rank else y).sum().backward())  # noqa: B023

        assert error.rank == 1


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"precision": paceline.Precision(torch.bfloat16, torch.bfloat16)},
        {"hook": in_dtype(torch.bfloat16, paceline.average)},
        {"hook": powersgd(rank=1, start_step=1)},
        {"hook": quantized(bits=8)},
        {"hook": local_sgd(every=2)},
        {"reduce": "sum"},
        {"bucket_mb": 1e-6},
    ],
    ids=str,
)
@ranks(2)
def test_it_goes_along_with_other_settings_and_training_goes_on(rank: int, options: dict[str, Any]) -> None:
    model = paceline.replicate(small_model(), check_finite=True, **options)
    for _ in range(3):
        loss_of(model, share(batch())).backward()
        model.zero_grad()

    error = raised(lambda: poisoned(model).backward())

    assert set(error.found) == {1}
    assert error.step == 3
    for _ in range(2):
        loss_of(model, share(batch())).backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        model.zero_grad()


@ranks(3)
def test_on_a_device_sums_are_looked_at_once_and_names_come_from_the_reduced_buckets(rank: int) -> None:
    with mock.patch("paceline.finite._waits", return_value=True), spying_on_sums() as looks:
        model = paceline.replicate(small_model(), bucket_mb=1e-4, check_finite=True)
        for step in range(4):
            model.zero_grad()
            if step == 2:
                error = raised(lambda: poisoned(model, ranks=(0, 2), number=INF).backward())
            else:
                assert_trains(model, model)

    assert set(error.found) == {0, 2}
    assert set(error.found[2]) == {"0.weight", "0.bias"}
    assert looks == [1] * 4


@ranks(3)
def test_a_rank_that_cannot_look_at_its_sums_is_heard_of_and_training_goes_on(rank: int) -> None:
    with mock.patch("paceline.finite._waits", return_value=True):
        model = paceline.replicate(small_model(), check_finite=True)
        lost = MemoryError("no room \udcff")
        with mock.patch(
            "paceline.finite._Verdicts.wait", side_effect=lost if rank == 1 else None, return_value=[]
        ):
            with pytest.raises((MemoryError, paceline.PeerFailed)) as caught:
                loss_of(model, share(batch())).backward()
        assert_trains(model, model)

    if rank == 1:
        assert caught.value is lost
    else:
        assert "rank 1 raised during its backward: MemoryError: no room" in str(caught.value)


@contextlib.contextmanager
def spying_on_sums() -> Iterator[list[int]]:
    """Count, for each step, how often the host looks at sums that were put off."""
    looks: list[int] = []
    wait = paceline.finite._Verdicts.wait

    def spy(verdicts: Any) -> Any:
        assert verdicts._fine.numel() > 1
        looks.append(1)
        return wait(verdicts)

    with mock.patch("paceline.finite._Verdicts.wait", spy):
        yield looks


@ranks(2)
def test_inside_join_the_ranks_that_still_have_batches_are_looked_at(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite="skip")

    with paceline.join(model):
        for step in range(2 + 2 * rank):
            poisoned(model, number=NAN if step == 3 else 1.0).backward()

    assert paceline.replica(model).stats().skipped_steps == 1


def test_one_process_alone_is_looked_at_too() -> None:
    model = paceline.replicate(nn.Linear(4, 2, bias=False), check_finite=True)

    with pytest.raises(paceline.NotFinite, match="step 0: the gradient of weight holds NaN on rank 0"):
        Poison.apply(model(torch.ones(1, 4)), NAN).sum().backward()

    assert model.weight.grad is None
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None


# ---- skip -----------------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keep what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("paceline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@on_both
@ranks(2)
def test_every_rank_skips_the_step_and_trains_as_if_it_had_not_been(library: Library) -> None:
    log = Lines()
    models = []
    for steps in ("good", "bad", "good"), ("good", "good"):
        model = small_model()
        wrapped = library.wrap(model)
        paceline.replica(wrapped).check_finite("skip")
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        for step in steps:
            optimizer.zero_grad()
            before = weights(model)
            (loss_of(wrapped, share(batch())) if step == "good" else poisoned(wrapped)).backward()
            if step == "bad":
                assert all(p.grad is None for p in model.parameters())
                optimizer.step()
                assert_same(weights(model), before)
            else:
                optimizer.step()
        models.append(model)
        assert paceline.replica(wrapped).stats().skipped_steps == steps.count("bad")

    assert_same(weights(models[0]), weights(models[1]))
    (line,) = log.lines
    assert "WARNING paceline: step 1 was skipped on every rank: the gradient of 0." in line
    assert "holds NaN on rank 1 (and 1 more parameter there)" in line
    assert len(set(gather(line))) == 1


@pytest.mark.parametrize("hook", [powersgd(rank=1, start_step=1), quantized(bits=8)], ids=repr)
@ranks(2)
def test_a_hook_with_a_memory_does_not_remember_a_step_that_was_skipped(rank: int, hook: Any) -> None:
    model = paceline.replicate(small_model(), check_finite="skip", hook=hook)
    for number in (1.0, 1.0, NAN, 1.0, 1.0):
        model.zero_grad()
        poisoned(model, number=number).backward()

    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert paceline.replica(model).stats().skipped_steps == 1


# ---- what is refused ------------------------------------------------------------------------------------


def test_an_optimizer_inside_backward_is_refused_in_either_order() -> None:
    model = paceline.replicate(nn.Linear(2, 2), check_finite=True)
    other = paceline.replicate(nn.Linear(2, 2))
    text = "check_finite and an optimizer inside backward exclude each other"

    with pytest.raises(ValueError, match=text):
        paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    paceline.replica(other).step_in_backward(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=text):
        paceline.replica(other).check_finite("skip")


@ranks(2)
def test_ranks_with_different_settings_are_told_at_the_start(rank: int) -> None:
    with pytest.raises(paceline.RanksDisagree, match="the setting check_finite is 'raise' on rank 0 but"):
        paceline.replicate(small_model(), check_finite="skip" if rank else "raise")


@ranks(2)
def test_a_bad_setting_on_one_rank_is_told_on_all(rank: int) -> None:
    with pytest.raises((ValueError, paceline.PeerFailed), match="check_finite has to be True, False"):
        paceline.replicate(small_model(), check_finite="nan" if rank else True)


@ranks(2)
def test_ranks_that_switch_it_on_alone_are_told_in_the_next_backward(rank: int) -> None:
    model = paceline.replicate(small_model())
    if rank:
        paceline.replica(model).check_finite()

    with pytest.raises(paceline.RanksDisagree, match='check_finite="raise" \\(rank 1\\)'):
        loss_of(model, share(batch())).backward()


@ranks(2)
def test_it_can_be_switched_off_again(rank: int) -> None:
    model = paceline.replicate(small_model(), check_finite=True)
    paceline.replica(model).check_finite(False)

    poisoned(model).backward()

    assert bool(model[0].weight.grad.isnan().any())
