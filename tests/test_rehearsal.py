"""rehearse(): a user's step on thread ranks, with every promise on."""

import contextlib
import copy
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
from paceline import (
    DistributedDataParallel,
    PeerFailed,
    PeerTimeout,
    RanksDisagree,
    UnsyncedGradients,
    UnusedParameters,
    World,
    rehearse,
    replica,
    replicate,
)
from paceline.guard import guard
from paceline.hooks import average, in_dtype, local_sgd, powersgd, quantized
from paceline.testing import ranks

BATCH = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def seeded_net() -> Net:
    net = Net()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


def share_of(world: World, batch: torch.Tensor = BATCH) -> torch.Tensor:
    return batch.chunk(world.size)[world.rank]


def train(model: nn.Module, batch: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def backward_of(model: nn.Module, batch: torch.Tensor = BATCH) -> None:
    loss_of(model, batch).backward()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    door, threads = torch.autograd._engine_run_backward, set(threading.enumerate())
    yield
    assert torch.autograd._engine_run_backward is door
    assert not guard._handles
    assert set(threading.enumerate()) <= threads


# ---- it is a real run -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_one_process_on_the_whole_batch(size: int) -> None:
    expected = train(seeded_net(), BATCH)

    results = rehearse(lambda world: train(replicate(seeded_net()), share_of(world)), ranks=size)

    assert len(results) == size
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_torchs_contract_runs_as_well() -> None:
    expected = train(seeded_net(), BATCH)

    results = rehearse(lambda world: train(DistributedDataParallel(seeded_net()), share_of(world)))

    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert rehearse(lambda world: (world.rank, world.size), ranks=3) == [(0, 3), (1, 3), (2, 3)]


def test_world_inside_is_the_rehearsals() -> None:
    def step(given: World) -> None:
        with paceline.world() as found:
            assert found == given
            assert found.device == torch.device("cpu")
            assert found.backend == "threads"
        assert not dist.is_initialized()

    rehearse(step)


def test_a_step_function_may_take_nothing() -> None:
    assert sorted(rehearse(lambda: paceline.world().rank)) == [0, 1, 2, 3]


def test_arguments_with_defaults_keep_them() -> None:
    assert rehearse(lambda steps=3: steps, ranks=2) == [3, 3]


def test_a_world_with_a_default_is_given() -> None:
    assert rehearse(lambda world=None: world.rank, ranks=2) == [0, 1]


def test_models_that_start_differently_become_rank_0s() -> None:
    def step(world: World) -> torch.Tensor:
        model = Net()
        with torch.no_grad():
            model.head.bias.fill_(float(world.rank + 7))
        return replicate(model).head.bias.detach().clone()

    assert all(torch.equal(bias, torch.full((2,), 7.0)) for bias in rehearse(step))


def test_accumulation_reduces_once() -> None:
    expected = seeded_net()
    backward_of(expected)

    def step(world: World) -> tuple[int, torch.Tensor]:
        model = replicate(seeded_net())
        with paceline.accumulate(model, 2):
            for half in share_of(world).chunk(2):
                (loss_of(model, half) / 2).backward()
        return replica(model).step, model.head.weight.grad.clone()

    for steps, gradient in rehearse(step):
        assert steps == 1
        torch.testing.assert_close(gradient, expected.head.weight.grad)


def test_no_sync_and_a_backward_outside_of_it() -> None:
    def step(world: World) -> torch.Tensor:
        model = replicate(seeded_net())
        with paceline.no_sync(model):
            backward_of(model, share_of(world))
        backward_of(model, share_of(world))
        return model.head.weight.grad.clone()

    first, *others = rehearse(step)

    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "hook",
    [
        lambda: average,
        lambda: in_dtype(torch.bfloat16, average),
        lambda: powersgd(rank=1, start_step=1, min_compression=1.0),
        lambda: quantized(),
    ],
    ids=["average", "in_dtype", "powersgd", "quantized"],
)
def test_hooks_leave_the_ranks_bit_equal(hook: Callable[[], Any]) -> None:
    results = rehearse(lambda world: train(replicate(seeded_net(), hook=hook()), share_of(world)))

    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


