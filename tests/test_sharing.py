"""Modules that share parameters: the first replica reduces them for all."""

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.errors import PeerFailed, RanksDisagree, UnsyncedGradients
from paceline.hooks import powersgd
from paceline.registry import registry
from paceline.testing import ranks

ROWS = 8


class Headed(nn.Module):
    """A body, which may be another module's, and a head of its own."""

    def __init__(self, body: nn.Module, outputs: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(6, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("a batch that nobody can learn from")
        return self.head(torch.tanh(self.body(x)))


def pair() -> tuple[Headed, Headed]:
    torch.manual_seed(2)
    body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))
    return Headed(body, 3), Headed(body, 1)


def rows(step: int, rank: int | None = None) -> torch.Tensor:
    whole = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
    return whole if rank is None else whole.chunk(2)[rank]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def train(models: tuple[nn.Module, nn.Module], rank: int | None, steps: int = 6) -> None:
    """Train two models in turns."""
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for step in range(steps):
        optimizers[step % 2].zero_grad()
        loss_of(models[step % 2], rows(step, rank)).backward()
        optimizers[step % 2].step()


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def assert_equal_weights(models: tuple[nn.Module, nn.Module], alone: tuple[nn.Module, nn.Module]) -> None:
    for model, reference in zip(models, alone, strict=True):
        for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@ranks(2)
@pytest.mark.parametrize("bucket_mb", [1e-5, 25])
def test_two_heads_on_one_body_train_as_in_one_process(rank: int, bucket_mb: float) -> None:
    models, alone = pair(), pair()
    for model in models:
        paceline.replicate(model, bucket_mb=bucket_mb)

    train(models, rank)
    train(alone, None)

    assert_equal_weights(models, alone)


@ranks(2)
@pytest.mark.parametrize("wrap", [TorchDDP, paceline.DistributedDataParallel])
def test_two_wrappers_around_one_body_train_as_torchs_do(rank: int, wrap: Any) -> None:
    models, alone = pair(), pair()
    wrapped = (wrap(models[0]), wrap(models[1]))

    train(wrapped, rank)
    train(alone, None)

    assert_equal_weights(models, alone)


@ranks(2)
def test_one_backward_of_both_losses(rank: int) -> None:
    models, alone = pair(), pair()
    for model in models:
        paceline.replicate(model)

    for step in range(3):
        for each, x in ((models, rows(step, rank)), (alone, rows(step))):
            for model in each:
                model.zero_grad()
            (loss_of(each[0], x) + loss_of(each[1], x)).backward()
        for model, reference in zip(models, alone, strict=True):
            assert_equal_gradients(model, reference)


@ranks(2)
@pytest.mark.parametrize("how", ["no_sync", "accumulate", "by hand", "weight"])
def test_what_surrounds_a_backward_of_the_second_holds_for_the_shared_body_too(rank: int, how: str) -> None:
    models, alone = pair(), pair()
    paceline.replicate(models[0])
    second: Any = models[1]
    if how == "by hand":
        second = paceline.DistributedDataParallel(second)
    else:
        paceline.replicate(second)
    body = models[0].body[0].weight

    first, then = rows(0, rank), rows(1, rank)
    if how == "no_sync":
        with paceline.no_sync(second):
            loss_of(second, first).backward()
            assert paceline.replica(models[0]).step == 0
            with pytest.raises(UnsyncedGradients, match="body"):
                torch.optim.SGD([body], lr=0.1).step()
        loss_of(second, then).backward()
    elif how == "accumulate":
        with paceline.accumulate(second, micro_batches=2):
            loss_of(second, first).backward()
            loss_of(second, then).backward()
    elif how == "by hand":
        second.require_backward_grad_sync = False
        loss_of(second, first).backward()
        assert paceline.replica(models[0]).step == 0
        second.require_backward_grad_sync = True
        loss_of(second, then).backward()
    else:
        with paceline.weight(second, 3 if rank else 1):
            loss_of(second, then).backward()

    if how == "weight":
        (loss_of(alone[1], rows(1, 0)) / 4 + loss_of(alone[1], rows(1, 1)) * 3 / 4).backward()
    else:
        (loss_of(alone[1], rows(0)) + loss_of(alone[1], rows(1))).backward()
    assert_equal_gradients(models[1], alone[1])


