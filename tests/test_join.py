"""Ranks with different numbers of batches."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.hooks import in_dtype, local_sgd
from paceline.testing import ranks

Theirs = torch.nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batches(rank: int, fewest: int = 2) -> list[torch.Tensor]:
    """Rank 1 has two batches more than rank 0, and so on."""
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, generator=source) for _ in range(fewest + 2 * rank)]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def everyones(flat: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return rows


def reference(size: int, divide_by: str) -> torch.Tensor:
    """One process that knows everybody's batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every = [batches(rank) for rank in range(size)]
    for step in range(max(map(len, every))):
        losses = [model(b[step]).square().mean() for b in every if step < len(b)]
        optimizer.zero_grad()
        (sum(losses) / (len(losses) if divide_by == "active" else size)).backward()
        optimizer.step()
    return weights(model)


def train(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(rank):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("divide_by", ["active", "initial"])
@ranks(3)
def test_every_rank_ends_with_the_weights_of_one_process_with_all_batches(rank: int, divide_by: str) -> None:
    model = paceline.replicate(net())

    with paceline.join(model, divide_by=divide_by):
        train(model, rank)

    assert all(torch.equal(row, weights(model)) for row in everyones(weights(model)))
    torch.testing.assert_close(weights(model), reference(3, divide_by))


@pytest.mark.parametrize("initial", [True, False])
@ranks(3)
def test_the_wrapper_joins_as_torchs_does(rank: int, initial: bool) -> None:
    ours, theirs = Ours(net()), Theirs(net())

    for model in (ours, theirs):
        with model.join(divide_by_initial_world_size=initial):
            train(model, rank)

    torch.testing.assert_close(weights(ours), weights(theirs))
    torch.testing.assert_close(weights(ours), reference(3, "initial" if initial else "active"))


@ranks(2)
def test_training_goes_on_after_a_join(rank: int) -> None:
    model = Ours(net())
    with model.join():
        train(model, rank)

    model(batches(0)[0]).square().mean().backward()

    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert all(torch.equal(row, gradients) for row in everyones(gradients))
    with model.join():
        train(model, rank)


@ranks(2)
def test_a_rank_that_has_run_out_takes_part_in_accumulation(rank: int) -> None:
    ours, theirs = Ours(net()), Theirs(net())

    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for i, batch in enumerate(batches(rank, fewest=4)):
                with model.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                    model(batch).square().mean().backward()
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()

    torch.testing.assert_close(weights(ours), weights(theirs))


@ranks(2)
def test_buffers_come_from_a_rank_that_still_has_batches(rank: int) -> None:
    def normalised() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))

    ours, theirs = Ours(normalised()), Theirs(normalised())
    plain = paceline.replicate(normalised())
    for model in (ours, theirs):
        with model.join():
            train(model, rank)
    with paceline.join(plain):
        train(plain, rank)

    torch.testing.assert_close(ours.module[1].running_mean, theirs.module[1].running_mean)
    assert int(ours.module[1].num_batches_tracked) == len(batches(1))
    assert int(plain[1].num_batches_tracked) == len(batches(1))
    assert all(torch.equal(row, plain[1].running_mean) for row in everyones(plain[1].running_mean))


@ranks(2)
def test_parameters_that_a_step_does_not_use(rank: int) -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.a(x) if which else self.b(x)

    ours, theirs = Ours(Forked()), Theirs(Forked(), find_unused_parameters=True)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for i, batch in enumerate(batches(rank)):
                optimizer.zero_grad()
                model(batch, i % 2).square().mean().backward()
                optimizer.step()

    torch.testing.assert_close(weights(ours), weights(theirs))


@ranks(3)
def test_a_hook_divides_by_the_ranks_that_take_part(rank: int) -> None:
    model = paceline.replicate(net(), hook=in_dtype(torch.float64, paceline.average))

    with paceline.join(model):
        train(model, rank)

    torch.testing.assert_close(weights(model), reference(3, "active"))