def test_local_sgd_splits_the_ranks_and_may_end_with_different_weights() -> None:
    def step(world: World) -> list[torch.Tensor]:
        hook = local_sgd(every=4, hierarchy={2: 2})
        return train(replicate(seeded_net(), hook=hook), share_of(world), steps=2)

    results = rehearse(step)

    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[2][0], results[3][0])
    assert not torch.equal(results[0][0], results[2][0])


def test_buffers_are_made_equal() -> None:
    def step(world: World) -> torch.Tensor:
        model = replicate(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
        backward_of(model, share_of(world))
        return model[1].running_mean.clone()

    first, *others = rehearse(step)

    assert first.any()
    assert all(torch.equal(first, other) for other in others)


def test_ranks_may_run_out_of_batches_inside_join() -> None:
    def step(world: World) -> int:
        model = replicate(seeded_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.join(model):
            for _ in range(world.rank + 1):
                optimizer.zero_grad()
                backward_of(model, share_of(world))
                optimizer.step()
        return replica(model).step

    assert rehearse(step, ranks=3) == [3, 3, 3]


def test_ranks_may_run_out_of_batches_inside_torchs_join() -> None:
    def step(world: World) -> int:
        model = DistributedDataParallel(seeded_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for _ in range(world.rank + 1):
                optimizer.zero_grad()
                backward_of(model, share_of(world))
                optimizer.step()
        return replica(model).step

    assert rehearse(step, ranks=3) == [3, 3, 3]


def test_two_models_that_train_each_other() -> None:
    def step(world: World) -> None:
        maker, judge = replicate(nn.Linear(4, 4)), replicate(nn.Linear(4, 1))
        optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
        for _ in range(2):
            for optimizer, sign in zip(optimizers, (1, -1), strict=True):
                optimizer.zero_grad()
                (sign * judge(maker(share_of(world)))).mean().backward()
                optimizer.step()

    rehearse(step)


def test_a_parameter_that_one_rank_does_not_use() -> None:
    def step(world: World) -> torch.Tensor:
        model = replicate(seeded_net())
        output = model.body(BATCH)
        (model.head(output) if world.rank == 0 else output).sum().backward()
        return model.head.bias.grad.clone()

    first, *others = rehearse(step)

    assert first.any()
    assert all(torch.equal(first, other) for other in others)


def test_reentrant_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(world: World) -> torch.Tensor:
        model = replicate(seeded_net())
        x = share_of(world).clone().requires_grad_()
        hidden = checkpoint(model.body, x, use_reentrant=True)
        hidden = hidden + checkpoint(model.body, x, use_reentrant=True)
        model.head(hidden).sum().backward()
        return model.body.weight.grad.clone()

    first, *others = rehearse(step)

    assert all(torch.equal(first, other) for other in others)


def test_an_optimizer_inside_backward() -> None:
    def step(world: World) -> None:
        model = replicate(seeded_net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica(model).step_in_backward(optimizer)
        for _ in range(2):
            backward_of(model, share_of(world))

    rehearse(step)


def test_many_rehearsals_of_many_ranks_agree() -> None:
    results = [
        rehearse(lambda world: train(replicate(seeded_net()), share_of(world)), ranks=8) for _ in range(5)
    ]

    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result[0], results[0][0], strict=True))


def test_a_returned_model_is_a_plain_one() -> None:
    model, _ = rehearse(lambda: replicate(Net()), ranks=2)

    with pytest.raises(ValueError, match="is not replicated"):
        replica(model)
    backward_of(model)


def test_models_are_not_kept_alive() -> None:
    models: list[weakref.ref[nn.Module]] = []

    def step() -> None:
        model = replicate(Net())
        models.append(weakref.ref(model))
        backward_of(model)
        model.zero_grad()

    rehearse(step)
    gc.collect()

    assert [reference() for reference in models] == [None] * 4


@ranks(1)
def test_a_process_group_of_this_process_is_none_of_its_business(rank: int) -> None:
    outside = replicate(Net())

    results = rehearse(lambda world: train(replicate(seeded_net()), share_of(world)))

    assert dist.get_world_size() == 1
    assert len(results) == 4
    assert replica(outside).size == 1
    train(outside, BATCH)
    replica(outside).detach()


# ---- the promises ---------------------------------------------------------------------------------


def test_stepping_on_local_gradients_is_refused() -> None:
    def step(world: World) -> None:
        model = replicate(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.no_sync(model):
            backward_of(model, share_of(world))
        optimizer.step()

    with pytest.raises(UnsyncedGradients, match="gradients that only this rank has"):
        rehearse(step)


def test_different_models_are_refused() -> None:
    with pytest.raises(RanksDisagree, match=r"body.weight is \(8, 4\).* but \(9, 4\).* on rank 1"):
        rehearse(lambda world: replicate(Net(9 if world.rank == 1 else 8)))


def test_unused_parameters_are_refused_if_asked() -> None:
    def step(world: World) -> None:
        model = replicate(Net(), unused="error")
        output = model.body(BATCH)
        (output if world.rank == 2 else model.head(output)).sum().backward()

    with pytest.raises(UnusedParameters, match=r"head.weight \(rank 2\)"):
        rehearse(step)


def test_a_failure_in_one_backward_is_heard_of_by_all_and_training_goes_on() -> None:
    def step(world: World) -> str:
        model = replicate(seeded_net())
        output = model(share_of(world))
        if world.rank == 1:
            output.register_hook(_fail)
        try:
            output.sum().backward()
        except (ZeroDivisionError, PeerFailed) as error:
            heard = type(error).__name__
        train(model, share_of(world))
        return heard

    assert rehearse(step, ranks=3) == ["PeerFailed", "ZeroDivisionError", "PeerFailed"]


def _fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError("one rank is out of luck")


# ---- ranks that raise ------------------------------------------------------------------------------


def test_the_first_cause_is_raised_with_notes_on_every_rank() -> None:
    def step(world: World) -> None:
        model = replicate(Net())
        output = model(share_of(world))
        if world.rank == 1:
            output.register_hook(_fail)
        output.sum().backward()

    with pytest.raises(ZeroDivisionError, match="out of luck") as caught:
        rehearse(step, ranks=3)

    (note,) = caught.value.__notes__
    assert "ranks 0, 2 raised PeerFailed" in note
    assert "rank 1 raised ZeroDivisionError: one rank is out of luck" in note


def test_a_rank_that_raises_outside_of_a_backward_ends_the_waiting_of_the_others() -> None:
    heard: list[PeerFailed] = []

    def step(world: World) -> None:
        model = replicate(Net())
        if world.rank == 2:
            raise LookupError("no more data")
        try:
            backward_of(model)
        except PeerFailed as error:
            heard.append(error)
            raise

    with pytest.raises(LookupError, match="no more data") as caught:
        rehearse(step)

    assert [(error.rank, error.text) for error in heard] == [(2, "LookupError: no more data")] * 3
    assert "rank 2 raised LookupError" in caught.value.__notes__[0]
    assert caught.traceback[-1].name == "step"


def test_a_rank_that_raises_before_it_replicates() -> None:
    def step(world: World) -> None:
        if world.rank == 0:
            raise LookupError("no such file")
        replicate(Net())

    with pytest.raises(LookupError, match="no such file"):
        rehearse(step)


def test_skipping_a_test_inside_skips_it() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        rehearse(lambda: pytest.skip("not here"))


def test_a_rehearsal_after_one_that_failed() -> None:
    with pytest.raises(ZeroDivisionError):
        rehearse(lambda world: 1 / world.rank)

    assert rehearse(lambda world: train(replicate(seeded_net()), share_of(world)))


# ---- ranks that hang --------------------------------------------------------------------------------


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    def spin_forever() -> None:
        while True:
            time.sleep(0.001)

    def step(world: World) -> None:
        model = replicate(Net())
        if world.rank == 1:
            spin_forever()
        backward_of(model)

    with pytest.raises(PeerTimeout, match=r"rank 1 did not finish within 1 s") as caught:
        rehearse(step, ranks=3, timeout_seconds=1)

    assert caught.value.rank == 1
    assert "in spin_forever" in str(caught.value)
    assert "rank 0 was here" not in str(caught.value)
    # They have waited as long as the rehearsal has, and whose time is over first is nobody's promise.
    assert re.search(
        "ranks? 0.* raised (PeerLost: the rehearsal was ended|PeerTimeout: rank 1 did not come)",
        caught.value.__notes__[0],
    )


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    def step(world: World) -> None:
        models = [replicate(Net()), replicate(Net())]
        for model in models if world.rank == 0 else models[::-1]:
            backward_of(model)

    with pytest.raises(
        RanksDisagree, match=r"rank 0 in backward 1 of model 1, rank 1 in backward 1 of model 2"
    ):
        rehearse(step, ranks=2)


def test_ranks_in_different_collectives_are_told_so() -> None:
    def step(world: World) -> None:
        comm = replica(replicate(Net())).comm
        (comm.total if world.rank else comm.gather)(torch.ones(3)).wait()

    with pytest.raises(RanksDisagree, match="rank 0 in a gather of 3 float32, rank 1 in a sum of 3 float32"):
        rehearse(step, ranks=2)


# ---- what is left open -----------------------------------------------------------------------------


def test_different_numbers_of_backwards() -> None:
    def step(world: World) -> None:
        model = replicate(Net())
        for _ in range(2 if world.rank == 1 else 3):
            model.zero_grad()
            backward_of(model)

    with pytest.raises(RanksDisagree, match=r"rank 1 returned .* others still wait in backward 3 of model 1"):
        rehearse(step)


def test_gradients_that_were_never_reduced() -> None:
    def step(world: World) -> None:
        model = replicate(Net())
        with paceline.no_sync(model):
            backward_of(model)

    with pytest.raises(
        UnsyncedGradients, match=r"never reduced: body.weight.*\(ranks 0, 1, 2, 3\)"
    ) as caught:
        rehearse(step)

    assert caught.value.parameters == ("body.weight", "body.bias", "head.weight", "head.bias")


def test_gradients_that_were_never_reduced_by_a_wrapper() -> None:
    def step(world: World) -> None:
        model = DistributedDataParallel(Net())
        with model.no_sync():
            backward_of(model)

    with pytest.raises(UnsyncedGradients, match="never reduced"):
        rehearse(step)


def test_one_rank_inside_no_sync_and_the_others_not() -> None:
    def step(world: World) -> None:
        model = replicate(Net())
        with paceline.no_sync(model, world.rank == 3):
            backward_of(model)

    with pytest.raises(
        RanksDisagree, match=r"rank 3 returned .*, with gradients that were never reduced: body"
    ):
        rehearse(step)


def test_local_gradients_that_were_dropped_are_fine() -> None:
    def step(set_to_none: bool) -> None:
        model = replicate(Net())
        with paceline.no_sync(model):
            backward_of(model)
        model.zero_grad(set_to_none=set_to_none)

    for set_to_none in (True, False):
        rehearse(lambda: step(set_to_none))  # noqa: B023 - called before the next turn


def test_a_backward_that_has_not_ended() -> None:
    go_on, arrived = threading.Event(), threading.Semaphore(0)
    others: list[threading.Thread] = []

    def step() -> None:
        model = replicate(Net())
        output = model.body(BATCH)
        output.register_hook(lambda _: (arrived.release(), go_on.wait(10))[:0] or None)
        loss = model.head(output).sum()
        others.append(threading.Thread(target=_backward_quietly, args=[loss]))
        others[-1].start()
        arrived.acquire(timeout=10)

    with pytest.raises(UnsyncedGradients, match=r"a backward that had not ended \(ranks 0, 1\)"):
        rehearse(step, ranks=2)
    go_on.set()
    for thread in others:
        thread.join(10)


def _backward_quietly(loss: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError, KeyError):  # its model has been detached meanwhile
        loss.backward()


def test_parameters_that_one_rank_has_written_to() -> None:
    def step(world: World) -> None:
        model = replicate(Net())
        train(model, share_of(world))
        if world.rank == 2:
            with torch.no_grad():
                model.head.bias[1] += 1e-3

    with pytest.raises(RanksDisagree, match="head.bias on rank 2 is not what it is on rank 0"):
        rehearse(step)


def test_an_optimizer_with_other_settings_on_one_rank_beside_torchs_contract() -> None:
    def step(world: World) -> None:
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if world.rank == 1 else 0.1)
        backward_of(model)
        optimizer.step()

    with pytest.raises(RanksDisagree, match="body.weight on rank 1 is not what it is on rank 0"):
        rehearse(step)


def test_one_model_for_all_ranks_is_refused() -> None:
    model = Net()

    with pytest.raises(ValueError, match="hold one and the same parameter body.weight"):
        rehearse(lambda: replicate(model), ranks=2)


def test_a_copy_for_each_rank_is_fine() -> None:
    model = Net()

    rehearse(lambda world: train(replicate(copy.deepcopy(model)), share_of(world)))


# ---- bad arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step_fn", [None, 3, nn.Linear(1, 1)])
def test_a_step_function_is_a_function(step_fn: Any) -> None:
    with pytest.raises(TypeError, match="takes the function that runs a training step"):
        rehearse(step_fn)


async def _coroutine() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("step_fn", [_coroutine, _generator])
def test_a_step_function_does_its_work_when_called(step_fn: Any) -> None:
    with pytest.raises(TypeError, match="only makes a coroutine or a generator"):
        rehearse(step_fn)


def test_a_step_function_with_more_arguments() -> None:
    with pytest.raises(TypeError, match="but this one needs world, data; use a lambda"):
        rehearse(lambda world, data: None)
    with pytest.raises(TypeError, match="but this one needs data"):
        rehearse(lambda *, data: None)


@pytest.mark.parametrize("number", [0, -1])
def test_at_least_one_rank(number: int) -> None:
    with pytest.raises(ValueError, match=f"at least one rank, got {number}"):
        rehearse(lambda: None, ranks=number)


@pytest.mark.parametrize("number", [True, 2.0, "2", None])
def test_ranks_are_a_whole_number(number: Any) -> None:
    with pytest.raises(TypeError, match="whole number of ranks"):
        rehearse(lambda: None, ranks=number)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_the_time_limit_is_above_zero(seconds: float) -> None:
    with pytest.raises(ValueError, match="above 0 and finite"):
        rehearse(lambda: None, timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", [None, "3", True])
def test_the_time_limit_is_a_number(seconds: Any) -> None:
    with pytest.raises(TypeError, match="timeout_seconds has to be a number"):
        rehearse(lambda: None, timeout_seconds=seconds)


def test_a_rehearsal_inside_a_rehearsal() -> None:
    with pytest.raises(RuntimeError, match=r"rehearse\(\) inside rehearse\(\)"):
        rehearse(lambda: rehearse(lambda: None))


def test_a_hook_that_needs_a_process_group_is_refused() -> None:
    def step() -> None:
        model = DistributedDataParallel(Net())
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    with pytest.raises(ValueError, match="and a rehearsal has none"):
        rehearse(step)


@ranks(1)
def test_a_process_group_inside_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="leave group and mesh out inside rehearse"):
        rehearse(lambda: replicate(Net(), group=dist.group.WORLD))
