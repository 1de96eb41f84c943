"""Data-parallel over one dimension of a mesh, tensor-parallel over another: 2 x 2 ranks equal one process."""

import contextlib
import copy
import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paceline
from paceline import hooks
from paceline.testing import ranks
from tests.sharding import (
    WIDTH,
    Transformer,
    assert_gradients_equal,
    assert_parts_equal,
    batch_of,
    full,
    local,
    mesh_of,
    mlp,
    transformer,
)

STEPS = 20


def whole_step(whole: nn.Module, step: int) -> None:
    whole(batch_of(step)).square().mean().backward()


def sharded_step(model: nn.Module, step: int, rank: int) -> None:
    model(batch_of(step, rank)).square().mean().backward()


# ---- the same as one process ------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("door", ["replicate", "wrapper"])
@pytest.mark.parametrize("kind", ["foreach", "fused", "neither"])
def test_an_mlp_trains_as_in_one_process_for_20_steps(door: str, kind: str) -> None:
    mesh = mesh_of()
    inner, whole = mlp(mesh["tp"], throughout=kind != "neither")
    if door == "replicate":
        model: nn.Module = paceline.replicate(inner, mesh=mesh["dp"])
    else:
        model = paceline.DistributedDataParallel(inner, device_mesh=mesh["dp"])
    how = {} if kind == "neither" else {kind: True}
    optimizer, reference = (torch.optim.AdamW(m.parameters(), 1e-2, **how) for m in (model, whole))

    for step in range(STEPS):
        sharded_step(model, step, mesh["dp"].get_local_rank())
        whole_step(whole, step)
        assert_gradients_equal(inner, whole)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()

    for p, q in zip(inner.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, atol=1e-5, rtol=1e-5)
    assert_parts_equal(inner, mesh["dp"].get_group())


@ranks(4)
def test_a_sequence_parallel_transformer_trains_as_in_one_process_for_20_steps() -> None:
    mesh = mesh_of()
    model, whole = transformer(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    # Not Adam: it would make steps of the noise in gradients that are zero, as those of the keys' biases are.
    optimizer, reference = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, whole))

    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(Transformer.VOCABULARY, (4, 7), generator=generator)
        mine = tokens.chunk(2)[mesh["dp"].get_local_rank()]
        for part, where in ((model, mine), (whole, tokens)):
            logits = part(where[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), where[:, 1:].flatten()).backward()
        assert_gradients_equal(model, whole, atol=1e-5)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()

    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert_parts_equal(model, mesh["dp"].get_group())
    copies = nn.ParameterList(
        p for p in model.parameters() if isinstance(p, DTensor) and p.placements == (Replicate(),)
    )
    assert len(copies) > 0
    assert_parts_equal(copies, mesh["tp"].get_group())


@ranks(4)
def test_gradients_optimizer_state_and_checkpoints_are_sharded_as_the_parameters_are(tmp_path: Any) -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    keys = list(model.state_dict())
    paceline.replicate(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sharded_step(model, 0, mesh["dp"].get_local_rank())
    optimizer.step()

    for p in (model.up.weight, model.down.weight, model.up.bias, model.down.bias):
        assert isinstance(p.grad, DTensor)
        assert p.grad.placements == p.placements
        assert p.grad.device_mesh == mesh["tp"]
        assert optimizer.state[p]["exp_avg"].placements == p.placements
    assert not isinstance(model.head.weight.grad, DTensor)
    assert list(model.state_dict()) == keys
    assert model.state_dict()["up.weight"].placements == (Shard(0),)

    import torch.distributed.checkpoint as checkpoint

    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    twin, _ = mlp(mesh["tp"])
    state = {"model": twin.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "saved")
    twin.load_state_dict(state["model"])
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(full(p), full(q))


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_three_dimensions(shape: tuple[int, int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    ranks = shape[0]

    for step in range(3):
        model.zero_grad()
        whole.zero_grad()
        model(batch_of(step, mesh["dp"].get_local_rank(), ranks)).square().mean().backward()
        whole_step(whole, step)
        assert_gradients_equal(model, whole)


@ranks(4)
def test_a_dimension_that_does_not_divide_and_an_empty_part() -> None:
    mesh = mesh_of()
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 1))
    model = parallelize_module(
        copy.deepcopy(whole),
        mesh["tp"],
        {"0": ColwiseParallel(output_layouts=Replicate()), "1": ColwiseParallel(output_layouts=Replicate())},
    )
    paceline.replicate(model, mesh=mesh["dp"])
    assert {local(p).numel() for p in model[1].parameters()} <= {0, 1, 3}

    for step in range(2):
        model.zero_grad()
        whole.zero_grad()
        sharded_step(model, step, mesh["dp"].get_local_rank())
        whole_step(whole, step)
        assert_gradients_equal(model, whole)


# ---- with what else there is ------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("how", ["no_sync", "accumulate", "set_to_none"])
def test_accumulation(how: str) -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()

    for step in range(2):
        if how == "accumulate":
            with paceline.accumulate(model, micro_batches=2):
                sharded_step(model, step, rank)
                sharded_step(model, step + 10, rank)
        else:
            with paceline.no_sync(model):
                sharded_step(model, step, rank)
            with pytest.raises(paceline.UnsyncedGradients, match="up.weight"):
                torch.optim.SGD(model.parameters(), 0.1).step()
            sharded_step(model, step + 10, rank)
        whole_step(whole, step)
        whole_step(whole, step + 10)
        assert_gradients_equal(model, whole)
        model.zero_grad(set_to_none=how != "set_to_none")
        whole.zero_grad(set_to_none=how != "set_to_none")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, *, left: bool) -> torch.Tensor:
        return (self.a if left else self.b)(x)


