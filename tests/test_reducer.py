"""The reducer: what every rank holds after backward is the gradient of the whole batch."""

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.backward import SyncedBackward
from paceline.shelf import Packet
from paceline.testing import ranks
from paceline.watches.engine import engine_watch

SIZE = 2
ARRIVED = SyncedBackward.arrived


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(rows: int = 8, width: int = 6) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7))


def share(whole: torch.Tensor, rank: int, size: int = SIZE) -> torch.Tensor:
    return whole.chunk(size)[rank]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def assert_same(got: dict[str, torch.Tensor | None], reference: dict[str, torch.Tensor | None]) -> None:
    assert got.keys() == reference.keys()
    for name, expected in reference.items():
        if expected is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], expected, msg=lambda text, name=name: f"{name}: {text}")


def reference(model: nn.Module, run: Callable[[nn.Module], None]) -> dict[str, torch.Tensor | None]:
    alone = copy.deepcopy(model)
    run(alone)
    return gradients(alone)


@ranks(2)
def test_every_rank_gets_the_gradient_of_the_whole_batch(rank: int) -> None:
    model = mlp()
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    paceline.replicate(model)

    loss_of(model, share(batch(), rank)).backward()

    assert_same(gradients(model), expected)


@ranks(2)
@pytest.mark.parametrize("bucket_mb", [1e-9, 1e-4, 1, [1e-4, 1e-3, 1]])
def test_any_bucket_size_trains_the_same(rank: int, bucket_mb: float) -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=bucket_mb)
    optimizer, other = torch.optim.Adam(model.parameters()), torch.optim.Adam(alone.parameters())

    for step in range(4):
        x = batch() + step
        loss_of(model, share(x, rank)).backward()
        loss_of(alone, x).backward()
        assert_same(gradients(model), gradients(alone))
        for o in (optimizer, other):
            o.step()
            o.zero_grad()


@ranks(2)
def test_accumulation_reduces_once_and_equals_the_whole(rank: int) -> None:
    model = mlp()

    def whole(m: nn.Module) -> None:
        for i in range(3):
            loss_of(m, batch() + i).backward()

    expected = reference(model, whole)
    paceline.replicate(model)
    handle = paceline.replica(model)

    with handle.no_sync():
        for i in range(2):
            loss_of(model, share(batch() + i, rank)).backward()
    loss_of(model, share(batch() + 2, rank)).backward()

    assert_same(gradients(model), expected)
    assert handle.step == 1


@ranks(2)
@pytest.mark.parametrize("counts", [(3, 3), (2, 3), (3, 0), (4, 4)])
def test_accumulate_reduces_in_the_last_backward_or_at_the_end_of_the_block(
    rank: int, counts: tuple[int, int]
) -> None:
    model = mlp()

    def whole(m: nn.Module) -> None:
        for r in range(2):
            for i in range(counts[r]):
                (loss_of(m, share(batch() + i, r)) / 2).backward()

    expected = reference(model, whole)
    paceline.replicate(model)

    with paceline.accumulate(model, micro_batches=3):
        for i in range(counts[rank]):
            loss_of(model, share(batch() + i, rank)).backward()

    assert_same(gradients(model), expected)


def fresh_backward(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    loss_of(model, x).backward()


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_both_kinds(rank: int, set_to_none: bool) -> None:
    model = mlp()
    paceline.replicate(model, bucket_mb=1e-3)

    for step in range(4):
        x = batch() + step
        expected = reference(model, lambda m, x=x: fresh_backward(m, x))
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, share(x, rank)).backward()
        assert_same(gradients(model), expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.table(tokens))))


@ranks(2)
def test_tied_parameters(rank: int) -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(8).view(8, 1)
    expected = reference(model, lambda m: loss_of(m, tokens).backward())
    paceline.replicate(model)

    loss_of(model, share(tokens, rank)).backward()

    assert_same(gradients(model), expected)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=dtype)
    paceline.replicate(model)
    x = torch.full((2, 4), rank + 1).to(dtype)

    model(x).abs().sum().backward()

    mine = model.weight.grad.clone()
    parts = [torch.zeros_like(mine) for _ in range(2)]
    torch.distributed.all_gather(parts, mine)
    assert torch.equal(parts[0], parts[1])
    alone = copy.deepcopy(model)
    alone.zero_grad()
    (sum(alone(torch.full((2, 4), r + 1).to(dtype)).abs().sum() for r in range(2)) / 2).backward()
    torch.testing.assert_close(mine, alone.weight.grad, rtol=2e-2, atol=2e-2)


