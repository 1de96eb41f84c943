"""Parameters that are left out, delayed, skipped where nobody uses them; a group that changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.testing import ranks

Theirs = torch.nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def share(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def everyones(flat: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return rows


# ---- left out ---------------------------------------------------------------------------------------


@ranks(2)
def test_what_is_left_out_is_each_ranks_own(rank: int) -> None:
    torch.manual_seed(rank)
    bare = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model = paceline.replicate(bare, left_out=["0.weight", "1.running_mean"])

    model(share(rank)).square().sum().backward()

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        rows = everyones(tensor.detach().float())
        assert torch.equal(rows[0], rows[1]) == (name not in ("0.weight", "1.running_mean")), name
    rows = everyones(model[0].weight.grad)
    assert not torch.equal(rows[0], rows[1])
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # nothing that the guard has to mind


@ranks(2)
def test_a_list_that_differs_between_the_ranks_is_named_on_every_rank(rank: int) -> None:
    with pytest.raises(paceline.RanksDisagree, match=r"0.weight is left out on rank 0 but \(8, 6\) float32"):
        paceline.replicate(net(), left_out=["0.weight"] if rank == 0 else [])


@ranks(2)
def test_torchs_attribute_and_method_leave_out_too(rank: int) -> None:
    bare = net()
    Ours._set_params_and_buffers_to_ignore_for_model(bare, ["0.weight"])

    model = Ours(bare)
    model(share(rank)).square().sum().backward()

    rows = everyones(model.module[0].weight.grad)
    assert not torch.equal(rows[0], rows[1])
    assert model.parameters_to_ignore == {"0.weight"}


@ranks(2)
@pytest.mark.parametrize("kind", ["on meta", "without a shape", "sharded"])
def test_what_is_left_out_may_be_what_could_not_be_replicated(rank: int, kind: str) -> None:
    odd = nn.LazyLinear(4) if kind == "without a shape" else nn.Linear(6, 4)
    if kind == "on meta":
        odd = odd.to("meta")
    bare = nn.ModuleDict({"net": net(), "odd": odd})
    if kind == "sharded":
        fully_shard(odd, mesh=init_device_mesh("cpu", (2,)))
    Ours._set_params_and_buffers_to_ignore_for_model(bare, ["odd.weight", "odd.bias"])

    model = Ours(bare)
    model.module["net"](share(rank)).square().sum().backward()

    rows = everyones(bare["net"][0].weight.grad)
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("what", ["left_out", "delayed"])
def test_unknown_names_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=f"{what} names what Sequential does not have: 9.weight"):
        paceline.replicate(net(), **{what: ["9.weight", "0.weight"]})
    with pytest.raises(TypeError, match=f"{what} takes a list of names, got the one string '0.weight'"):
        paceline.replicate(net(), **{what: "0.weight"})


# ---- delayed ----------------------------------------------------------------------------------------


@ranks(2)
def test_delayed_parameters_go_last_in_one_bucket(rank: int) -> None:
    model = paceline.replicate(net(), bucket_mb=1e-5, delayed=["4.weight", "0.weight", "0.bias"])

    for step in range(3):
        model.zero_grad()
        model(share(rank, step)).square().sum().backward()

        plan = paceline.replica(model).plan
        names = [[plan.specs[slot.parameter].name for slot in bucket.slots] for bucket in plan.buckets]
        assert sorted(names[-1]) == ["0.bias", "0.weight", "4.weight"]
        assert all(len(bucket) == 1 for bucket in names[:-1])
    torch.testing.assert_close(gradients(model), _reference(step))


def _reference(step: int) -> torch.Tensor:
    model = net()
    (sum(model(share(rank, step)).square().sum() for rank in range(2)) / 2).backward()
    return gradients(model)


@ranks(2)
def test_torchs_arguments_for_delayed_parameters(rank: int) -> None:
    bare = net()
    chosen = [("0.weight", bare[0].weight), ("0.bias", bare[0].bias)]
    model = Ours(bare, delay_all_reduce_named_params=chosen, param_to_hook_all_reduce=bare[0].bias)

    model(share(rank)).square().sum().backward()

    torch.testing.assert_close(gradients(model), _reference(0))


def test_one_of_torchs_two_arguments_alone_is_refused() -> None:
    with pytest.raises(
        ValueError, match="delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the"
    ):
        Ours(net(), param_to_hook_all_reduce=nn.Parameter(torch.zeros(1)))


# ---- buckets that nobody uses -----------------------------------------------------------------------


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return getattr(self, which)(x)


@ranks(2)
def test_a_bucket_that_no_rank_uses_is_not_sent(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Ours(Forked(), bucket_cap_mb=1e-5, skip_all_reduce_unused_params=True)
    comm = paceline.replica(model).comm
    sent: list[int] = []
    total = type(comm).total
    monkeypatch.setattr(
        type(comm), "total", lambda self, flat: (sent.append(flat.numel()), total(self, flat))[1]
    )

    for step in range(4):
        sent.clear()
        model.zero_grad()
        model(share(rank, step), "a").square().sum().backward()
        assert sorted(sent) == [4, 24]
        assert model.module.b.weight.grad is None

    sent.clear()
    model(share(rank), "b" if rank else "a").square().sum().backward()  # each is used by somebody
    assert sorted(sent) == [4, 4, 24, 24]
    rows = everyones(gradients(model))
    assert torch.equal(rows[0], rows[1])


# ---- another group ----------------------------------------------------------------------------------


@ranks(3)
def test_the_group_changes_under_a_living_wrapper(rank: int) -> None:
    pair = dist.new_group([0, 1])
    model = Ours(net())
    model(share(rank)).square().sum().backward()
    model.zero_grad()
    if rank == 2:
        return

    model._update_process_group(pair)
    for step in range(3):
        model.zero_grad()
        model(share(rank, step)).square().sum().backward()
        torch.testing.assert_close(gradients(model), _reference(step))
    assert model.process_group is pair
    assert paceline.replica(model).size == 2


@ranks(3)
def test_a_group_that_lacks_this_rank_is_refused(rank: int) -> None:
    pair = dist.new_group([0, 1])
    model = Ours(net())

    if rank == 2:
        with pytest.raises(ValueError, match="this rank is not in the process group that was given"):
            model._update_process_group(pair)
    else:
        model._update_process_group(pair)
        model(share(rank)).square().sum().backward()


# ---- wrapping twice ---------------------------------------------------------------------------------


@ranks(2)
def test_the_newest_wrapper_of_a_module_counts(rank: int) -> None:
    bare = net()
    first = Ours(bare)
    second = Ours(bare, bucket_cap_mb=1e-4)

    second(share(rank)).square().sum().backward()

    torch.testing.assert_close(gradients(second), _reference(0))
    assert paceline.replica(bare) is paceline.replica(second)
    del first
    second.zero_grad()
    second(share(rank)).square().sum().backward()
    torch.testing.assert_close(gradients(second), _reference(0))
