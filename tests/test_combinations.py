"""Features together, and failures in the middle of them: no rank waits in vain, no ranks drift apart."""

import contextlib
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.comm import Comm, Pending
from paceline.control import wiring
from paceline.errors import UnusedParameters
from paceline.hooks import GradBucket, average, quantized
from paceline.testing import ranks


def net(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


def x(rank: int = 0) -> torch.Tensor:
    return torch.ones(1, 2) * (rank + 1)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def alike(flat: torch.Tensor) -> bool:
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat.contiguous())
    return all(torch.equal(rows[0], row) for row in rows)


# ---- join -------------------------------------------------------------------------------------------


@ranks(2, timeout=20)
def test_early_stop_with_two_models_leaves_both_usable(rank: int) -> None:
    a, b = paceline.replicate(net()), paceline.replicate(net())

    with pytest.raises(paceline.InputsExhausted):
        with paceline.join(a, b, early="stop"):
            for _ in range(1 + rank):
                for model in (a, b):
                    model.zero_grad()
                    model(x(rank)).sum().backward()

    for model in (a, b):
        model.zero_grad()
        model(x(rank)).sum().backward()
        assert alike(model[0].weight.grad)


@ranks(2, timeout=20)
def test_a_failure_between_the_backwards_of_two_joined_models_reaches_both(rank: int) -> None:
    a, b = paceline.replicate(net()), paceline.replicate(net())

    with pytest.raises((ValueError, paceline.PeerFailed), match="between"):
        with paceline.join(a, b):
            a(x()).sum().backward()
            if rank == 1:
                raise ValueError("between")
            b(x()).sum().backward()


@ranks(2, timeout=20)
def test_one_backward_through_two_joined_models_is_refused(rank: int) -> None:
    a, b = paceline.replicate(net()), paceline.replicate(net())

    with pytest.raises(RuntimeError, match="one backward reaches several models"):
        with paceline.join(a, b):
            b(a(x())).sum().backward()


@ranks(2, timeout=20)
def test_a_second_exception_in_a_joined_loop_is_told_as_well(rank: int) -> None:
    model = paceline.replicate(net())
    seen = []
    for word in ("first", "second"):
        try:
            with paceline.join(model):
                if rank == 1:
                    raise ValueError(word)
                model(x()).sum().backward()
        except (ValueError, paceline.PeerFailed) as error:
            seen.append(word in str(error))

    assert seen == [True, True]


@pytest.mark.parametrize("how", ["an exception", "early termination"])
@ranks(2, timeout=20)
def test_a_wrapper_joins_again_after_a_block_that_raised(rank: int, how: str) -> None:
    model = Ours(net())
    with contextlib.suppress(ZeroDivisionError, RuntimeError):
        with model.join(throw_on_early_termination=how == "early termination"):
            for _ in range(1 + rank if how == "early termination" else 1):
                model(x(rank)).sum().backward()
            if how == "an exception":
                raise ZeroDivisionError

    model.zero_grad()
    model(x(rank)).sum().backward()
    assert alike(model.module[0].weight.grad)
    with model.join():
        for _ in range(1 + rank):
            model(x(rank)).sum().backward()
    assert alike(weights(model))


@ranks(2)
def test_the_two_doors_to_join_know_of_each_other(rank: int) -> None:
    model = Ours(net())

    with paceline.join(model):
        with pytest.raises(RuntimeError, match=r"join\(\) inside join\(\)"):
            model.join()
    with model.join():
        with pytest.raises(RuntimeError, match=r"join\(\) inside join\(\)"):
            paceline.join(model).__enter__()


@ranks(2, timeout=20)
def test_checkpoints_that_come_back_to_a_parameter_work_in_join(rank: int) -> None:
    model = paceline.replicate(net(), bucket_mb=1e-6)
    start = x().requires_grad_()

    with paceline.join(model):
        for _ in range(1 + rank):
            model.zero_grad()
            again = checkpoint(model[1], start, use_reentrant=True)
            model[1](model[0](again)).sum().backward()

    assert alike(weights(model))


# ---- wrappers, groups and hooks ---------------------------------------------------------------------


@ranks(2)
def test_a_second_wrapper_that_is_refused_leaves_the_first_at_work(rank: int) -> None:
    bare = nn.ModuleDict({"a": nn.Linear(2, 2)})
    first = Ours(bare)

    with pytest.raises(ValueError, match="no forward"):
        Ours(bare, mixed_precision=paceline.Precision(torch.bfloat16))

    bare["a"](x(rank)).sum().backward()
    assert alike(bare["a"].weight.grad)
    assert first.module is bare


@ranks(2)
def test_a_change_of_group_keeps_the_optimizer_and_the_guard(rank: int) -> None:
    model = paceline.replicate(net())
    paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    before = weights(model)

    paceline.replica(model).change_group(dist.new_group([0, 1]))
    model(x(rank)).sum().backward()

    assert not torch.equal(weights(model), before)
    assert alike(weights(model))