@ranks(2)
def test_the_body_is_reduced_on_when_the_first_wrapper_and_its_module_are_gone(rank: int) -> None:
    models, alone = pair(), pair()
    first: Any = paceline.DistributedDataParallel(models[0])
    second = models[1]
    paceline.replicate(second)

    del first, models
    if rank:  # collected when it may be, on one rank only
        gc.collect()
    loss_of(second, rows(0, rank)).backward()
    loss_of(alone[1], rows(0)).backward()

    assert_equal_gradients(second, alone[1])


@ranks(2)
def test_nothing_is_left_when_the_last_of_them_is_gone(rank: int) -> None:
    before = len(registry)
    first, second = pair()
    body = first.body
    paceline.replicate(first)
    paceline.replicate(second)

    del first
    del second
    gc.collect()

    assert len(registry) == before
    loss_of(body, rows(0, rank)).backward()  # this rank's own: the hooks are off
    alone = copy.deepcopy(body)
    alone.zero_grad()
    loss_of(alone, rows(0, rank)).backward()
    torch.testing.assert_close(body[0].weight.grad, alone[0].weight.grad)


@ranks(2)
def test_the_first_module_can_be_wrapped_again(rank: int) -> None:
    models, alone = pair(), pair()
    first: Any = paceline.DistributedDataParallel(models[0])
    second: Any = paceline.DistributedDataParallel(models[1])
    old = first

    first = paceline.DistributedDataParallel(models[0], bucket_cap_mb=1e-5)
    train((first, second), rank)
    del old, first
    first = paceline.DistributedDataParallel(models[0])
    train((first, second), rank)

    train(alone, None)
    train(alone, None)
    assert_equal_weights(models, alone)


@ranks(2)
def test_the_second_module_can_be_wrapped_again_when_the_first_is_gone(rank: int) -> None:
    models, alone = pair(), pair()
    first: Any = paceline.DistributedDataParallel(models[0])
    second: Any = paceline.DistributedDataParallel(models[1])

    del first
    old, second = second, paceline.DistributedDataParallel(models[1])
    del old
    loss_of(second, rows(0, rank)).backward()
    loss_of(alone[1], rows(0)).backward()

    assert_equal_gradients(models[1], alone[1])


@ranks(2)
@pytest.mark.parametrize("gone", [[0, 1], [1, 0]])
def test_of_a_chain_of_replicas_only_those_go_on_that_somebody_needs(rank: int, gone: list[int]) -> None:
    torch.manual_seed(3)
    x, y = nn.Linear(5, 5), nn.Linear(5, 5)
    chain: list[Any] = [nn.Sequential(x), nn.Sequential(x, y), nn.Sequential(y)]
    for model in chain:
        paceline.replicate(model)
    for number in gone:
        chain[number] = None
        gc.collect()

    last = paceline.replicate(nn.Sequential(x))
    for model in (chain[2], last):
        alone = copy.deepcopy(model)
        loss_of(model, rows(0, rank)).backward()
        loss_of(alone, rows(0)).backward()
        assert_equal_gradients(model, alone)


@ranks(2)
def test_the_first_one_does_not_change_what_the_second_relies_on(rank: int) -> None:
    first, second = pair()
    paceline.replicate(first)
    paceline.replicate(second)
    handle = paceline.replica(first)
    shared = (
        "not for this Headed: it reduces parameters that it shares with Headed, which was replicated later"
    )

    with pytest.raises(ValueError, match=f"Another group is {shared}"):
        handle.change_group(dist.group.WORLD)
    with pytest.raises(ValueError, match=f"An optimizer inside backward is {shared}"):
        handle.step_in_backward(torch.optim.SGD(first.parameters(), lr=0.1))


@ranks(2)
def test_three_modules_in_a_row(rank: int) -> None:
    torch.manual_seed(3)
    parts = [nn.Linear(5, 5) for _ in range(4)]
    chain = [nn.Sequential(one, other) for one, other in itertools.pairwise(parts)]
    alone = copy.deepcopy(nn.ModuleList(chain))
    for model in chain:
        paceline.replicate(model)

    for step in range(3):
        for number, model in enumerate(chain):
            model.zero_grad()
            loss_of(model, rows(step, rank)).backward()
            alone[number].zero_grad()
            loss_of(alone[number], rows(step)).backward()
            assert_equal_gradients(model, alone[number])