@ranks(2)
def test_mixed_dtypes_in_one_module(rank: int) -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()])
    paceline.replicate(model)

    loss = sum(
        layer(torch.full((1, 4), rank + 1.0, dtype=layer.weight.dtype)).sum().double() for layer in model
    )
    loss.backward()

    for layer in model:
        assert layer.weight.grad.dtype == layer.weight.dtype
        torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, 1.5))


@ranks(2)
def test_channels_last_gradients_keep_the_parameters_strides(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    model.register_parameter("slanted", nn.Parameter(torch.randn(5, 7).t()))
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))

    def run(m: nn.Module, x: torch.Tensor) -> None:
        (loss_of(m, x) + (m.slanted * torch.arange(35.0).view(7, 5)).sum() * x.mean()).backward()

    expected = reference(model, lambda m: run(m, x))
    paceline.replicate(model, bucket_mb=1e-3)

    for _ in range(2):
        model.zero_grad()
        run(model, share(x, rank))
        assert_same(gradients(model), expected)
        assert all(p.grad.stride() == p.stride() for p in model.parameters())


@ranks(2)
def test_create_graph_gives_the_penalty_of_the_whole_batch(rank: int) -> None:
    model = mlp()

    def run(m: nn.Module, x: torch.Tensor) -> None:
        loss_of(m, x).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in m.parameters())
        for p in m.parameters():
            p.grad = None
        penalty.backward()

    with pytest.warns(UserWarning, match="create_graph"):
        expected = reference(model, lambda m: run(m, batch()))
        paceline.replicate(model)
        run(model, share(batch(), rank))

    assert_same(gradients(model), expected)


@ranks(2)
def test_gradient_penalty_through_autograd_grad(rank: int) -> None:
    model = mlp()

    def run(m: nn.Module, x: torch.Tensor) -> None:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        slope.square().mean().backward()

    expected = reference(model, lambda m: run(m, batch()))
    paceline.replicate(model)

    run(model, share(batch(), rank))

    assert_same(gradients(model), expected)


@ranks(2)
def test_clipping_and_foreach_and_fused_optimizers(rank: int) -> None:
    for extra in ({"foreach": True}, {"fused": True}):
        model = mlp()
        alone = copy.deepcopy(model)
        paceline.replicate(model)
        optimizers = [torch.optim.AdamW(m.parameters(), **extra) for m in (model, alone)]
        for step in range(3):
            for m, o, x in zip((model, alone), optimizers, (share(batch(), rank), batch()), strict=True):
                loss_of(m, x + step).backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.01)
                o.step()
                o.zero_grad()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_lbfgs_runs_its_closure_many_times(rank: int) -> None:
    model = mlp()
    alone = copy.deepcopy(model)
    paceline.replicate(model)

    for m, x in ((model, share(batch(), rank)), (alone, batch())):
        optimizer = torch.optim.LBFGS(m.parameters(), max_iter=4, lr=0.1)

        def closure(m: nn.Module = m, x: torch.Tensor = x, optimizer: torch.optim.Optimizer = optimizer):
            optimizer.zero_grad()
            loss = loss_of(m, x)
            loss.backward()
            whole = loss.detach().clone()
            if m is model:
                torch.distributed.all_reduce(whole)
                whole /= 2
            return whole

        for _ in range(2):
            optimizer.step(closure)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_grad_scaler_skips_on_every_rank_when_one_has_an_infinity(rank: int) -> None:
    model = mlp()
    paceline.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(model.state_dict())

    for poison in (True, False):
        loss = loss_of(model, share(batch(), rank))
        scaler.scale(loss * (float("inf") if poison and rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        unchanged = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert unchanged is poison


@ranks(2)
def test_two_models_trained_against_each_other(rank: int) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    alone = copy.deepcopy(models)
    for m in models:
        paceline.replicate(m)

    def rounds(maker: nn.Module, judge: nn.Module, noise: torch.Tensor) -> None:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge)]
        for _ in range(3):
            judge.zero_grad()
            (judge(maker(noise).detach()).mean() - judge(noise).mean()).backward()
            optimizers[1].step()
            maker.zero_grad()
            (-judge(maker(noise)).mean()).backward()  # reaches both models
            optimizers[0].step()

    noise = batch(8, 4)
    rounds(*models, share(noise, rank))
    rounds(*alone, noise)
    for m, a in zip(models, alone, strict=True):
        for p, q in zip(m.parameters(), a.parameters(), strict=True):
            torch.testing.assert_close(p, q)