@ranks(4)
def test_parameters_that_a_rank_or_no_rank_uses() -> None:
    mesh = mesh_of()
    torch.manual_seed(1)
    whole = Branching()
    style = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(whole), mesh["tp"], {"a": style, "b": style, "never": style})
    paceline.replicate(model, mesh=mesh["dp"])
    rank = mesh["dp"].get_local_rank()

    for step in range(3):
        model.zero_grad()
        whole.zero_grad()
        model(batch_of(step, rank), left=rank == step % 2).square().mean().backward()
        for each in range(2):
            (whole(batch_of(step, each), left=each == step % 2).square().mean() / 2).backward()
        assert model.never.weight.grad is None
        assert_gradients_equal(model, whole)


@ranks(4)
@pytest.mark.parametrize(
    ("hook", "atol"),
    [
        (hooks.in_dtype(torch.bfloat16), 1e-2),
        (hooks.quantized(bits=8), 2e-2),
        (hooks.powersgd(rank=8, start_step=1), 1e-4),
        (hooks.local_sgd(every=1, start_step=10), 1e-6),
    ],
    ids=["in_dtype", "quantized", "powersgd", "local_sgd"],
)
def test_communication_hooks(hook: Any, atol: float) -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"], hook=hook)

    for step in range(3):
        model.zero_grad()
        whole.zero_grad()
        sharded_step(model, step, mesh["dp"].get_local_rank())
        whole_step(whole, step)
        assert_gradients_equal(model, whole, atol=atol)


@ranks(4)
def test_local_sgd_averages_the_parts() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"], hook=hooks.local_sgd(every=2, start_step=0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    for step in range(4):
        sharded_step(model, step, mesh["dp"].get_local_rank())
        optimizer.step()
        optimizer.zero_grad()

    assert_parts_equal(model, mesh["dp"].get_group())


@ranks(4)
def test_mixed_precision() -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    precision = paceline.Precision(torch.bfloat16, reduce=torch.float32)
    paceline.replicate(model, mesh=mesh["dp"], precision=precision)

    for step in range(2):
        model.zero_grad()
        whole.zero_grad()
        model(batch_of(step, mesh["dp"].get_local_rank())).float().square().mean().backward()
        whole_step(whole, step)
        assert model.up.weight.grad.dtype == torch.float32
        assert_gradients_equal(model, whole, atol=2e-2)


@ranks(4)
def test_weights_and_skips() -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    rank, batch = mesh["dp"].get_local_rank(), batch_of(0)
    mine = (batch[:3], batch[3:])[rank]

    with paceline.weight(model, len(mine)):
        model(mine).square().mean().backward()
    whole(batch).square().mean().backward()

    assert_gradients_equal(model, whole)
    model.zero_grad()
    whole.zero_grad()
    if rank == 0:
        paceline.skip(model)
    else:
        model(mine).square().mean().backward()
    whole(batch[3:]).square().mean().backward()
    assert_gradients_equal(model, whole)