@ranks(2)
def test_a_module_that_leaves_everything_to_another(rank: int) -> None:
    first, _ = pair()
    same = nn.ModuleDict({"body": first.body, "head": first.head})
    alone = copy.deepcopy(first)
    paceline.replicate(first)
    paceline.replicate(same)

    with paceline.no_sync(same):
        loss_of(first, rows(0, rank)).backward()
    loss_of(first, rows(1, rank)).backward()

    loss_of(alone, rows(0)).backward()
    loss_of(alone, rows(1)).backward()
    assert_equal_gradients(same, alone)


@ranks(2)
def test_a_layer_added_to_the_second_is_reduced_and_the_body_stays_with_the_first(rank: int) -> None:
    first, second = pair()
    paceline.replicate(first)
    paceline.replicate(second)
    loss_of(second, rows(0, rank)).backward()
    second.zero_grad()

    torch.manual_seed(rank)
    second.head = nn.Sequential(second.head, nn.Linear(1, 1))
    second(rows(1, rank))  # noticed here: the new layer starts as rank 0's
    alone = copy.deepcopy(second)
    loss_of(second, rows(1, rank)).backward()

    loss_of(alone, rows(1)).backward()
    assert_equal_gradients(second, alone)


@ranks(2)
def test_a_body_taken_out_of_the_first_stays_reduced_for_the_second(rank: int) -> None:
    first, second = pair()
    paceline.replicate(first)
    paceline.replicate(second)
    alone = copy.deepcopy(second)

    torch.manual_seed(4)
    first.body = nn.Linear(5, 6)
    loss_of(first, rows(0, rank)).backward()
    loss_of(second, rows(1, rank)).backward()

    loss_of(alone, rows(1)).backward()
    assert_equal_gradients(second, alone)


@ranks(2)
def test_the_norm_of_the_second_is_that_of_all_its_gradients(rank: int) -> None:
    first, second = pair()
    paceline.replicate(first)
    paceline.replicate(second)
    (loss_of(first, rows(0, rank)) + loss_of(second, rows(0, rank))).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in second.parameters()])

    torch.testing.assert_close(paceline.replica(second).grad_norm(), expected)
    torch.testing.assert_close(paceline.replica(second).clip_grad_norm_(0.1), expected)

    torch.testing.assert_close(paceline.replica(second).grad_norm(), torch.tensor(0.1))
    with paceline.no_sync(second):
        loss_of(second, rows(0, rank)).backward()
    with pytest.raises(UnsyncedGradients):
        paceline.replica(second).grad_norm()


@ranks(2)
def test_a_forward_of_the_second_that_raises_on_one_rank_is_heard_of_and_training_goes_on(rank: int) -> None:
    models, alone = pair(), pair()
    for model in models:
        paceline.replicate(model)
    bad = torch.full((4, 5), float("nan"))

    with pytest.raises(ValueError if rank else PeerFailed, match="nobody can learn from"):
        loss_of(models[1], bad if rank else rows(9, rank)).backward()
    for model in models:
        model.zero_grad()

    train(models, rank)
    train(alone, None)
    assert_equal_weights(models, alone)


@ranks(2)
def test_sums_in_a_fixed_order_are_those_of_the_same_model_alone(rank: int) -> None:
    models, again = pair(), pair()
    for model in models:
        paceline.replicate(model, deterministic=True)
    for model in again:
        paceline.replicate(model, deterministic=True, bucket_mb=1e-5)

    train(models, rank)
    train(again, rank)

    for model, other in zip(models, again, strict=True):
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@ranks(2)
@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("hook", {"hook": powersgd(rank=1)}),
        ("check_finite", {"check_finite": True}),
        ("deterministic", {"deterministic": True}),
        ("unused", {"unused": "error"}),
        ("guard", {"guard": False}),
        ("precision", {"precision": paceline.Precision(torch.bfloat16)}),
    ],
)
def test_what_is_to_be_treated_in_two_ways_is_refused(rank: int, what: str, settings: Any) -> None:
    first, second = pair()
    paceline.replicate(first)

    with pytest.raises(ValueError, match=rf"shares parameters .*body\.0\.weight.* differ in {what}"):
        paceline.replicate(second, **settings)

    paceline.replicate(second)  # nothing was changed