@ranks(2)
def test_backward_started_from_another_thread(rank: int) -> None:
    model = mlp()
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    paceline.replicate(model)
    loss = loss_of(model, share(batch(), rank))

    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()

    assert_same(gradients(model), expected)


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(rank: int, reentrant: bool) -> None:
    torch.manual_seed(0)
    layer, head = nn.Linear(6, 6), nn.Linear(6, 3)
    model = nn.ModuleList([layer, head])

    def run(m: nn.ModuleList, x: torch.Tensor, *, with_head: bool) -> None:
        x = x.clone().requires_grad_()
        y = checkpoint(m[0], x, use_reentrant=reentrant)
        y = checkpoint(m[0], torch.tanh(y), use_reentrant=reentrant)
        (m[1](y) if with_head else y).square().mean().backward()

    expected = [reference(model, lambda m, h=h: run(m, batch(), with_head=h)) for h in (True, False)]
    paceline.replicate(model, bucket_mb=1e-6)

    for with_head, wanted in zip((True, False), expected, strict=True):
        model.zero_grad()
        run(model, share(batch(), rank), with_head=with_head)
        assert_same(gradients(model), wanted)


@ranks(2)
def test_a_parameter_no_rank_used_keeps_its_earlier_value_untouched(rank: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    paceline.replicate(model)
    model["a"](share(batch(8, 4), rank)).sum().backward()
    assert model["b"].weight.grad is None
    earlier = model["a"].weight.grad.clone()

    model["b"](share(batch(8, 4), rank)).sum().backward()

    assert torch.equal(model["a"].weight.grad, earlier)
    assert model["b"].weight.grad is not None


@ranks(3)
def test_a_parameter_that_one_rank_used_gets_a_gradient_everywhere(rank: int) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    paceline.replicate(model)
    x = torch.ones(1, 4)

    (model["a"](x).sum() + (model["b"](x).sum() if rank == 1 else 0.0)).backward()

    torch.testing.assert_close(model["b"].weight.grad, torch.full((4, 4), 1 / 3))
    torch.testing.assert_close(model["a"].weight.grad, torch.ones(4, 4))


@ranks(2)
def test_the_plan_follows_the_arrival_order_after_the_first_step(rank: int) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)))

    model = paceline.replicate(Backwards())
    names = [spec.name for spec in paceline.replica(model).plan.specs]
    assert [names[i] for i in paceline.replica(model).plan.order] == [
        "first.weight",
        "middle.weight",
        "last.weight",
    ]

    model(torch.ones(1, 4)).sum().backward()

    assert [names[i] for i in paceline.replica(model).plan.order] == [
        "last.weight",
        "middle.weight",
        "first.weight",
    ]