@ranks(4)
def test_join() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rank = mesh["dp"].get_local_rank()

    with paceline.join(model):
        for step in range(2 + rank):
            sharded_step(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()

    assert_parts_equal(model, mesh["dp"].get_group())


@ranks(4)
def test_the_optimizer_inside_backward() -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"], bucket_mb=0.0001)
    paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), 0.1))
    reference = torch.optim.SGD(whole.parameters(), 0.1)

    for step in range(3):
        sharded_step(model, step, mesh["dp"].get_local_rank())
        whole_step(whole, step)
        reference.step()
        reference.zero_grad()

    assert all(p.grad is None for p in model.parameters())
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, atol=1e-6, rtol=1e-5)


@ranks(4)
def test_a_deterministic_sum_of_micro_batches() -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"], deterministic=True)
    rank = mesh["dp"].get_local_rank()

    with paceline.accumulate(model, micro_batches=2):
        sharded_step(model, 0, rank)
        sharded_step(model, 1, rank)
    whole_step(whole, 0)
    whole_step(whole, 1)

    assert_gradients_equal(model, whole)


@ranks(4, warnings="ignore")  # torch warns of create_graph=True
def test_gradients_that_are_part_of_a_graph() -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])

    model(batch_of(0, mesh["dp"].get_local_rank())).square().mean().backward(create_graph=True)
    whole(batch_of(0)).square().mean().backward(create_graph=True)

    assert_gradients_equal(model, whole)
    assert model.up.weight.grad.requires_grad
    for each in (model, whole):
        each.zero_grad()  # a graph that holds its own parameters would never be freed


@ranks(4)
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_the_norm_and_clipping_are_those_of_the_whole(order: float) -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    handle = paceline.replica(paceline.replicate(model, mesh=mesh["dp"]))
    sharded_step(model, 0, mesh["dp"].get_local_rank())
    whole_step(whole, 0)

    norm = handle.clip_grad_norm_(0.01, order)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, order)

    torch.testing.assert_close(norm, expected)
    assert_gradients_equal(model, whole)
    torch.testing.assert_close(handle.grad_norm(order), torch.tensor(0.01), rtol=1e-3, atol=0)


@ranks(4)
def test_torchs_own_clipping_of_a_model_that_is_sharded_throughout() -> None:
    mesh = mesh_of()
    model, whole = transformer(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    tokens = torch.randint(Transformer.VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
    model(tokens.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
    whole(tokens).square().mean().backward()

    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)

    torch.testing.assert_close(full(norm), expected)
    assert_gradients_equal(model, whole)


@ranks(4)
@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_part_that_is_not_finite_stops_the_ranks_with_the_other_parts_too(mode: Any) -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"], check_finite=mode)
    before = [local(p).detach().clone() for p in model.parameters()]
    if dist.get_rank() == 3:
        model.up.weight.register_hook(lambda g: g * math.nan)

    if mode == "raise":
        with pytest.raises(paceline.NotFinite, match="NaN"):
            sharded_step(model, 0, mesh["dp"].get_local_rank())
    else:
        sharded_step(model, 0, mesh["dp"].get_local_rank())

    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(local(p), b) for p, b in zip(model.parameters(), before, strict=True))
    if dist.get_rank() == 3:
        model.up.weight._backward_hooks.clear()
    sharded_step(model, 1, mesh["dp"].get_local_rank())
    assert model.up.weight.grad is not None


@ranks(4)
def test_an_audit_compares_parts_with_the_same_parts() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    paceline.audit(model, every=1)
    optimizer = torch.optim.Adam(model.parameters())

    for step in range(2):
        sharded_step(model, step, mesh["dp"].get_local_rank())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 2:
        local(model.up.weight.data)[0, 0] += 1
    expected = paceline.RanksDisagree if mesh["tp"].get_local_rank() == 0 else paceline.PeerFailed
    with pytest.raises(expected, match=r"up.weight is not the same on ranks 0, 1"):
        sharded_step(model, 2, mesh["dp"].get_local_rank())


@ranks(4, timeout=110)
@pytest.mark.parametrize("order", ["compile(replicate)", "replicate(compile)"])
def test_compiled_in_one_graph(order: str) -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    if order == "compile(replicate)":
        compiled: Any = torch.compile(
            paceline.replicate(model, mesh=mesh["dp"]), backend="aot_eager", fullgraph=True
        )
    else:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        paceline.replicate(compiled, mesh=mesh["dp"])

    for step in range(2):
        model.zero_grad()
        whole.zero_grad()
        sharded_step(compiled, step, mesh["dp"].get_local_rank())
        whole_step(whole, step)
        assert_gradients_equal(model, whole)


@ranks(4)
def test_copies_and_pickles_are_plain_modules_with_sharded_parameters() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    sharded_step(model, 0, mesh["dp"].get_local_rank())

    twin = copy.deepcopy(model)

    assert isinstance(twin.up.weight, DTensor)
    assert torch.equal(full(twin.up.weight), full(model.up.weight))
    with pytest.raises(ValueError, match="not replicated"):
        paceline.replica(twin)
    wrapper = paceline.DistributedDataParallel(mlp(mesh["tp"])[0], device_mesh=mesh["dp"])
    again = copy.deepcopy(wrapper)
    sharded_step(again, 0, mesh["dp"].get_local_rank())
    assert isinstance(again.module.up.weight.grad, DTensor)
    assert torch.equal(full(again.module.up.weight.grad), full(model.up.weight.grad))


@ranks(4)
def test_the_page_about_a_replica_says_what_is_sharded() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])

    page = paceline.replica(paceline.replicate(model, mesh=mesh["dp"])).explain()

    assert "6 trained, 0 frozen; 4 of them sharded over tp" in page


