"""Communication hooks in torch's form, and torch's own hooks, on our class."""

import copy
import threading
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.comm import GroupComm
from paceline.hooks import FromTorch
from paceline.hooks.torch_form import check_torch_hook
from paceline.meeting import Meeting
from paceline.testing import ranks

Theirs = torch.nn.parallel.DistributedDataParallel


def net(width: int = 8) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))


def share(rank: int, step: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, rank: int, steps: int = 4, lr: float = 0.1) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        model(share(rank, step)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def everyones(flat: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return rows


HOOKS = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "fp16 around": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "post local": lambda: (
        PostLocalSGDState(dist.group.WORLD, dist.group.WORLD, start_localSGD_iter=2),
        post_localSGD_hook,
    ),
}


@pytest.mark.parametrize("name", HOOKS)
@ranks(2)
def test_torchs_own_hooks_run_unchanged(rank: int, name: str) -> None:
    model = Ours(net())
    state, hook = HOOKS[name]()
    model.register_comm_hook(state, hook)

    weights = train(model, rank)

    assert all(torch.equal(row, weights) for row in everyones(weights))
    torch.testing.assert_close(weights, train(Theirs(net()), rank), rtol=0.02, atol=0.02)


def powersgd_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=1)


# One bucket: with several, this hook starts collectives from callbacks, which crashes torch's class on Gloo.
@pytest.mark.parametrize("hook", [powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook])
@ranks(2)
def test_torchs_powersgd_gives_what_it_gives_on_torchs_class(rank: int, hook: Any) -> None:
    # In this rank's own process:
    powerSGD_hook._orthogonalize = _orthogonalize_one_too
    torch.cuda.is_available = lambda: False  # or the hook waits for the GPU "cpu", and fails
    weights = []
    for wrap in (Ours, Theirs):
        model = wrap(net())
        model.register_comm_hook(powersgd_state(), hook)
        weights.append(train(model, rank, steps=6))
    plain = train(Theirs(net()), rank, steps=6)

    assert all(torch.equal(row, weights[0]) for row in everyones(weights[0]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)
    assert (weights[0] - plain).abs().max() > 1e-3  # so it has been compressed


@pytest.mark.parametrize("kind", [nn.Linear, nn.BatchNorm1d])
@ranks(2)
def test_nothing_of_ours_goes_out_while_a_hook_may_start_collectives_from_a_callback(
    rank: int, kind: type[nn.Module]
) -> None:
    """Or one rank sends it before what the callback sends, and another after it."""
    closed, started = threading.Event(), []

    def twice(state: None, bucket: Any) -> torch.futures.Future:
        """Start a collective, and another one from a thread, when the ranks have heard of each other."""
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future = torch.futures.Future()

        def again() -> None:
            work.wait()
            assert closed.wait(30)
            dist.all_reduce(bucket.buffer())
            started.append("callback")
            future.set_result(bucket.buffer() / 4)

        threading.Thread(target=again, daemon=True).start()
        return future

    module = nn.Linear(8, 4) if kind is nn.Linear else kind(8)
    model = paceline.replicate(module, hook=FromTorch(None, twice))
    hear, broadcast = Meeting.hear, GroupComm.broadcast

    def hear_and_go_on(meeting: Meeting, *args: Any) -> Any:
        tally = hear(meeting, *args)
        closed.set()
        return tally

    def broadcast_and_note(comm: GroupComm, *args: Any) -> Any:
        started.append("broadcast")
        return broadcast(comm, *args)

    with mock.patch.object(Meeting, "hear", hear_and_go_on):
        with mock.patch.object(GroupComm, "broadcast", broadcast_and_note):
            model(share(rank)).sum().backward()

    assert started[0] == "callback"
    assert started.count("broadcast") == 1 + len(list(model.buffers())[:1])


_orthogonalize = powerSGD_hook._orthogonalize


def _orthogonalize_one_too(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """Take one matrix for a batch of one. The batched hook gives one, which torch's own function refuses."""
    _orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


def stepping(kind: str, *, only: Any = None, **settings: float) -> Any:
    """Make torch's hook that reduces by a plain mean, and then steps what it has reduced."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # these are made by torch.jit
        from torch.distributed import optim

        optimizer = getattr(optim, kind)([], **settings, _allow_empty_param_list=True)
    return _hook_then_optimizer(default_hooks.allreduce_hook, _OptimizerHookState(optimizer, only))


@pytest.mark.parametrize("capped", [True, False])
@ranks(2)
def test_torchs_overlapped_optimizer_steps_inside_the_hook(rank: int, capped: bool) -> None:
    by_hook, by_hand = net(), net()
    model = Ours(by_hook, bucket_cap_mb=1e-4 if capped else None)
    model.register_comm_hook(None, stepping("_FunctionalAdam", lr=0.01))
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.01)

    for step in range(4):
        model.zero_grad()
        model(share(rank, step)).square().mean().backward()
        optimizer.zero_grad()
        by_hand(torch.cat([share(r, step) for r in range(2)])).square().mean().backward()
        optimizer.step()

    for stepped, expected in zip(by_hook.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(stepped, expected)
        torch.testing.assert_close(stepped.grad, expected.grad)


@ranks(2)
def test_torchs_overlapped_optimizer_steps_only_what_it_is_given(rank: int) -> None:
    module = net()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    model = Ours(module)
    model.register_comm_hook(None, stepping("_FunctionalSGD", lr=0.1, only=[module[0].weight]))

    model(share(rank)).square().mean().backward()

    expected = [before[0] - 0.1 * module[0].weight.grad, *before[1:]]
    for parameter, wanted in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted)


# ---- copies -----------------------------------------------------------------------------------------


@ranks(2)
def test_a_copy_shares_a_state_that_cannot_be_copied(rank: int) -> None:
    model = Ours(net())
    model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)

    twin = copy.deepcopy(model)

    assert paceline.replica(twin.module).hook.state is dist.group.WORLD
    assert torch.equal(train(twin, rank), train(model, rank))


@ranks(1)
def test_a_copy_has_a_state_of_its_own_where_that_can_be_copied(rank: int) -> None:
    held = {"groups": [dist.group.WORLD], "seen": [1]}
    shared, own = FromTorch(held, _doubled), FromTorch({"seen": held["seen"]}, _doubled)

    one, two, seen = copy.deepcopy([shared, own, held["seen"]])

    assert (one.state, one.hook, one.label) == (held, _doubled, shared.label)
    assert one.state is held
    assert two.state == own.state
    assert two.state["seen"] is seen is not held["seen"]


@ranks(2)
def test_a_hook_gets_everything_torchs_bucket_offers(rank: int) -> None:
    seen = []

    def hook(state: dict, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.data_ptr() >= bucket.buffer().data_ptr()
        bucket.set_buffer(bucket.buffer() / state["size"])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model = Ours(net(), bucket_cap_mb=1e-4)
    model.register_comm_hook({"size": 2}, hook)
    weights = train(model, rank)

    torch.testing.assert_close(weights, train(Theirs(net()), rank))
    last = [is_last for _, is_last, _ in seen[-4:]]
    assert last == [False, False, False, True]
    assert [index for index, _, _ in seen[-4:]] == [0, 1, 2, 3]


@ranks(2)
def test_hooks_are_swapped_between_steps(rank: int) -> None:
    model = Ours(net())
    handle = paceline.replica(model)
    doubled = FromTorch(None, _doubled)

    model(share(rank)).square().mean().backward()
    plain = model.module[0].weight.grad.clone()
    model.zero_grad()
    handle.set_hook(doubled)
    model(share(rank)).square().mean().backward()
    twice = model.module[0].weight.grad.clone()
    model.zero_grad()
    handle.set_hook(paceline.average)
    model(share(rank)).square().mean().backward()

    torch.testing.assert_close(twice, 4 * plain)  # a sum of two ranks, doubled
    torch.testing.assert_close(model.module[0].weight.grad, plain)


def _doubled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * 2)


@ranks(2)
def test_ranks_with_different_hooks_are_found_out(rank: int) -> None:
    model = Ours(net())
    if rank == 1:
        model.register_comm_hook(None, _doubled)

    with pytest.raises(paceline.RanksDisagree, match=r"_doubled \(torch's form\) \(rank 1\)"):
        model(share(rank)).sum().backward()


@ranks(2)
def test_the_builtin_hooks(rank: int) -> None:
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = Ours(net())
        model._register_builtin_comm_hook(kind)
        torch.testing.assert_close(train(model, rank), train(Theirs(net()), rank), rtol=0.01, atol=0.01)


# ---- bad input --------------------------------------------------------------------------------------


def _alone(bucket):
    return None


def _annotated_wrongly(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError


def _returns_wrongly(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError


@pytest.mark.parametrize(
    ("hook", "kind", "text"),
    [
        ({}, TypeError, "Communication hook must be callable. Give a function of (state, bucket), not dict"),
        (_alone, TypeError, "_alone has to take (state, bucket), but it is _alone(bucket)"),
        (
            _annotated_wrongly,
            ValueError,
            "Communication hook: bucket annotation should be dist.GradBucket. That of _annotated_wrongly is",
        ),
        (
            _returns_wrongly,
            ValueError,
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. That of",
        ),
    ],
)
def test_a_hook_is_checked_when_it_is_registered(hook: object, kind: type, text: str) -> None:
    with pytest.raises(kind) as caught:
        check_torch_hook(hook)

    assert text in str(caught.value)


@ranks(2)
def test_a_hook_that_returns_no_future_is_refused_on_every_rank(rank: int) -> None:
    model = Ours(net())
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer())

    with pytest.raises(
        RuntimeError, match=r"callback must return a torch.futures.Future object, but got Tensor"
    ):
        model(share(rank)).sum().backward()


@ranks(2)
def test_a_future_with_the_wrong_shape_is_refused_on_every_rank(rank: int) -> None:
    def short(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.zeros(3))
        return future

    model = Ours(net())
    model.register_comm_hook(None, short)

    with pytest.raises(TypeError, match="has to hold a tensor of the bucket's 212 elements, got 3"):
        model(share(rank)).sum().backward()


@pytest.mark.parametrize("when", ["at the call", "in the callback"])
@ranks(2)
def test_a_hook_that_raises_on_one_rank_is_heard_of_on_every_rank(rank: int, when: str) -> None:
    def broken(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 1 and when == "at the call":
            raise KeyError("no such codec")
        work = dist.all_reduce(bucket.buffer(), async_op=True)

        def decode(future: torch.futures.Future) -> torch.Tensor:
            if rank == 1:
                raise KeyError("no such codec")
            return future.value()[0]

        return work.get_future().then(decode)

    model = Ours(net())
    model.register_comm_hook(None, broken)

    with pytest.raises((KeyError, RuntimeError, paceline.PeerFailed)) as caught:
        model(share(rank)).sum().backward()

    assert "no such codec" in str(caught.value)
    if rank == 0:
        assert isinstance(caught.value, paceline.PeerFailed)
        assert "the communication hook raised on rank 1" in str(caught.value)
    # What was started on every rank has come to its end; a collective that rank 1 has not started never does.
    again = (
        (paceline.PeerLost, "no reduction is possible") if when == "at the call" else (RuntimeError, "codec")
    )
    with pytest.raises(again[0], match=again[1]):
        model(share(rank)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


@ranks(2)
def test_a_hook_beside_mixed_precision_is_refused(rank: int) -> None:
    model = Ours(net(), mixed_precision=paceline.Precision(param=torch.bfloat16))

    with pytest.raises(ValueError, match="mixed_precision reduces by a hook of its own"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


@ranks(2)
def test_a_hook_is_not_swapped_inside_a_backward(rank: int) -> None:
    model = paceline.replicate(net())
    handle = paceline.replica(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: handle.set_hook(paceline.average))

    with pytest.raises(RuntimeError, match="the hook cannot be changed while a backward is running"):
        model(share(rank)).sum().backward()