@ranks(2)
def test_a_part_of_a_replicated_module_is_refused(rank: int) -> None:
    first, _ = pair()
    paceline.replicate(first)

    with pytest.raises(ValueError, match=r"shares parameters .*: 0\.weight.*Replicate the outer module only"):
        paceline.replicate(first.body)


@ranks(2)
def test_ranks_of_which_one_shares_are_told_apart(rank: int) -> None:
    first, second = pair()
    paceline.replicate(first)
    if rank:
        second.body = copy.deepcopy(second.body)

    with pytest.raises(RanksDisagree, match="what earlier replicas reduce"):
        paceline.replicate(second)


@ranks(2)
def test_what_two_replicas_cannot_do_at_once_is_refused(rank: int) -> None:
    first, second = pair()
    paceline.replicate(first)
    paceline.replicate(second)
    handle = paceline.replica(second)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    shared = r"shares parameters .*body\.0\.weight"

    with pytest.raises(ValueError, match=rf"skip\(\) .*{shared}.*weight\(model, 0\)"):
        handle.skip()
    with pytest.raises(ValueError, match=rf"batch\(\) .*{shared}"):
        handle.batch()
    with pytest.raises(ValueError, match=rf"join\(\) .*{shared}"), paceline.join(second):
        pass
    with pytest.raises(ValueError, match=rf"optimizer inside backward .*{shared}"):
        handle.step_in_backward(optimizer)
    with pytest.raises(ValueError, match=r"shares with Headed, which was replicated later: detach\(\)"):
        paceline.replica(first).detach()

    handle.detach()
    paceline.replica(first).detach()


@ranks(2)
def test_a_shared_body_that_is_left_out_of_the_first_is_reduced_by_the_second(rank: int) -> None:
    first, second = pair()
    alone = copy.deepcopy(second)
    names = [name for name, _ in first.named_parameters() if name.startswith("body")]
    paceline.replicate(first, left_out=names)
    paceline.replicate(second, unused="error")

    loss_of(second, rows(0, rank)).backward()

    loss_of(alone, rows(0)).backward()
    assert_equal_gradients(second, alone)


@ranks(2)
def test_two_heads_compiled(rank: int) -> None:
    bodies = [pair()[0].body for _ in range(2)]
    models, alone = ([nn.Sequential(body, nn.Linear(6, 2)) for _ in range(2)] for body in bodies)
    for model, reference in zip(models, alone, strict=True):
        reference.load_state_dict(paceline.replicate(model).state_dict())
    compiled = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in models]

    for step in range(4):
        for each, x in ((compiled, rows(step, rank)), (alone, rows(step))):
            each[step % 2].zero_grad()
            loss_of(each[step % 2], x).backward()
        assert_equal_gradients(models[step % 2], alone[step % 2])


@ranks(2)
@pytest.mark.parametrize("wrap", [paceline.DistributedDataParallel, paceline.replicate])
def test_buffers_of_a_shared_body_are_kept_equal(rank: int, wrap: Any) -> None:
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    models = [nn.Sequential(body, nn.Linear(6, 2)) for _ in range(2)]
    wrapped = [wrap(model) for model in models]

    for step in range(4):
        loss_of(wrapped[step % 2], rows(step, rank)).backward()
    for model in models:
        paceline.replica(model).sync_buffers()

    sums = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(sums, body[1].running_mean.sum()[None])
    assert torch.equal(*sums)
    assert body[1].num_batches_tracked == 4


def test_a_process_alone_shares_as_many_do() -> None:
    models, alone = pair(), pair()
    for model in models:
        paceline.replicate(model)

    with paceline.no_sync(models[1]):
        loss_of(models[1], rows(0)).backward()
    loss_of(models[1], rows(1)).backward()

    loss_of(alone[1], rows(0)).backward()
    loss_of(alone[1], rows(1)).backward()
    assert_equal_gradients(models[1], alone[1])