class Chain(nn.Module):
    """Three layers, run in the order that a call asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, order: str) -> torch.Tensor:
        x = torch.ones(1, 4)
        for name in order:
            x = getattr(self, name)(x)
        return x.sum()


def planned(model: nn.Module) -> str:
    """Return the layers of a chain as its plan has them."""
    plan = paceline.replica(model).plan
    return "".join(plan.specs[index].name[0] for index in plan.order)


@ranks(3)
def test_where_the_orders_of_arrival_differ_all_ranks_take_rank_0s(rank: int) -> None:
    model = paceline.replicate(Chain())

    model(["bca", "cba", "abc"][rank]).backward()

    assert planned(model) == "acb"


@ranks(3)
def test_a_rank_0_without_a_gradient_leaves_the_order_to_the_next_one_that_has_some(rank: int) -> None:
    model = paceline.replicate(Chain())

    with paceline.join(model):
        if rank > 0:
            model(["", "bca", "abc"][rank]).backward()

    assert planned(model) == "acb"


@ranks(2)
def test_no_order_is_sent_where_no_rank_has_a_gradient(rank: int) -> None:
    model = paceline.replicate(Chain())
    paceline.skip(model)
    assert not paceline.replica(model).reducer.is_plan_learned

    model("bca").backward()

    assert planned(model) == "acb"


@ranks(2)
def test_the_order_is_learned_after_a_first_backward_that_has_failed(rank: int) -> None:
    model = paceline.replicate(Chain())
    with pytest.raises(ZeroDivisionError if rank == 0 else paceline.PeerFailed):
        output = model("bca")
        if rank == 0:
            model.b.weight.register_hook(lambda gradient: 1 / 0)
        output.backward()
    assert not paceline.replica(model).reducer.is_plan_learned
    model.b.weight._backward_hooks.clear() if rank == 0 else None

    model("bca").backward()

    assert planned(model) == "acb"


@ranks(2)
def test_a_rank_that_knows_its_plan_follows_the_others_that_learn_theirs(rank: int) -> None:
    model = paceline.replicate(Chain())
    if rank == 1:
        paceline.replica(model).reducer._planner.is_guess = False  # as after loading what only it has

    for _ in range(2):
        model("bca").backward()

    assert planned(model) == "acb"


@ranks(2)
def test_a_profile_shows_the_order_going_out_and_the_search_for_unused_parameters(rank: int) -> None:
    model = paceline.replicate(Chain())
    with torch.autograd.profiler.profile() as first:
        model("bca").backward()
    with torch.autograd.profiler.profile() as second:
        model("bca").backward()

    names = [[event.name for event in profile.function_events] for profile in (first, second)]
    assert [each.count("gloo:broadcast") for each in names] == [1, 0]
    assert [each.count("gloo:all_reduce") for each in names] == [1, 1]
    assert [each.count("paceline::search_unused_parameters") for each in names] == [1, 1]


@ranks(2)
def test_slots_that_are_often_missing_move_to_the_end_of_the_plan(rank: int) -> None:
    model = nn.ModuleDict({"rare": nn.Linear(4, 4, bias=False), "often": nn.Linear(4, 4, bias=False)})
    paceline.replicate(model)
    x = torch.ones(1, 4)
    for step in range(12):
        model.zero_grad()
        y = model["often"](x)
        (model["rare"](y) if step == 0 else y).sum().backward()

    plan = paceline.replica(model).plan
    assert [plan.specs[i].name for i in plan.order] == ["often.weight", "rare.weight"]


@ranks(2)
def test_no_gradient_memory_is_held_between_steps(rank: int) -> None:
    model = paceline.replicate(mlp())
    loss_of(model, share(batch(), rank)).backward()
    storages = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters()]
    flat = weakref.ref(model[0].weight.grad._base)
    gc.disable()

    model.zero_grad()

    # Gloo's own thread may hold on to a finished operation for a moment.
    deadline = time.monotonic() + 10
    while flat() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert flat() is None
    assert all(ref() is None for ref in storages)


@ranks(2)
def test_gradients_of_one_bucket_share_one_buffer(rank: int) -> None:
    model = paceline.replicate(mlp())

    loss_of(model, share(batch(), rank)).backward()

    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == len(
        paceline.replica(model).plan.buckets
    )


@ranks(2)
def test_accumulating_again_reduces_in_place(rank: int) -> None:
    model = paceline.replicate(mlp())
    loss_of(model, share(batch(), rank)).backward()
    loss_of(model, share(batch(), rank)).backward()
    before = [p.grad.data_ptr() for p in model.parameters()]

    loss_of(model, share(batch(), rank)).backward()

    assert [p.grad.data_ptr() for p in model.parameters()] == before


@ranks(2)
def test_a_loss_that_uses_no_parameter_of_the_replica_opens_nothing(rank: int) -> None:
    model = paceline.replicate(mlp())
    other = nn.Linear(2, 2)

    other(torch.ones(1, 2)).sum().backward()

    assert paceline.replica(model).step == 0


class Two(nn.Module):
    """Two replicated halves of one graph, which ranks may run in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, a_first: bool) -> torch.Tensor:
        first, second = (self.a, self.b) if a_first else (self.b, self.a)
        return second(torch.tanh(first(x)))


@ranks(2)
@pytest.mark.parametrize("bucket_mb", [25, 1e-6])
def test_one_backward_through_two_replicas(rank: int, bucket_mb: float) -> None:
    torch.manual_seed(0)
    model = Two()
    expected = reference(model, lambda m: m(batch(), a_first=True).square().mean().backward())
    for part in (model.a, model.b):
        paceline.replicate(part, bucket_mb=bucket_mb)

    for _ in range(3):
        model.zero_grad()
        model(share(batch(), rank), a_first=True).square().mean().backward()
        assert_same(gradients(model), expected)