@ranks(2)
def test_two_models_at_once(rank: int) -> None:
    first, second = paceline.replicate(net()), paceline.replicate(net())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]

    with paceline.join(first, second):
        for batch in batches(rank):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()

    for model in (first, second):
        torch.testing.assert_close(weights(model), reference(2, "active"))


@ranks(2)
def test_two_wrappers_in_torchs_join(rank: int) -> None:
    first, second = Ours(net()), Ours(net())

    with Join([first, second], divide_by_initial_world_size=False):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        for batch in batches(rank):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()

    for model in (first, second):
        torch.testing.assert_close(weights(model), reference(2, "active"))


# ---- the end comes early ----------------------------------------------------------------------------


@ranks(3)
def test_early_stop_raises_on_every_rank(rank: int) -> None:
    model = paceline.replicate(net())

    with pytest.raises(paceline.InputsExhausted, match="rank 0 ran out of batches") as caught:
        with paceline.join(model, early="stop"):
            train(model, rank)

    assert caught.value.ranks == (0,)
    assert all(torch.equal(row, weights(model)) for row in everyones(weights(model)))
    model(batches(rank)[0]).square().mean().backward()


@ranks(2)
def test_early_termination_of_the_wrapper_raises_on_every_rank(rank: int) -> None:
    model = Ours(net())

    with pytest.raises(RuntimeError, match="exhausted"):
        with model.join(throw_on_early_termination=True):
            train(model, rank)


@ranks(2)
def test_ranks_that_end_together_need_no_company(rank: int) -> None:
    model = paceline.replicate(net())

    with paceline.join(model, early="stop"):
        train(model, 0)

    assert all(torch.equal(row, weights(model)) for row in everyones(weights(model)))


@ranks(2)
def test_an_exception_inside_reaches_the_other_rank_in_its_next_backward(rank: int) -> None:
    model = paceline.replicate(net())

    with pytest.raises((KeyError, paceline.PeerFailed)) as caught:
        with paceline.join(model):
            if rank == 0:
                raise KeyError("no such batch")
            train(model, rank)

    assert "no such batch" in str(caught.value)


@contextlib.contextmanager
def joined(model: nn.Module, which: str) -> Iterator[None]:
    with model.join() if which == "wrapper" else paceline.join(model):
        yield


@pytest.mark.parametrize("which", ["wrapper", "function"])
@ranks(2)
def test_join_inside_join_is_refused(rank: int, which: str) -> None:
    model = Ours(net())

    with joined(model, which):
        with pytest.raises(RuntimeError, match=r"join\(\) inside join\(\): end the outer block first"):
            with joined(model, which):
                pass


@pytest.mark.parametrize("which", ["wrapper", "function"])
@ranks(2)
def test_a_hook_that_averages_weights_is_refused_inside(rank: int, which: str) -> None:
    model = Ours(net())
    paceline.replica(model).set_hook(local_sgd(every=2))

    with pytest.raises(ValueError, match=r"local_sgd\(every=2, start_step=0\) cannot be used inside join"):
        with joined(model, which):
            pass


@ranks(2)
def test_a_rank_outside_the_block_is_found_out(rank: int) -> None:
    model = paceline.replicate(net())

    with pytest.raises(paceline.RanksDisagree, match=r"inside join"):
        with paceline.join(model) if rank == 0 else contextlib.nullcontext():
            model(batches(rank)[0]).square().mean().backward()


def test_bad_arguments() -> None:
    model = paceline.replicate(net())
    with pytest.raises(ValueError, match='divide_by has to be "active" or "initial", got 3'):
        paceline.join(model, divide_by=3).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='early has to be "continue" or "stop", got True'):
        paceline.join(model, early=True).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes the replicated modules that are trained inside, got none"):
        paceline.join().__enter__()
    with pytest.raises(ValueError, match="this Sequential is not replicated"):
        paceline.join(net()).__enter__()
