"""``localize()``: sharded parameters are plain ones outside of forward, and sharded inside of it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.tensor_parallel import delocalize, localize
from paceline.testing import ranks
from tests.sharding import (
    WIDTH,
    assert_parts_equal,
    batch_of,
    full,
    mesh_of,
    mlp,
    transformer,
)


class Peeking(nn.Module):
    """Shows what its forward sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[type] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(type(self.inner.up.weight))
        return self.inner(x)


@ranks(4)
@pytest.mark.parametrize("door", ["replicate", "wrapper"])
def test_parameters_are_plain_outside_of_forward_and_sharded_inside(door: str) -> None:
    mesh = mesh_of()
    inner, whole = mlp(mesh["tp"])
    model = localize(Peeking(inner))
    if door == "replicate":
        trained: nn.Module = paceline.replicate(model, mesh=mesh["dp"])
    else:
        trained = paceline.DistributedDataParallel(model, device_mesh=mesh["dp"])
    optimizer, reference = (torch.optim.AdamW(m.parameters(), 1e-2, foreach=True) for m in (trained, whole))

    for step in range(20):
        trained(batch_of(step, mesh["dp"].get_local_rank())).square().mean().backward()
        whole(batch_of(step)).square().mean().backward()
        assert not any(isinstance(p, DTensor) for p in trained.parameters())
        assert not any(isinstance(p.grad, DTensor) for p in trained.parameters())
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()

    assert set(model.seen) == {DTensor}
    assert inner.up.weight.shape == (WIDTH, WIDTH)  # half of it
    if door == "replicate":
        paceline.replica(model).detach()
    else:
        trained._remove_autograd_hooks()
    delocalize(model)
    for p, q in zip(inner.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, atol=1e-5, rtol=1e-5)
    assert_parts_equal(inner, mesh["dp"].get_group())


@ranks(2)
def test_a_round_trip_gives_back_the_same_parameters_with_values_and_gradients() -> None:
    model, whole = mlp(mesh_of(1, 2)["tp"])
    before, keys = dict(model.named_parameters()), list(model.state_dict())

    localize(model)
    assert list(model.state_dict()) == keys
    model(batch_of(0)).square().mean().backward()
    whole(batch_of(0)).square().mean().backward()
    with torch.no_grad():
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            p.mul_(2)
            q.mul_(2)
    delocalize(model)

    assert all(p is before[name] for name, p in model.named_parameters())
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(p), q)
        torch.testing.assert_close(full(p.grad), q.grad, atol=1e-6, rtol=1e-5)
    model(batch_of(1)).square().mean().backward()


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_backward_computes_again_sees_sharded_parameters(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    inner, whole = mlp(mesh_of(1, 2)["tp"])
    model = localize(Checkpointed(inner))
    batch = batch_of(0).requires_grad_()

    model(batch).square().mean().backward()
    whole(batch_of(0)).square().mean().backward()

    delocalize(model)
    for p, q in zip(inner.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, atol=1e-6, rtol=1e-5)


@ranks(2)
def test_norms_under_sequence_parallelism_get_the_gradient_of_the_whole_sequence() -> None:
    model, whole = transformer(mesh_of(1, 2)["tp"])
    localize(model)
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))

    model(tokens).square().mean().backward()
    whole(tokens).square().mean().backward()

    torch.testing.assert_close(model.norm.weight.grad, whole.norm.weight.grad, atol=1e-5, rtol=1e-5)


@ranks(2)
def test_tied_parameters_stay_one_and_copies_are_plain() -> None:
    mesh = mesh_of(1, 2)["tp"]
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    style = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(whole), mesh, {"0": style, "1": style})
    model[1].weight = model[0].weight

    localize(model)

    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 3
    twin = nn.Linear(WIDTH, WIDTH)
    twin.__dict__["_parameters"] = pickle.loads(pickle.dumps(model[0]._parameters))
    assert type(twin._parameters) is dict
    assert type(copy.deepcopy(model[0]._parameters)) is dict