@ranks(2)
def test_two_replicas_in_one_backward_that_end_in_different_orders(rank: int) -> None:
    """The ends meet in the order of the replicas' names, whatever was reached first."""
    torch.manual_seed(0)
    model = Two()
    for part in (model.a, model.b):
        paceline.replicate(part)
        paceline.replica(part).reducer._held.update((0, 1))  # everything goes out at the end of the backward

    def run(m: nn.Module, r: int) -> torch.Tensor:
        return m(share(batch(), r), a_first=r == 0).square().mean()

    expected = reference(model, lambda m: ((run(m, 0) + run(m, 1)) / 2).backward())
    run(model, rank).backward()

    assert_same(gradients(model), expected)


@ranks(2)
def test_buckets_sent_in_different_orders_are_found_out(rank: int) -> None:
    model = paceline.replicate(mlp())
    paceline.replica(model).reducer._wiring.control.note(b"something else" if rank else b"something")

    with pytest.raises(paceline.RanksDisagree, match="started the buckets of several models, or a bucket"):
        loss_of(model, share(batch(), rank)).backward()
    assert model[0].weight.grad is None
    loss_of(model, share(batch(), rank)).backward()
    assert model[0].weight.grad is not None


def spy_on(method: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def spy(backward: object, parameter: int) -> None:
        calls.append(parameter)
        method(backward, parameter)

    return spy


def assert_step_is_that_of_one_process(model: nn.Module, alone: nn.Module, rank: int) -> None:
    model.zero_grad()
    alone.zero_grad()
    loss_of(model, share(batch(), rank)).backward()
    loss_of(alone, batch()).backward()
    assert_same(gradients(model), gradients(alone))


class Wandering(nn.Module):
    """Many small layers, used in an order that the batch decides."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.order = list(range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = x + 0.1 * self.layers[number](x).tanh()
        return x


@ranks(2)
@pytest.mark.parametrize("bucket_mb", [25, 0.002])
def test_gradients_that_come_in_another_order_than_was_learned_are_reduced(
    rank: int, bucket_mb: float
) -> None:
    model = Wandering()
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=bucket_mb)
    for step in range(6):
        if step > 1:
            model.order = alone.order = torch.randperm(
                20, generator=torch.Generator().manual_seed(step)
            ).tolist()
        assert_step_is_that_of_one_process(model, alone, rank)


@ranks(2)
def test_layers_left_out_after_the_order_was_learned_keep_no_gradient(rank: int) -> None:
    model = Wandering()
    alone = copy.deepcopy(model)
    paceline.replicate(model)
    for used in (range(20), range(20), range(0, 20, 3), [19], range(20)):
        model.order = alone.order = list(used)
        assert_step_is_that_of_one_process(model, alone, rank)


@ranks(2)
def test_most_small_gradients_are_only_noted_once_the_order_is_known(rank: int) -> None:
    model = Wandering()
    paceline.replicate(model)
    reducer = paceline.replica(model).reducer
    heard: list[int] = []
    for _ in range(2):
        loss_of(model, share(batch(), rank)).backward()
        model.zero_grad()
    loss = loss_of(model, share(batch(), rank))

    with mock.patch.object(SyncedBackward, "arrived", spy_on(SyncedBackward.arrived, heard)):
        loss.backward()

    assert len(heard) == 2 + 1  # of 40: every 32nd, and the last one
    assert reducer.recorder.last is not None
    assert sorted(reducer.recorder.last.arrival) == list(range(40))


class Tower(nn.Module):
    """Layers whose weights are large enough to be copied as they come, and a small bias between them."""

    def __init__(self, layers: int = 20) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@ranks(2)
def test_most_large_gradients_are_copied_as_they_come_and_nothing_else_once_the_order_is_known(
    rank: int,
) -> None:
    model, alone = Tower(), Tower()
    paceline.replicate(model, bucket_mb=25)
    heard: list[int] = []
    copied: list[int] = []
    for _ in range(2):
        loss_of(model, share(batch(width=128), rank)).backward()
        model.zero_grad()
    loss = loss_of(model, share(batch(width=128), rank))

    with (
        mock.patch.object(SyncedBackward, "arrived", spy_on(SyncedBackward.arrived, heard)),
        mock.patch.object(Packet, "take", spy_on(Packet.take, copied)),
    ):
        loss.backward()

    large = {i for i, p in enumerate(model.parameters()) if p.dim() == 2}
    assert len(heard) == 2 + 1  # of 40: every 32nd, and the last one
    assert len(copied) == len(large - set(heard))
    loss_of(alone, batch(width=128)).backward()
    assert_same(gradients(model), gradients(alone))


@ranks(2)
def test_what_a_later_hook_puts_in_the_place_of_a_copied_gradient_does_not_stay_there(rank: int) -> None:
    model, alone = Tower(), Tower()
    paceline.replicate(model, bucket_mb=25)
    weight = model.layers[9].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    for _ in range(2):
        loss_of(model, share(batch(width=128), rank)).backward()
        model.zero_grad()
    loss_of(alone, batch(width=128)).backward()

    node.register_hook(lambda *_: setattr(weight, "grad", torch.zeros_like(weight)))
    loss_of(model, share(batch(width=128), rank)).backward()

    assert_same(gradients(model), gradients(alone))


def learned(rank: int) -> Any:
    """Return the reducer of a model whose order of arrival is known."""
    model = Wandering()
    paceline.replicate(model)
    for _ in range(2):
        loss_of(model, share(batch(), rank)).backward()
        model.zero_grad()
    reducer = paceline.replica(model).reducer
    reducer.keeps = model  # it lives as long as the reducer does
    return reducer


def parts_of(reducer: Any) -> tuple[Any, ...]:
    record = reducer.recorder.start(reducer.step, in_backward=False)
    return reducer._wiring, reducer._planner.layout, record, set(), set(), None


@ranks(2)
def test_a_bucket_that_is_being_sent_is_not_sent_again_by_another_thread(rank: int) -> None:
    reducer = learned(rank)
    backward = SyncedBackward(*parts_of(reducer))
    backward.seen.update(dict.fromkeys(reducer._planner.layout.plan.order))
    backward._waiting = [0] * len(backward._waiting)
    sent: list[int] = []

    def send_next(*, complete: bool) -> None:
        assert complete
        sent.append(len(backward._flights))
        backward.hurry()  # another replica's first gradient comes meanwhile
        backward._flights.append(mock.Mock())

    with mock.patch.object(backward, "_send_next", send_next):
        backward.hurry()

    assert sent == list(range(len(backward._waiting)))


def sent_when_they_came(rank: int, lateness: float, *, on_gpu: bool) -> list[tuple[int, int]]:
    """Run a backward for which rank 1 is late.

    Return, for each gradient, the buckets that were complete then, and those that were out.
    """
    model = Wandering()
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=0.002)
    for _ in range(3):  # the buckets follow the order of arrival then
        assert_step_is_that_of_one_process(model, alone, rank)
    paceline.replica(model).reducer._planner.layout.is_on_gpu = on_gpu
    counts: list[tuple[int, int]] = []

    def spy(self: SyncedBackward, parameter: int) -> None:
        ARRIVED(self, parameter)
        counts.append((self._waiting.count(0), len(self._flights)))

    with mock.patch.object(SyncedBackward, "arrived", spy):
        time.sleep(lateness * rank)
        assert_step_is_that_of_one_process(model, alone, rank)
    return counts


@ranks(2)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_rank_that_is_ahead_puts_no_bucket_off(rank: int, on_gpu: bool) -> None:
    counts = sent_when_they_came(rank, 0.3, on_gpu=on_gpu)

    assert len(counts) > 3
    assert [out for _, out in counts] == [complete for complete, _ in counts]


@ranks(2)
def test_on_a_gpu_a_rank_goes_on_computing_while_another_backward_may_need_its_thread(rank: int) -> None:
    with mock.patch.object(engine_watch, "has_one_backward", return_value=False):
        counts = sent_when_they_came(rank, 0.6, on_gpu=True)

    if rank == 0:
        assert counts[-1][0] > 1
        assert {out for _, out in counts} == {0}


@ranks(2)
def test_backwards_under_way_are_counted_on_all_threads(rank: int) -> None:
    weight, counts = torch.ones(2, requires_grad=True), []
    model = paceline.replicate(nn.Linear(2, 2))  # somebody listens
    meet = threading.Barrier(2)

    def run() -> None:
        total = weight.clone().sum()
        total.register_hook(
            lambda _: (meet.wait(10), counts.append(engine_watch.has_one_backward()), meet.wait(10))
        )
        total.backward()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counts == [False, False]
    assert engine_watch.has_one_backward()
    del model