# ---- what cannot be right ---------------------------------------------------------------------------


@ranks(4)
def test_a_gradient_that_is_partial_over_another_mesh_raises_and_names_it() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model.down.bias.register_hook(lambda g: DTensor.from_local(g.to_local(), other, [Partial()]))

    with pytest.raises(
        paceline.UnsyncedGradients,
        match=r"of down.bias is Partial\(sum\) over all, but the parameter is Replicate\(\) over tp",
    ):
        sharded_step(model, 0, mesh["dp"].get_local_rank())


@ranks(4)
def test_no_mesh_for_a_module_with_dtensors() -> None:
    model, _ = mlp(mesh_of()["tp"])

    with pytest.raises(ValueError, match=r"up.weight \(Shard\(0\) over tp\).*mesh=mesh\[\"dp\"\]"):
        paceline.replicate(model)
    with pytest.raises(ValueError, match=r"up.weight"):
        paceline.DistributedDataParallel(model)


@ranks(4)
def test_the_dimension_that_the_parameters_are_sharded_over() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])

    with pytest.raises(ValueError, match=r"would be averaged over.*up.weight \(Shard\(0\) over tp\)"):
        paceline.replicate(model, mesh=mesh["tp"])


@ranks(4)
def test_parameters_that_are_spread_over_the_data_parallel_dimension(rank: int) -> None:
    mesh = mesh_of()
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Replicate(), Shard(0)]))
    theirs = "0, 2" if rank % 2 == 0 else "1, 3"

    with pytest.raises(
        ValueError,
        match=rf"averaged over \(ranks {theirs}\): weight \(Replicate\(\) over dp, Shard\(0\) over tp\)",
    ):
        paceline.replicate(model, mesh=mesh["dp"])


@ranks(4)
def test_parameters_that_are_partial() -> None:
    mesh = mesh_of()
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(WIDTH, WIDTH), mesh["tp"], [Partial()]))

    with pytest.raises(ValueError, match=r"weight \(Partial\(sum\) over tp\) hold a sum"):
        paceline.replicate(model, mesh=mesh["dp"])


@ranks(4)
def test_ranks_that_have_sharded_their_models_differently() -> None:
    mesh = mesh_of()
    torch.manual_seed(1)
    style = ColwiseParallel() if mesh["dp"].get_local_rank() == 0 else RowwiseParallel()
    model = parallelize_module(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh["tp"], {"0": style})

    with pytest.raises(
        paceline.RanksDisagree, match=r"0.weight is .*Shard\(0\) over tp.* but .*Shard\(1\) over tp"
    ):
        paceline.replicate(model, mesh=mesh["dp"])


@ranks(4)
def test_a_mesh_of_several_dimensions_is_refused_by_its_names() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])

    with pytest.raises(
        ValueError, match=r"one mesh dimension, such as mesh\[\"dp\"\]; this mesh has .*dp.*tp"
    ):
        paceline.replicate(model, mesh=mesh)


@ranks(4)
def test_ranks_that_choose_different_dimensions_are_told_so_within_seconds(rank: int) -> None:
    mesh = mesh_of()
    chosen = "dp" if rank < 2 else "tp"

    told = pytest.raises(
        paceline.RanksDisagree,
        match=rf"this one over dp \(ranks {rank}, {rank + 2}\), rank {rank + 2} over tp \(ranks 2, 3\)",
    )
    # Those of the other choice are complete, and find nothing wrong with plain parameters.
    with told if rank < 2 else contextlib.nullcontext():
        paceline.replicate(nn.Linear(2, 2), mesh=mesh[chosen])


