"""``_get_ddp_logging_data()``: the fields of torch's class, with the same values where they mean the same."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline import DistributedDataParallel as Ours
from paceline import PeerFailed
from paceline.testing import ranks

Theirs = torch.nn.parallel.DistributedDataParallel

# What takes time differs from run to run. In which order buckets go out is for each library to choose.
DIFFERENT = ("_time", "_time_start", "_time_end", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices")


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def mixed() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Cast(), nn.Linear(8, 4).double())
    model[0].bias.requires_grad_(False)
    return model


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.arange(24.0).view(4, 6)).square().mean().backward()


def plain(data: dict) -> dict:
    return {name: value for name, value in data.items() if not name.endswith(DIFFERENT)}


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1}, {"static_graph": True}])
def test_a_new_wrapper_says_what_torchs_says(rank, options):
    ours, theirs = Ours(mixed(), **options), Theirs(mixed(), **options)

    got, expected = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    assert {name: got.get(name) for name in expected} == expected


@ranks(2)
def test_a_trained_wrapper_has_every_field_of_torchs(rank):
    ours, theirs = Ours(mixed()), Theirs(mixed())
    train(ours, 4)
    train(theirs, 4)

    got, expected = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
    assert set(expected) <= set(got)
    assert plain({name: got[name] for name in expected}) == plain(expected)
    assert all(isinstance(got[name], type(expected[name])) for name in expected)


@ranks(2)
def test_parameters_are_numbered_without_the_frozen_one(rank):
    model = Ours(mixed())
    train(model, 2)

    data = model._get_ddp_logging_data()
    assert data["rebuilt_bucket_sizes"] == "288, 256"  # the doubles come first: they are reached first
    assert data["rebuilt_per_bucket_param_indices"] == "4 3, 1 2 0"


@ranks(2)
@pytest.mark.parametrize("static_graph", [False, True])
def test_find_unused_parameters_hides_the_rebuilt_buckets_as_with_torch(rank, static_graph):
    model = Ours(mixed(), find_unused_parameters=True, static_graph=static_graph)
    train(model, 3)

    assert model._get_ddp_logging_data()["has_rebuilt_buckets"] == int(static_graph)


@ranks(2)
def test_times_are_nanoseconds_and_in_order(rank):
    model = Ours(mixed())
    train(model, 3)

    data = model._get_ddp_logging_data()
    for prefix in ("", "avg_"):
        computed, sent = data[f"{prefix}backward_compute_time"], data[f"{prefix}backward_comm_time"]
        assert data[f"{prefix}forward_compute_time"] > 0
        assert computed >= data[f"{prefix}backward_compute_comm_overlap_time"] >= 0
        assert sent >= data[f"{prefix}backward_compute_comm_overlap_time"]
    moments = [
        data["forward_compute_time_start"],
        data["backward_compute_time_start"],
        data["backward_comm_time_start"],
        data["backward_comm_time_end"],
    ]
    assert moments == sorted(moments)
    # Less what was waited for ranks that had not begun.
    whole = data["backward_compute_time_end"] - data["backward_compute_time_start"]
    assert 0 < data["backward_compute_time"] <= whole + 2000


@ranks(2)
def test_nobody_is_advised_to_declare_the_graph_static(rank):
    model = Ours(mixed())
    train(model, 3)

    assert not model._get_ddp_logging_data().get("can_set_static_graph")


@ranks(2)
def test_the_rate_is_torchs(rank):
    model = Ours(mixed())
    model._set_ddp_runtime_logging_sample_rate(4)
    seen = []
    for _ in range(18):
        train(model, 1)
        seen.append(model._get_ddp_logging_data()["iteration"])

    assert seen == [*range(10), 9, 9, 12, 12, 12, 12, 16, 16]


@ranks(2)
@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_below_one_is_refused_and_noted(rank, rate):
    model = Ours(mixed())
    with pytest.raises(ValueError, match=f"of 1 or more, got {rate}"):
        model._set_ddp_runtime_logging_sample_rate(rate)

    data = model._get_ddp_logging_data()
    assert data["has_error"] == 1
    assert f"got {rate}" in data["error"]


@ranks(2)
def test_a_hook_is_named_as_it_was_registered(rank):
    model = Ours(mixed())
    assert "comm_hook" not in model._get_ddp_logging_data()

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert model._get_ddp_logging_data()["comm_hook"] == "fp16_compress_hook"

    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert model._get_ddp_logging_data()["comm_hook"] == "BuiltinCommHookType.ALLREDUCE"


@ranks(2)
def test_a_hook_without_a_name_is_named_by_its_class(rank):
    class Hook:
        def __call__(self, state, bucket):
            return default_hooks.allreduce_hook(None, bucket)

    model = Ours(mixed())
    model.register_comm_hook(None, Hook())

    assert model._get_ddp_logging_data()["comm_hook"].endswith("Hook")


@ranks(2)
def test_a_backward_that_failed_is_noted(rank):
    model = Ours(mixed())
    with pytest.raises((ZeroDivisionError, PeerFailed)):
        output = model(torch.arange(24.0).view(4, 6))
        if rank == 1:
            output.register_hook(lambda gradient: 1 // 0)
        output.sum().backward()

    data = model._get_ddp_logging_data()
    assert (data["has_error"], data["iteration"]) == (1, 1)
    assert "ZeroDivisionError" in data["error"]


@ranks(2)
def test_join_is_noted(rank):
    model = Ours(mixed())
    assert "join_uneven_inputs" not in model._get_ddp_logging_data()
    with model.join():
        train(model, 1 + rank)

    assert model._get_ddp_logging_data()["join_uneven_inputs"] == 1


def test_a_process_alone_has_a_dictionary_too():
    model = Ours(mixed())
    train(model, 2)

    data = model._get_ddp_logging_data()
    assert (data["world_size"], data["backend_name"], data["iteration"]) == (1, "", 0)
    model._set_ddp_runtime_logging_sample_rate(3)
