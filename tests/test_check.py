import os
import random
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.checking import check
from paceline.hooks import in_dtype, powersgd
from paceline.testing import ranks


class Block(nn.Module):
    """A transformer's, small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def gpt_loss(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 32, (2, 9))
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def train(model: nn.Module, steps: int = 2, **rest: Any) -> None:
    model = paceline.replicate(model, **rest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def kinds(report: Any, rank: int = 0) -> list[str]:
    return [each.kind for each in report.collectives[rank] if each.kind != "exchange"]


# ---- what is found -------------------------------------------------------------------------------


def test_a_collective_of_rank_0_alone_is_found_with_both_lines():
    def step(rank):
        x = torch.ones(4)
        if rank == 0:
            dist.all_reduce(x)  # line 3
        dist.barrier()  # line 4

    with pytest.raises(paceline.RanksDisagree) as caught:
        check(step)

    first = step.__code__.co_firstlineno
    message = str(caught.value)
    assert "rank 0: all_reduce of 16 B float32 on the default group (64 ranks), at " in message
    assert f"test_check.py:{first + 3}," in message
    assert "ranks 1, 2, 8, 32, 63: barrier" in message
    assert f"test_check.py:{first + 4}." in message
    assert caught.value.ranks == (1, 2, 8, 32, 63)


def test_a_barrier_that_one_rank_skips_is_found():
    def step(rank):
        dist.all_reduce(torch.ones(2))
        if rank != 63:
            dist.barrier()

    with pytest.raises(
        paceline.RanksDisagree,
        match=r"rank 0: barrier on .*but rank 63: nothing more. What came before is the same: all_",
    ):
        check(step)


def test_ranks_that_are_not_asked_for_are_not_looked_at():
    def step(rank):
        if rank != 5:
            dist.barrier()

    assert check(step).agrees
    with pytest.raises(paceline.RanksDisagree, match="rank 5: nothing more"):
        check(step, only="all")
    with pytest.raises(paceline.RanksDisagree, match="rank 5: nothing more"):
        check(step, only=[5, 9])


def test_two_collectives_in_another_order_are_found():
    def step(rank):
        a, b = torch.ones(2), torch.ones(3)
        first, second = (a, b) if rank < 2 else (b, a)
        dist.all_reduce(first)
        dist.all_reduce(second)

    with pytest.raises(
        paceline.RanksDisagree, match="all_reduce of 8 B float32.*ranks 2, 3: all_reduce of 12 B"
    ):
        check(step, ranks=4, only="all")


def test_another_dtype_of_the_same_size_is_found():
    def step(rank):
        dist.all_reduce(torch.ones(4, dtype=torch.bfloat16 if rank == 1 else torch.float16))

    with pytest.raises(paceline.RanksDisagree, match="8 B float16.*rank 1: all_reduce of 8 B bfloat16"):
        check(step, ranks=2)


def test_another_group_with_the_same_ranks_is_found():
    def step(rank):
        one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        dist.all_reduce(torch.ones(4), group=one if rank == 0 else other)

    with pytest.raises(paceline.RanksDisagree, match=r"ranks 0, 1 \(2 ranks\).*ranks 0, 1, number 2"):
        check(step, ranks=4, only=[0, 1])


def test_a_group_that_only_its_members_make_is_found():
    def step(rank):
        if rank in (0, 1):
            dist.new_group([0, 1])
        dist.barrier()

    with pytest.raises(paceline.RanksDisagree, match="rank 0: new_group of 2 ranks on the default group"):
        check(step, ranks=4)


def test_another_root_is_found():
    def step(rank):
        dist.broadcast(torch.ones(4), src=rank)

    with pytest.raises(paceline.RanksDisagree, match="from rank 0 on .*from rank 1 on"):
        check(step, ranks=2)


def test_a_functional_collective_of_some_ranks_is_found():
    def step(rank):
        x = torch.ones(4)
        if rank < 2:
            x = functional.all_reduce(x, "sum", dist.group.WORLD) + 1

    with pytest.raises(paceline.RanksDisagree, match="rank 0: all_reduce of 16 B float32.*nothing more"):
        check(step, ranks=4)


def test_a_layer_that_only_one_rank_has_is_found_by_name():
    def step(rank):
        model = mlp()
        if rank == 2:
            model.append(nn.Linear(2, 2))
        train(model)

    with pytest.raises(paceline.RanksDisagree, match=r"only rank 2: 3.weight: \(2, 2\) float32, trainable"):
        check(step)


def test_another_bucket_size_is_found_with_the_plans():
    def step(rank):
        train(nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 2)), bucket_mb=25 if rank else 0.001)

    with pytest.raises(
        paceline.RanksDisagree, match="rank 0: backward 1 of Sequential #1 with [34] buckets"
    ) as caught:
        check(step)

    assert "backward 1 of Sequential #1 with 1 bucket of" in str(caught.value)


def test_another_hook_is_found():
    def step(rank):
        train(mlp(), hook=in_dtype(torch.bfloat16) if rank == 1 else paceline.average)

    with pytest.raises(paceline.RanksDisagree, match="with the same tensors .* or with other settings"):
        check(step)


def test_another_number_of_backwards_is_found():
    def step(rank):
        train(mlp(), steps=3 if rank == 1 else 2)

    with pytest.raises(paceline.RanksDisagree, match="rank 0: nothing more, but rank 1: backward 3"):
        check(step)


def test_an_optimizer_step_that_one_rank_leaves_out_is_found():
    def step(rank):
        model = paceline.replicate(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
            if rank != 1:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(paceline.RanksDisagree, match="1 optimizer steps; only rank 1: 0 optimizer steps"):
        check(step)


def test_a_weight_that_only_one_rank_gives_is_found_and_a_skipped_batch_is_not():
    def step(rank, weighted=(0, 1, 2, 3)):
        model = paceline.replicate(mlp())
        if rank == 3:
            paceline.skip(model)
        elif rank in weighted:
            with paceline.weight(model, 8):
                model(torch.randn(8, 4)).sum().backward()
        else:
            model(torch.randn(8, 4)).sum().backward()

    assert check(step, ranks=4, only="all").agrees
    with pytest.raises(paceline.RanksDisagree, match="Only rank 0 has no weight; only rank 1: a weight"):
        check(lambda rank: step(rank, weighted=(1,)), ranks=4, only="all")


def test_a_branch_of_some_ranks_whose_hooks_communicate_is_found():
    def step(rank):
        model = mlp()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        x = torch.randn(8, 4)
        (model(x) if rank == 0 else model[0](x)).sum().backward()

    with pytest.raises(
        paceline.RanksDisagree, match="all_reduce of .* but ranks 1, 2, 8, 32, 63: all_reduce"
    ):
        check(step)


def test_a_send_without_its_recv_is_found():
    def step(rank):
        x = torch.ones(4)
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x[:2], 0)

    with pytest.raises(paceline.RanksDisagree, match="rank 0: send of 16 B.*rank 1: recv of 8 B"):
        check(step, ranks=2)
    with pytest.raises(paceline.RanksDisagree, match="rank 0: send .*rank 1: nothing more"):
        check(lambda rank: rank or dist.send(torch.ones(4), 1), ranks=2)


def test_a_difference_inside_a_group_of_a_mesh_is_found():
    """Neither of the two ranks is among those that are run anyway."""

    def step(rank):
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        if mesh["tp"].get_local_rank() != 1:
            dist.barrier(mesh["tp"].get_group())

    with pytest.raises(paceline.RanksDisagree, match=r"rank 0: barrier on mesh_tp \(8 ranks\)"):
        check(step)


# ---- what is clean -------------------------------------------------------------------------------


def test_a_replicated_model_agrees_and_its_collectives_are_counted():
    report = check(lambda: train(mlp()))

    assert report.ranks == (0, 1, 2, 8, 32, 63)
    # The model, a step, in which order its gradients came, another step.
    assert kinds(report) == ["broadcast", "all_reduce", "broadcast", "all_reduce"]
    assert "all_reduce" in str(report)
    assert str(report).startswith("64 ranks, of which 6 were run: 0, 1, 2, 8, 32, 63. They agree.")
    reduced = next(each for each in report.collectives[0] if each.kind == "all_reduce")
    assert (reduced.nbytes, reduced.dtype) == (58 * 4, "float32")
    assert reduced.where.startswith("tests/test_check.py:") or "test_check.py:" in reduced.where


def test_ranks_whose_gradients_come_in_different_orders_agree():
    """The ranks that are run again hear rank 0's order, as they would over a network."""

    def step(rank):
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        paceline.replicate(model, bucket_mb=1e-6)
        for _ in range(3):
            x = torch.ones(1, 4)
            for name in "abc" if rank < 2 else "cab":
                x = model[name](x)
            x.sum().backward()

    report = check(step)

    assert kinds(report).count("all_reduce") == 3 * 6
    assert kinds(report, 63) == kinds(report)
    sent = "broadcast of 24 B int32 from rank 0 on the default group (64 ranks)"
    assert sent in map(str, report.collectives[63])