@ranks(2)
def test_what_is_no_mesh_and_a_name_that_the_mesh_does_not_have() -> None:
    with pytest.raises(TypeError, match="mesh has to be a DeviceMesh, got str"):
        paceline.replicate(nn.Linear(2, 2), mesh="dp")
    with pytest.raises((KeyError, ValueError, RuntimeError), match="data"):
        mesh_of(2, 1)["data"]


# ---- a step counts on all parts, or on none ---------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize("checks", [False, "skip"])
def test_a_failure_on_one_rank_drops_the_step_on_the_ranks_with_the_other_parts_too(
    rank: int, checks: Any
) -> None:
    mesh = mesh_of()
    model, whole = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"], check_finite=checks)
    optimizer, reference = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, whole))

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("boom")

    # After the last collective of the tensor-parallel ranks in this backward: nobody of them waits in one.
    handle = model.up.weight.register_hook(fail) if rank == 0 else None
    expected = ValueError if rank == 0 else paceline.PeerFailed
    with pytest.raises(expected, match="boom"):
        sharded_step(model, 0, mesh["dp"].get_local_rank())
    assert all(p.grad is None for p in model.parameters())
    if handle is not None:
        handle.remove()

    for step in range(1, 3):
        sharded_step(model, step, mesh["dp"].get_local_rank())
        whole_step(whole, step)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, atol=1e-6, rtol=1e-5)


@ranks(4)
def test_ranks_with_parts_of_one_model_have_to_give_the_same_weight(rank: int) -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])

    with pytest.raises(
        paceline.RanksDisagree, match="1 and 1 among .* 1 and 6 among those with the parts of"
    ):
        with paceline.weight(model, 6 if rank == 3 else 1):
            sharded_step(model, 0, mesh["dp"].get_local_rank())


@ranks(4)
def test_a_copy_of_a_parameter_that_is_not_finite_stops_everybody(rank: int) -> None:
    mesh = mesh_of()
    model = nn.Linear(WIDTH, WIDTH)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [Replicate()])))
    paceline.replicate(model, mesh=mesh["dp"], check_finite="skip")
    if rank == 0:
        model.bias.register_hook(lambda g: g * math.nan)

    batch = distribute_tensor(batch_of(0, mesh["dp"].get_local_rank()), mesh["tp"], [Replicate()])
    model(batch).square().mean().backward()

    assert model.bias.grad is None


@ranks(4)
def test_sharded_layers_that_come_later_are_checked_and_counted_in(rank: int) -> None:
    mesh = mesh_of()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    paceline.replicate(model, mesh=mesh["dp"], check_finite="skip")
    (model(batch_of(0)).square().mean()).backward()
    model.zero_grad()
    late = parallelize_module(
        nn.Linear(WIDTH, WIDTH), mesh["tp"], ColwiseParallel(output_layouts=Replicate())
    )
    model.append(late)
    if rank == 1:
        late.weight.register_hook(lambda g: g * math.nan)

    model(batch_of(1, mesh["dp"].get_local_rank())).square().mean().backward()
    assert model[0].weight.grad is None
    odd = nn.Linear(WIDTH, WIDTH)
    odd.weight = nn.Parameter(distribute_tensor(odd.weight.data, mesh["dp"], [Shard(0)]))
    model.append(odd)
    with pytest.raises(ValueError, match=r"would be averaged over.*2.weight \(Shard\(0\) over dp\)"):
        model(batch_of(2))


@ranks(4)
def test_a_gradient_that_somebody_has_put_there_with_other_placements_is_refused() -> None:
    mesh = mesh_of()
    model, _ = mlp(mesh["tp"])
    paceline.replicate(model, mesh=mesh["dp"])
    with paceline.no_sync(model):
        sharded_step(model, 0, mesh["dp"].get_local_rank())
    model.down.bias.grad = DTensor.from_local(torch.ones(WIDTH), mesh["tp"], [Partial()])

    with pytest.raises(
        paceline.UnsyncedGradients, match=r"down.bias is Partial\(sum\) over tp, but the param"
    ):
        model.head(batch_of(0)).sum().backward()


@ranks(4)
def test_different_choices_in_different_lines_are_no_disagreement(rank: int) -> None:
    mesh = mesh_of()
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    if rank == 2:
        time.sleep(3)
    if mesh["tp"].get_local_rank() == 0:
        paceline.replicate(one, mesh=mesh["dp"])
    paceline.replicate(other, mesh=mesh["tp"])

    assert paceline.replica(other).size == 2
