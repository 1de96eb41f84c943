"""replicate(): in place, plain to the outside, and clear about what it cannot take."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.registry import registry
from paceline.testing import ranks


def gathered(text: str) -> list[str]:
    out: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(out, text)
    return out


def message_of(kind: type[BaseException], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@ranks(2)
def test_the_module_keeps_its_identity_class_and_keys(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    keys, attributes = list(model.state_dict()), set(vars(model))

    same = paceline.replicate(model)

    assert same is model
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == keys
    assert set(vars(model)) == attributes


@ranks(2)
def test_every_rank_starts_from_rank_0(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(3, 3)
    model.register_buffer("steps", torch.tensor(rank + 7))
    mine = model.weight.detach().clone()

    paceline.replicate(model)

    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(model.weight, first)
    assert model.steps == 7


@ranks(2)
def test_copies_and_pickles_are_plain_modules(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert other.weight.grad[0, 0] == rank + 1
        with pytest.raises(ValueError, match="this Linear is not replicated"):
            paceline.replica(other)


@ranks(2)
def test_detach_takes_everything_off_again(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    entry = torch.autograd._engine_run_backward

    assert paceline.replica(model).detach() is model

    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad[0, 0] == rank + 1
    assert torch.autograd._engine_run_backward is not entry
    assert not len(registry)
    model.zero_grad()
    paceline.replicate(model)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert model.weight.grad[0, 0] == 1.5


@ranks(2)
def test_a_replica_ends_with_its_module(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    reducer = weakref.ref(paceline.replica(model).reducer)

    del model
    gc.collect()

    assert not len(registry)
    assert reducer() is None


def test_one_process_alone_needs_no_group() -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    handle = paceline.replica(model)

    with handle.no_sync(), handle.accumulate(2):
        model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert (handle.rank, handle.size, handle.step) == (0, 1, 0)
    assert len(handle.plan.buckets) == 1
    handle.detach()


@ranks(1)
def test_a_group_of_one_goes_the_whole_way(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))

    model(torch.ones(1, 2)).sum().backward()

    assert paceline.replica(model).step == 1
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


@ranks(4)
def test_a_group_of_some_ranks(rank: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = nn.Linear(2, 2)
    model.weight.data.fill_(rank)

    paceline.replicate(model, group=groups[rank % 2])
    model(torch.full((1, 2), rank + 1.0)).sum().backward()

    assert (model.weight == rank % 2).all()
    assert (model.weight.grad == rank % 2 + 2).all()


@ranks(4)
def test_one_dimension_of_a_mesh(rank: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    text = message_of(ValueError, lambda: paceline.replicate(nn.Linear(2, 2), mesh=mesh))
    assert "replicate over one mesh dimension" in text
    assert "('dp', 'tp')" in text

    model = paceline.replicate(nn.Linear(2, 2), mesh=mesh["dp"])
    model(torch.full((1, 2), rank + 1.0)).sum().backward()

    assert (model.weight.grad == rank % 2 + 2).all()


@ranks(2)
def test_frozen_and_integer_parameters(rank: int) -> None:
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.full((3,), rank), requires_grad=False)
    model.bias.requires_grad_(False)

    paceline.replicate(model)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()

    assert model.codes.tolist() == [0, 0, 0]
    assert model.bias.grad is None
    assert not model.bias.requires_grad
    assert (model.weight.grad == 1.5).all()


@ranks(2)
def test_no_sync_can_be_switched_by_an_argument_and_nested(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    handle = paceline.replica(model)

    with handle.no_sync(enabled=False):
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert (model.weight.grad == 1.5).all()
    model.zero_grad()
    with handle.no_sync(), paceline.no_sync(model, enabled=False):
        model(torch.full((1, 2), rank + 1.0)).sum().backward()

    assert (model.weight.grad == rank + 1).all()


@ranks(2)
def test_the_user_gets_no_sync_back_after_an_exception(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError), paceline.no_sync(model), paceline.accumulate(model, 3):
        raise ZeroDivisionError

    model(torch.full((1, 2), rank + 1.0)).sum().backward()

    assert (model.weight.grad == 1.5).all()


# ---- bad input: one clear message, on every rank ----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"module": [1]}, TypeError, "replicate() takes a torch.nn.Module, got list"),
        ({"bucket_mb": 0}, ValueError, "bucket sizes are in MiB and have to be greater than 0, got [0, 0]"),
        (
            {"bucket_mb": [25, -1]},
            ValueError,
            "bucket sizes are in MiB and have to be greater than 0, got [-1]",
        ),
        (
            {"first_bucket_mb": 0},
            ValueError,
            "bucket sizes are in MiB and have to be greater than 0, got [0]",
        ),
        ({"unused": "maybe"}, ValueError, 'unused has to be "allow" or "error", got \'maybe\''),
        ({"hook": 3}, TypeError, "hook has to be a function of (bucket, comm), got int"),
        ({"group": -100}, ValueError, "this rank is not in the process group that was given"),
        ({"group": 1, "mesh": 2}, ValueError, "give a process group or a device mesh, not both"),
        ({"speed": 11}, TypeError, "speed"),
    ],
)
def test_bad_arguments(arguments: dict, kind: type[Exception], text: str) -> None:
    arguments = {"module": nn.Linear(2, 2), **arguments}
    module = arguments.pop("module")

    assert text in message_of(kind, lambda: paceline.replicate(module, **arguments))


def test_accumulate_wants_a_positive_number() -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    for bad in (0, -1, 2.5):
        with pytest.raises(ValueError, match="micro_batches has to be a positive number, got"):
            paceline.accumulate(model, bad)
    paceline.replica(model).detach()


@ranks(2)
def test_accumulate_inside_accumulate_is_refused(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="end the outer block first"), paceline.accumulate(model, 2):
        with paceline.accumulate(model, 2):
            pass


@ranks(2)
def test_a_module_that_is_replicated_inside_or_around_another_is_refused(rank: int) -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner, nn.Linear(2, 2))

    paceline.replicate(inner)
    texts = [message_of(ValueError, lambda m=m: paceline.replicate(m)) for m in (inner, outer)]
    paceline.replica(inner).detach()
    paceline.replicate(outer)
    texts.append(message_of(ValueError, lambda: paceline.replicate(inner)))

    assert "this Linear is replicated already" in texts[0]
    assert "Sequential holds parts that are replicated already: 0;" in texts[1]
    assert "Linear shares parameters with a module that is replicated already: weight, bias" in texts[2]


@ranks(2)
def test_parameters_on_meta_are_refused_on_every_rank(rank: int) -> None:
    both = message_of(ValueError, lambda: paceline.replicate(nn.Linear(2, 2, device="meta")))
    assert "weight, bias are on the meta device" in both

    # On one rank only: the other hears of it instead of waiting.
    model = nn.Linear(2, 2, device="meta" if rank else "cpu")
    one = message_of((ValueError, paceline.PeerFailed), lambda: paceline.replicate(model))
    assert "weight, bias are on the meta device" in one
    assert ("rank 1 could not replicate its model" in one) is (rank == 0)


@ranks(2)
def test_lazy_parameters_are_refused(rank: int) -> None:
    assert "weight, bias have no shape yet" in message_of(
        ValueError, lambda: paceline.replicate(nn.LazyLinear(2))
    )
    torchs = "Modules with uninitialized parameters can't be"
    assert torchs in message_of(RuntimeError, lambda: paceline.DistributedDataParallel(nn.LazyLinear(2)))


@ranks(3)
def test_a_group_that_this_rank_is_not_in(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank == 2:
        text = message_of(ValueError, lambda: paceline.replicate(nn.Linear(2, 2), group=group))
        assert "this rank is not in the process group" in text
    else:
        paceline.replicate(nn.Linear(2, 2), group=group)


@ranks(3)
def test_different_models_get_one_text_on_every_rank(rank: int) -> None:
    narrow, wide = "(2, 2) float32, trainable", "(2, 2) float64, trainable"
    models = {
        "0.weight is (4, 3) float32, trainable on ranks 0, 1 but (4, 5) float32, trainable on rank 2": (
            nn.Sequential(nn.Linear(5 if rank == 2 else 3, 4))
        ),
        f"1.weight is missing on ranks 0, 2 but {narrow} on rank 1": nn.Sequential(
            nn.Linear(2, 2), *([nn.Linear(2, 2)] if rank == 1 else [])
        ),
        f"weight is {narrow} on ranks 0, 1 but {wide} on rank 2": nn.Linear(
            2, 2, dtype=torch.float64 if rank == 2 else torch.float32
        ),
        f"weight is {narrow} on rank 0 but (2, 2) float32, frozen on ranks 1, 2": nn.Linear(
            2, 2
        ).requires_grad_(rank == 0),
        "come in another order, at place 0 b.weight on rank 0 but a.weight on ranks 1, 2": nn.ModuleDict(
            {key: nn.Linear(2, 2) for key in ("ab" if rank else "ba")}
        ),
    }
    for expected, model in models.items():
        text = message_of(paceline.RanksDisagree, lambda model=model: paceline.replicate(model))
        assert expected in text
        assert text.startswith("the ranks hold different models: ")
        assert text.endswith("the same arguments, the same order, the same parts frozen.")
        assert len(set(gathered(text))) == 1


@ranks(2)
def test_different_bucket_sizes_are_noticed_before_anything_is_added(rank: int) -> None:
    model = paceline.replicate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_mb=1 if rank else 1e-6)

    text = message_of(paceline.RanksDisagree, lambda: model(torch.ones(1, 4)).sum().backward())

    assert "step 0: the ranks would send different buckets" in text
    assert len(set(gathered(text))) == 1
    assert model[0].weight.grad is None


@ranks(2)
def test_ranks_at_different_steps_are_noticed_and_go_on_together(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    paceline.replica(model).reducer.step = 6 + rank

    text = message_of(paceline.RanksDisagree, lambda: model(torch.ones(1, 2)).sum().backward())
    model(torch.full((1, 2), rank + 1.0)).sum().backward()

    assert "rank 0 is at step 6, rank 1 is at step 7" in text
    assert len(set(gathered(text))) == 1
    assert (model.weight.grad == 1.5).all()


@ranks(2)
def test_what_nobody_can_reach_any_more_holds_no_parameters(rank: int) -> None:
    body = nn.Linear(2, 4)
    wrapper = paceline.DistributedDataParallel(nn.Sequential(body, nn.Linear(4, 3)))
    wrapper.itself = [wrapper]  # only the collector of garbage frees it
    gc.disable()
    try:
        del wrapper
        other = paceline.DistributedDataParallel(nn.Sequential(body, nn.Linear(4, 2)))
    finally:
        gc.enable()

    other(torch.ones(1, 2) * (rank + 1)).sum().backward()

    assert body.weight.grad is not None
    torch.testing.assert_close(other.module[1].bias.grad, torch.ones(2))


@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
@ranks(2)
def test_a_model_that_is_let_go_of_is_freed_without_the_collector_of_garbage(rank: int, wrap) -> None:
    gc.collect()
    gc.disable()
    try:
        model = nn.Linear(2, 2)
        seen, wrapped = weakref.ref(model.weight), wrap(model)
        wrapped(torch.ones(1, 2)).sum().backward()
        del model, wrapped
        assert seen() is None
    finally:
        gc.enable()


@ranks(2)
def test_a_replica_may_be_detached_inside_of_its_blocks(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    with paceline.accumulate(model, 2):
        paceline.replica(model).detach()