def test_accumulation_agrees():
    def step(rank):
        model = paceline.replicate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            with paceline.accumulate(model, 2):
                for _ in range(2):
                    model(torch.randn(8, 4)).square().mean().backward()
            with paceline.no_sync(model):
                model(torch.randn(8, 4)).square().mean().backward()
            model(torch.randn(8, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            paceline.replica(model).clip_grad_norm_(1.0)
            optimizer.step()

    report = check(step)

    assert kinds(report).count("all_reduce") == 6


def test_the_class_agrees():
    def step():
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        model = paceline.DistributedDataParallel(mlp().to(local), device_ids=[local])
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.destroy_process_group()

    assert kinds(check(step)).count("all_reduce") == 2


def test_hooks_in_torchs_form_and_join_of_the_class_agree():
    def halve(group, bucket):
        future = dist.all_reduce(bucket.buffer().half(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].float() / dist.get_world_size())

    def step():
        model = paceline.DistributedDataParallel(mlp())
        model.register_comm_hook(dist.group.WORLD, halve)
        with model.join():
            for _ in range(2):
                model(torch.randn(8, 4)).sum().backward()
                model.zero_grad()

    report = check(step)

    assert [each.dtype for each in report.collectives[0] if each.kind == "all_reduce"] == ["float16"] * 2


def test_mixed_precision_agrees():
    def step():
        model = paceline.replicate(mlp().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(torch.randn(8, 4))
            assert out.dtype == torch.bfloat16
            scaler.scale(out.float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert kinds(check(step)).count("all_reduce") == 2


@pytest.mark.parametrize("hook", [in_dtype(torch.bfloat16), powersgd(rank=1)], ids=["in_dtype", "powersgd"])
def test_hooks_agree(hook):
    import copy

    report = check(lambda: train(mlp(32), steps=3, hook=copy.deepcopy(hook)))

    assert report.agrees


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": paceline.Precision(torch.bfloat16)},
        {"deterministic": True},
        {"check_finite": True},
        {"unused": "error"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_agree(settings):
    assert check(lambda: train(mlp(), **settings)).agrees


def test_audits_and_weights_agree():
    def step(rank):
        model = paceline.replicate(mlp())
        paceline.audit(model, every=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            batch = torch.randn(8 - rank % 2, 4)
            with paceline.weight(model, (batch > 0).sum()):
                model(batch).sum().backward()
            optimizer.step()

    assert check(step).agrees


def test_a_branch_that_some_ranks_leave_out_is_no_disagreement_of_a_replica():
    """The engine sends zeros for it, and all ranks come to the same plans."""

    def step(rank):
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
        paceline.replicate(model, bucket_mb=0.00001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            x = model["a"](torch.randn(2, 4))
            (model["c"](x) if rank % 2 else model["b"](x)).sum().backward()
            optimizer.step()

    assert check(step, ranks=2).agrees


def test_a_mesh_agrees_and_a_companion_is_run_in_each_group():
    def step():
        mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("dp", "tp"))
        dist.all_reduce(torch.ones(2), group=mesh["tp"].get_group())
        functional.all_reduce(torch.ones(2), "sum", mesh["tp"]) + 1
        model = paceline.replicate(mlp(), mesh=mesh["dp"])
        model(torch.randn(8, 4)).sum().backward()

    report = check(step)

    groups = {each.group.ranks for each in report.collectives[63]}
    assert all(len(set(group) & set(report.ranks)) > 1 for group in groups)
    assert {"mesh_dp (8 ranks)", "mesh_tp (8 ranks)"} <= {str(e.group) for e in report.collectives[63]}


def test_a_pipeline_of_different_stages_agrees():
    def step(rank):
        x = torch.ones(4)
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank < 3:
            dist.send(x, rank + 1)

    assert check(step, ranks=4, only="all").agrees


def test_every_collective_of_torch_is_heard():
    def step(rank):
        x, size = torch.ones(4), dist.get_world_size()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.empty(4) for _ in range(size)], x)
        dist.gather(x, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
        dist.scatter(x, [torch.empty(4) for _ in range(size)] if rank == 0 else None)
        dist.all_to_all_single(torch.empty(size), torch.ones(size))
        work = dist.all_reduce(x, async_op=True)
        assert work.is_completed()
        assert work.wait()
        dist.barrier()

    heard = ", ".join(kinds(check(step, ranks=4)))
    assert heard == "broadcast, reduce, all_gather, gather, scatter, all_to_all_single, all_reduce, barrier"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_may_be_read(workers):
    data = TensorDataset(torch.randn(64, 4))

    def step(rank):
        model = paceline.replicate(mlp())
        loader = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=True), num_workers=workers)
        for (batch,) in loader:
            model(batch).sum().backward()
            model.zero_grad()

    assert kinds(check(step, ranks=2)).count("all_reduce") == 4


def test_a_compiled_model_communicates_as_the_plain_one():
    def step():
        model = torch.compile(paceline.replicate(mlp()), backend="eager")
        model(torch.randn(8, 4)).sum().backward()

    assert kinds(check(step)) == ["broadcast", "all_reduce", "broadcast"]


def test_tensor_parallel_and_sharded_models_agree():
    def step():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model(torch.randn(2, 4)).sum().backward()
        sharded = fully_shard(mlp(), mesh=mesh["dp"])
        sharded(torch.randn(2, 4)).sum().backward()

    report = check(step, ranks=8)

    assert {"all_reduce", "reduce_scatter_tensor"} <= set(kinds(report))


@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_a_rank_that_is_alone_agrees(wrap):
    def step():
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        model(torch.randn(2, 4)).sum().backward()

    assert paceline.check(step, ranks=1).ranks == (0,)


def test_a_dimension_of_one_rank_of_a_mesh_agrees():
    def step():
        mesh = init_device_mesh("cpu", (1, 8), mesh_dim_names=("dp", "tp"))
        model = paceline.replicate(nn.Linear(4, 4), mesh=mesh["dp"])
        model(torch.randn(2, 4)).sum().backward()
        dist.all_reduce(torch.zeros(1), group=mesh.get_group("tp"))

    assert paceline.check(step, ranks=8).agrees


def test_a_checkpoint_of_one_rank_is_written_nowhere(tmp_path):
    def step(rank):
        model = paceline.replicate(nn.Linear(4, 4))
        model(torch.randn(2, 4)).sum().backward()
        if rank == 0:
            torch.save(model.state_dict(), tmp_path / "model.pt")
        dist.barrier()

    assert paceline.check(step).agrees
    assert not list(tmp_path.iterdir())


def test_a_thousand_ranks_of_a_gpt():
    def step():
        model = paceline.replicate(GPT())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            gpt_loss(model).backward()
            optimizer.step()
        return dist.get_rank(), dist.get_world_size()

    report = check(step, ranks=1000, only=[0, 999])

    assert report.results == {0: (0, 1000), 999: (999, 1000)}


# ---- what the step sees --------------------------------------------------------------------------


def test_each_rank_sees_its_place():
    def step(world):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        return world.rank, world.size, world.local_rank, dist.get_rank(), [os.environ[n] for n in names]

    report = check(step, ranks=20, only=[0, 11])

    assert report.results[11] == (11, 20, 3, 11, ["11", "20", "3"])


@pytest.mark.parametrize(
    "step",
    [
        lambda rank: rank,
        lambda rank=None: rank,
        lambda: dist.get_rank(),
        lambda world: world.rank,
        lambda w: w.rank,
    ],
)
def test_the_step_takes_a_rank_or_a_world_or_nothing(step):
    assert check(step, ranks=3).results == {0: 0, 1: 1, 2: 2}


def test_a_loss_may_be_logged_and_added_up(capsys):
    def step():
        total = 0.0
        for _ in range(2):
            total += torch.randn(4).sum().item() / 2
        print(f"loss {total:.3f}", round(total, 2), torch.randn(2).tolist(), f"{torch.randn(3).sum():.1f}")

    check(step, ranks=1)

    assert capsys.readouterr().out == "loss ? ? [?, ?] ?\n"


def test_models_may_be_made_and_moved_anywhere():
    def step():
        model = mlp().to(torch.bfloat16)
        assert model(torch.randn(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
        with torch.device("meta"):
            empty = mlp()
        with torch.device("cuda"):
            other = mlp()
        for each in (empty.to_empty(device="cuda"), other, mlp().to("cuda:1"), mlp().cuda(), mlp().to(0)):
            each(torch.randn(2, 4, device="cuda", pin_memory=True)).sum().backward()

    assert check(step, ranks=2).agrees


def test_a_number_of_tokens_may_divide_a_loss():
    def step():
        loss = torch.randn(4).sum() / torch.ones(4).sum().item()
        assert loss.shape == ()
        assert (2 * torch.ones(4).sum().item()) is not None

    assert check(step, ranks=1).agrees


# ---- what it cannot follow -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: 1 if loss > 3 else 2,
        lambda loss: 1 if loss.item() > 3 else 2,
        lambda loss: float(loss),
        lambda loss: int(loss.item()),
        lambda loss: loss.detach().numpy(),
        lambda loss: bool(torch.isfinite(loss)),
        lambda loss: torch.nonzero(loss),
        lambda loss: torch.ones(3)[torch.rand(3) > 0.5],
        lambda loss: sorted([loss.item(), 1.0]),
    ],
)
def test_code_that_needs_values_is_told_so_with_its_line(use):
    def step():
        use(torch.randn(4).sum())

    line = use.__code__.co_firstlineno

    with pytest.raises(
        RuntimeError, match=rf"test_check.py:{line} needs one: .*rehearse\(\), which computes"
    ):
        check(step)


@pytest.mark.parametrize("is_functional", [False, True])
def test_what_a_collective_has_left_is_not_known(is_functional):
    def step(rank):
        flag = torch.tensor(rank)
        assert flag.item() == rank
        view = flag.view(1)
        if is_functional:
            view = functional.all_reduce(flag, "sum", dist.group.WORLD)
        else:
            dist.all_reduce(flag)
        while view.item() < 1:  # the line
            pass

    with pytest.raises(RuntimeError, match="needs one: while view.item"):
        check(step)


def test_objects_cannot_be_followed():
    def step():
        dist.broadcast_object_list([1, 2], src=0)

    with pytest.raises(RuntimeError, match=r"test_check.py:\d+ sends some with broadcast_object_list\(\)"):
        check(step)


def test_torchs_own_wrapper_is_refused():
    def step():
        nn.parallel.DistributedDataParallel(mlp())

    with pytest.raises(
        RuntimeError, match=r"torch's DistributedDataParallel .*paceline.DistributedDataParallel"
    ):
        check(step)


def test_a_model_that_was_made_outside_is_refused():
    model = mlp()

    def step():
        model(torch.randn(8, 4)).sum().backward()

    with pytest.raises(ValueError, match="test_check.py:.*made outside of the step function"):
        check(step)
    with pytest.raises(ValueError, match="made outside of the step function"):
        check(lambda: train(model))
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def test_join_is_followed_where_all_ranks_have_the_same_batches():
    def step(rank, uneven=False):
        model = paceline.replicate(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.join(model):
            for _ in range(3 if uneven and rank == 0 else 2):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).sum().backward()
                optimizer.step()

    assert check(step).agrees
    with pytest.raises(RuntimeError, match=r"cannot follow join\(\)"):
        check(lambda rank: step(rank, uneven=True))


def test_what_a_rank_raises_says_which_rank_it_was():
    def step(rank):
        if rank == 2:
            raise KeyError("no such batch")

    with pytest.raises(KeyError) as caught:
        check(step)

    assert caught.value.__notes__ == [
        "in check(), on rank 2 of 64, with tensors that are all on the CPU; ranks 0, 1 had ended well"
    ]


# ---- the process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_is_left_as_it_was(fails):
    def step():
        os.environ["MINE"] = "1"
        torch.manual_seed(7)
        random.seed(7)
        torch.set_default_dtype(torch.float64)
        paceline.replicate(mlp())(torch.randn(2, 4, dtype=torch.float64)).sum().backward()
        if fails:
            raise KeyError

    torch.manual_seed(1)
    random.seed(1)
    expected = torch.randn(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    before = dict(os.environ), sys.excepthook, dist.init_process_group, torch.autograd._engine_run_backward

    try:
        check(step)
    except KeyError:
        assert fails

    after = dict(os.environ), sys.excepthook, dist.init_process_group, torch.autograd._engine_run_backward
    assert after == before
    assert not dist.is_initialized()
    assert torch.equal(torch.randn(3), expected[0])
    assert random.random() == expected[1]


@ranks(2)
def test_a_process_group_that_exists_is_refused(rank):
    with pytest.raises(RuntimeError, match="needs a process without a process group"):
        check(lambda: None)


def test_a_check_inside_a_check_is_refused():
    with pytest.raises(RuntimeError, match=r"check\(\) inside check\(\) or rehearse\(\)"):
        check(lambda: check(lambda: None))
    with pytest.raises(RuntimeError, match=r"check\(\) inside check\(\) or rehearse\(\)"):
        paceline.rehearse(lambda: check(lambda: None), ranks=2)


def test_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(lambda: train(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), ranks=2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((None,), TypeError, "takes the function"),
        ((nn.Linear(1, 1),), TypeError, "takes the function"),
        ((lambda a, b: None,), TypeError, "needs a, b"),
        ((print, "4"), TypeError, "whole number of ranks"),
        ((print, 0), ValueError, "at least one rank"),
        ((print, 4, "some"), ValueError, 'only has to be "all"'),
        ((print, 4, 3), TypeError, 'only has to be "all"'),
        ((print, 4, [4]), ValueError, "only names rank 4, but there are ranks 0 to 3"),
        ((print, 4, ["1"]), TypeError, "whole numbers"),
        ((print, 4, []), ValueError, "at least one rank"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        check(*arguments)


def test_a_coroutine_is_refused():
    async def step():
        pass

    with pytest.raises(TypeError, match="a plain function"):
        check(step)