@ranks(4)
def test_a_model_that_torchs_own_transform_has_localized_trains_and_keeps_its_parameters() -> None:
    """On torch's class the parameters are not listed any more after the first forward."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = mesh_of()
    inner, whole = mlp(mesh["tp"])
    _pre_dp_module_transform(inner)
    model = paceline.DistributedDataParallel(inner, process_group=mesh["dp"].get_group())
    optimizer, reference = (torch.optim.Adam(m.parameters(), 1e-2) for m in (model, whole))

    names = [name for name, _ in model.named_parameters()]
    for step in range(3):
        model(batch_of(step, mesh["dp"].get_local_rank())).square().mean().backward()
        whole(batch_of(step)).square().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        assert [name for name, _ in model.named_parameters()] == names
        torch.testing.assert_close(model(batch_of(9)), whole(batch_of(9)), atol=1e-5, rtol=1e-5)


# ---- bad input --------------------------------------------------------------------------------------


def test_what_is_no_module_or_has_nothing_sharded() -> None:
    with pytest.raises(TypeError, match=r"localize\(\) takes a torch.nn.Module, got int"):
        localize(3)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="this Linear has no sharded parameter"):
        localize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="this Linear is not localized"):
        delocalize(nn.Linear(2, 2))


@ranks(4)
def test_twice_or_while_it_is_replicated_or_with_mixed_precision() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    with pytest.raises(
        ValueError, match=r"localize\(\) gives a module other parameters, but this MLP is repl"
    ):
        localize(model)
    paceline.replica(model).detach()
    localize(model)
    with pytest.raises(ValueError, match="no sharded parameter"):
        localize(model)
    with pytest.raises(ValueError, match="up, down cannot|of up, down: they are localized"):
        paceline.replicate(model, mesh=mesh["dp"], precision=paceline.Precision(torch.bfloat16))


@ranks(4)
def test_norms_and_checks_are_those_of_the_whole_for_localized_parameters_too(rank: int) -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    localize(model)
    handle = paceline.replica(paceline.replicate(model, mesh=mesh["dp"], check_finite="skip"))
    model(batch_of(0, mesh["dp"].get_local_rank())).square().mean().backward()
    whole(batch_of(0)).square().mean().backward()

    torch.testing.assert_close(
        handle.grad_norm(), nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    )
    model.zero_grad()
    if rank == 2:
        model.up.weight.register_hook(lambda g: g * torch.nan)
    model(batch_of(1, mesh["dp"].get_local_rank())).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())


@ranks(2)
def test_a_part_of_a_localized_module_cannot_be_restored_alone() -> None:
    model, _ = mlp(mesh_of(1, 2)["tp"])
    localize(model)

    with pytest.raises(ValueError, match="this Linear is a part of a module that is localized"):
        delocalize(model.up)


@ranks(2)
def test_layers_without_a_bias_are_localized_and_restored() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    model = parallelize_module(layers, mesh_of(1, 2)["tp"], {"0": ColwiseParallel()})

    delocalize(localize(model))

    assert isinstance(model[0].weight, DTensor)
    assert model[0].bias is None


@ranks(2)
def test_a_sharded_model_that_is_cast_after_replicate_is_reduced_in_its_new_dtype(rank: int) -> None:
    mesh = mesh_of(dp=2, tp=1)
    model = nn.Linear(4, 4)
    for name, parameter in list(model.named_parameters()):
        model.register_parameter(
            name, nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [Shard(0)]))
        )
    paceline.replicate(model, mesh=mesh["dp"])
    model.double()
    share = torch.full((3, 4), 1.0 + rank, dtype=torch.float64)
    inputs = DTensor.from_local(share, mesh["tp"], [Replicate()])
    model(inputs).to_local().sum().backward()

    gradient = model.weight.grad.to_local()
    torch.testing.assert_close(gradient, torch.full((4, 4), 4.5, dtype=torch.float64))