@ranks(2)
def test_a_wrapper_alone_grows_into_a_guarded_group(rank: int) -> None:
    groups = [dist.new_group([r]) for r in range(2)]
    model = Ours(net(), process_group=groups[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    model._update_process_group(dist.group.WORLD)

    with model.no_sync():
        model(x(rank)).sum().backward()
    with pytest.raises(paceline.UnsyncedGradients):
        optimizer.step()


@ranks(2)
def test_precision_stays_when_the_hook_is_changed(rank: int) -> None:
    model = paceline.replicate(net(), precision=paceline.Precision(reduce=torch.bfloat16))

    paceline.replica(model).set_hook(quantized())

    assert repr(paceline.replica(model).hook).startswith("in_dtype(torch.bfloat16, quantized(")


@ranks(2)
def test_copies_of_a_wrapper_have_its_hook(rank: int) -> None:
    import copy

    model = Ours(net())
    paceline.replica(model).set_hook(quantized())

    twin = copy.deepcopy(model)
    shallow = copy.copy(model)

    assert repr(paceline.replica(twin).hook) == repr(paceline.replica(model).hook)
    shallow(x(rank)).sum().backward()  # it takes the module over
    assert alike(shallow.module[0].weight.grad)


@ranks(2, timeout=20)
def test_a_bad_argument_on_one_rank_is_heard_of_on_every_rank(rank: int) -> None:
    for wrap in (
        lambda: paceline.replicate(net(), left_out=["9.weight"] if rank else []),
        lambda: paceline.replicate(net(), hook=(lambda bucket: None) if rank else average),
        lambda: Ours(net(), bucket_cap_mb=-1 if rank else None),
        lambda: Ours(net(), device_ids=[0] if rank else None),
    ):
        with pytest.raises((ValueError, TypeError) if rank else paceline.PeerFailed):
            wrap()


@ranks(2, timeout=20)
def test_a_hook_that_cannot_be_bound_on_one_rank_is_refused_on_every_rank(rank: int) -> None:
    class Unwilling(type(quantized())):  # type: ignore[misc]
        def bind(self, named: object, comm: Comm) -> None:
            if comm.rank == 1:
                raise ValueError("saved by another rank")
            super().bind(named, comm)

    hook = quantized()
    hook.__class__ = Unwilling
    model = net()
    with pytest.raises(paceline.PeerFailed if rank == 0 else ValueError, match="saved by another rank"):
        paceline.replicate(model, hook=hook)

    model(x(rank)).sum().backward()  # a plain module still
    assert not alike(model[0].weight.grad)


@pytest.mark.parametrize("where", ["one machine", "several machines"])
@ranks(2, timeout=20)
def test_a_hook_that_leaves_a_collective_unanswered_ends_every_replica_over_its_group(
    rank: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "several machines":
        monkeypatch.setattr(wiring, "this_host", lambda: str(os.getpid()))

    def broken(bucket: GradBucket, comm: Comm) -> Pending:
        if comm.rank == 1:
            raise ValueError("no codec")
        return Pending(bucket.flat, dist.all_reduce(bucket.flat, async_op=True))  # past the comm

    a, b = paceline.replicate(net(), hook=broken), paceline.replicate(net())
    with pytest.raises((ValueError, paceline.PeerFailed), match="no codec"):
        (a(x()).sum() * 1000).backward()

    with pytest.raises(paceline.PeerLost, match="no reduction is possible any more"):
        b(x(rank)).sum().backward()


@ranks(2)
def test_a_scripted_part_can_be_replicated(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part = torch.jit.script(nn.BatchNorm1d(2))
    model = paceline.replicate(nn.Sequential(part, nn.Linear(2, 2)))

    model(torch.randn(4, 2)).sum().backward()

    assert alike(model[1].weight.grad)


@ranks(2)
@pytest.mark.parametrize("door", [paceline.replicate, Ours], ids=["replicate", "wrapper"])
def test_a_scripted_module_can_be_replicated(rank: int, door: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = door(torch.jit.script(net()))

    model(x(rank)).sum().backward()

    assert all(alike(p.grad) for p in model.parameters())


# ---- sparse gradients -------------------------------------------------------------------------------


@ranks(2)
def test_rows_agreed_on_before_are_kept_when_one_rank_adds_to_them(rank: int) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 2, sparse=True)
    model = paceline.replicate(nn.ModuleDict({"table": table, "head": nn.Linear(2, 2)}))
    words = torch.tensor([1, 2])

    table(words).sum().backward()  # agreed: ones in rows 1 and 2
    loss = model["head"](x()).sum()
    (loss + table(words).sum() if rank == 0 else loss).backward()

    expected = torch.zeros(5, 2)
    expected[1:3] = 1.5
    torch.testing.assert_close(table.weight.grad.to_dense(), expected)


@ranks(2)
def test_unused_error_counts_a_sparse_table_that_is_used(rank: int) -> None:
    model = paceline.replicate(
        nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)), unused="error"
    )

    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()


# ---- distributed autograd ---------------------------------------------------------------------------


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        return self.a(inputs).sum() + (self.b(inputs).sum() if both else 0)


@ranks(2, timeout=40, warnings="ignore")
def test_passes_of_distributed_autograd_go_on_after_one_that_was_refused(rank: int) -> None:
    from torch.distributed import autograd, rpc

    shared = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path(shared[0], 'rpc')}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    model = Ours(Forked())

    def run(*, both: bool = True) -> torch.Tensor:
        with autograd.context() as context:
            autograd.backward(context, [model(x(rank), both=both)])
            return autograd.get_gradients(context)[model.module.a.weight].clone()

    assert alike(run())
    with pytest.raises(UnusedParameters, match="has to compute the same gradients on every rank"):
        run(both=rank == 0)
    assert alike(run())
    rpc.shutdown(graceful=False)
