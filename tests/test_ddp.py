"""DistributedDataParallel: torch's arguments, attributes and prefix on paceline's engine."""

import copy
import gc
import inspect
import io
import pickle
import weakref
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.ddp_arguments import move_to
from paceline.testing import ranks

Theirs = torch.nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def share(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(2)[rank]


@ranks(2)
@pytest.mark.parametrize("is_static", [False, True])
def test_optimizers_inside_hooks_begin_when_they_do_with_torchs_class(rank: int, is_static: bool) -> None:
    seen = []
    for kind in (Ours, Theirs):
        model, begun = kind(net(), static_graph=is_static), []

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            begun.append(model._has_rebuilt_buckets)  # noqa: B023 - run in this turn
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)
        for _ in range(4):
            model(share(rank)).sum().backward()
        seen.append(begun)

    assert seen[0] == seen[1]


def test_it_takes_torchs_arguments_in_torchs_order() -> None:
    ours, theirs = (list(inspect.signature(c.__init__).parameters) for c in (Ours, Theirs))

    assert ours[: len(theirs)] == theirs
    own = ["deterministic", "check_finite", "loader_check", "stall_seconds", "timeout_seconds"]
    assert ours[len(theirs) :] == own  # by keyword only


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
        {"bucket_cap_mb_list": [1e-4, 1]},
        {"forward_sync_buffers": False},
        {"batched_grad_copy": True},
        {"device_ids": []},
    ],
)
def test_it_trains_as_torchs_class_does(rank: int, options: dict) -> None:
    ours, theirs = Ours(net(), **options), Theirs(net())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]

    for step in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(share(rank, step)).square().mean().backward()
            optimizer.step()

    for (name, p), (other, q) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(p, q)


@ranks(2)
def test_state_dicts_are_interchangeable_with_torchs(rank: int) -> None:
    ours, theirs = Ours(net()), Theirs(net())

    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())

    assert all(name.startswith("module.") for name in ours.state_dict())


@ranks(2)
def test_no_sync_and_the_flag_that_scripts_set_by_hand(rank: int) -> None:
    model = Ours(net())
    model(share(rank)).sum().backward()
    expected = model.module[0].weight.grad.clone() * 2
    model.zero_grad()

    with model.no_sync():
        assert not model.require_backward_grad_sync
        model(share(rank)).sum().backward()
    model(share(rank)).sum().backward()
    torch.testing.assert_close(model.module[0].weight.grad, expected)

    model.zero_grad()
    for last in (False, True):
        model.require_backward_grad_sync = last
        model(share(rank)).sum().backward()
    torch.testing.assert_close(model.module[0].weight.grad, expected)


@ranks(2)
def test_attributes_that_frameworks_read(rank: int) -> None:
    model = Ours(net(), find_unused_parameters=True, bucket_cap_mb=5)

    assert model.process_group is dist.group.WORLD
    assert (model.device, model.device_type) == (torch.device("cpu"), "cpu")
    assert (model.device_ids, model.output_device, model.dim) == (None, None, 0)
    assert model.find_unused_parameters
    assert not model.static_graph
    assert model.broadcast_buffers
    assert model.bucket_bytes_cap == 5 * 1024 * 1024
    assert not model.is_multi_device_module
    assert model.parameters_to_ignore == set()
    model._set_static_graph()
    assert model.static_graph
    assert isinstance(model.train(), Ours)
    assert not model.eval().module.training


@ranks(2)
def test_forward_takes_any_arguments(rank: int) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, *parts: torch.Tensor, factor: float = 1.0, extra: dict | None = None) -> list:
            return [part * self.scale * factor + (extra or {}).get("plus", 0) for part in parts]

    one, two = Ours(Picky())(torch.ones(1), torch.ones(1), factor=2.0, extra={"plus": 1})

    assert one == two == 3


@ranks(2)
def test_buffers_are_taken_before_a_forward_as_torch_does(rank: int) -> None:
    bare = nn.Sequential(nn.Linear(6, 2))
    bare.register_buffer("mark", torch.zeros(1))
    for options, expected in (({}, 0.0), ({"forward_sync_buffers": False}, float(rank))):
        model = Ours(bare, **options)
        bare.mark.fill_(rank)
        model(share(rank))
        assert bare.mark.item() == expected
        del model


@ranks(2)
def test_init_sync_false_keeps_each_ranks_parameters(rank: int) -> None:
    bare = nn.Linear(2, 2)
    bare.weight.data.fill_(rank)

    Ours(bare, init_sync=False)

    assert (bare.weight == rank).all()


@ranks(2)
def test_left_out_parameters_and_buffers_stay_each_ranks_own(rank: int) -> None:
    bare = net()
    bare.register_buffer("mine", torch.full((1,), float(rank)))
    bare[2].bias.data.fill_(rank)
    Ours._set_params_and_buffers_to_ignore_for_model(bare, ["2.bias", "mine"])

    model = Ours(bare)
    model(share(rank)).sum().backward()

    assert bare.mine.item() == rank
    assert (bare[2].bias == rank).all()
    assert model.parameters_to_ignore == {"2.bias", "mine"}


@ranks(2)
def test_the_module_may_be_wrapped_again_when_the_wrapper_is_gone(rank: int) -> None:
    bare = net()
    for _ in range(2):
        model = Ours(bare)
        model(share(rank)).sum().backward()
        del model

    Ours(bare)


@ranks(2)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_start_their_own_engine(rank: int, how: str) -> None:
    group = dist.new_group([0, 1])
    model = Ours(net(), process_group=group)
    if how == "deepcopy":
        other = copy.deepcopy(model)
        assert other.process_group is group
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)

    if rank == 0:  # a copy for evaluation, on one rank only, waits for nobody
        with torch.no_grad():
            other(share(rank))
    for m in (model, other):
        m(share(rank)).sum().backward()

    torch.testing.assert_close(other.module[0].weight.grad, model.module[0].weight.grad)


@ranks(2)
def test_a_copy_keeps_no_sync(rank: int) -> None:
    model = Ours(net())
    with model.no_sync():
        other = copy.deepcopy(model)
        other(share(rank) + rank).sum().backward()

    mine = other.module[0].weight.grad.clone()
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    assert not torch.equal(*theirs)


def test_one_process_alone_works_without_a_group() -> None:
    model = Ours(net())

    model(torch.ones(1, 6)).sum().backward()

    assert model.process_group is None
    assert model.module[0].weight.grad is not None


Pair = namedtuple("Pair", "left right")


def test_moving_inputs_goes_into_containers_and_leaves_the_rest() -> None:
    tensor, thing = torch.ones(1), object()
    moved = move_to(torch.device("meta"), {"a": [tensor, (tensor, 3)], "b": Pair(tensor, thing)})

    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == 3
    assert isinstance(moved["b"], Pair)
    assert moved["b"].left.is_meta
    assert moved["b"].right is thing


# ---- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"device_ids": [0]},
            "device_ids=[0] and output_device=None are for a module on one GPU, but this one is on cpu",
        ),
        (
            {"device_ids": [0, 1]},
            "device_ids can only be None or contain a single element. One process trains on one GPU: give "
            "the one that its module is on, got [0, 1]",
        ),
        (
            {"delay_all_reduce_named_params": []},
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time",
        ),
        ({"output_device": 1}, "device_ids=None and output_device=1 are for a module on one GPU"),
        ({"bucket_cap_mb": 0}, "greater than 0, got [0]"),
        ({"bucket_cap_mb": -3}, "greater than 0, got [-3]"),
        (
            {"bucket_cap_mb": 1, "bucket_cap_mb_list": [1, 2]},
            "give bucket_cap_mb (1) or bucket_cap_mb_list ([1, 2])",
        ),
        ({"process_group": -100}, "this rank is not in the process group"),
    ],
)
def test_bad_arguments(options: dict, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Ours(net(), **options)

    assert text in str(caught.value)


def test_a_group_beside_a_mesh_is_refused_as_torch_does() -> None:
    words = r"^Cannot specify both process_group and device_mesh arguments\. .*leave one of them out$"
    with pytest.raises(RuntimeError, match=words):
        Ours(net(), process_group=1, device_mesh=2)


@ranks(4)
def test_a_mesh_of_two_dimensions_is_refused_with_their_names() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unnamed = dist.device_mesh.init_device_mesh("cpu", (2, 2))

    with pytest.raises(
        RuntimeError, match=r"^Only 1D device mesh is supported, .* has \('dp', 'tp'\); give one"
    ):
        Ours(net(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="this one has 2 dimensions; give one"):
        Ours(net(), device_mesh=unnamed)


def test_names_are_given_to_exactly_the_trained_parameters() -> None:
    model = Ours(nn.Linear(3, 2))
    parameters, _ = model._build_params_for_reducer()

    assert model._build_debug_param_to_name_mapping(parameters) == {0: "weight", 1: "bias"}
    strange = r"^Expected param to name mapping of what is trained here, .* not: \(2, 3\) at place 2\. Give"
    with pytest.raises(ValueError, match=strange):
        model._build_debug_param_to_name_mapping([*parameters, nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(ValueError, match="^Param with name bias: trained here as well, but missing from the"):
        model._build_debug_param_to_name_mapping(parameters[:1])


class Stepping(Ours):
    """A wrapper as frameworks write them: it replaces forward, and asks what is due around it."""

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.reducer._rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        with self._inside_ddp_forward():
            output = self.module(x)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.reducer.prepare_for_backward([])
        return output


@ranks(2)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_subclass_asks_when_buffers_are_due(rank: int, where: str) -> None:
    model = Stepping(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    if where == "after":
        model._register_buffer_comm_hook(
            model, lambda ddp, buffers: ddp._default_broadcast_coalesced(list(buffers.values()))
        )
    due = (model._check_sync_bufs_pre_fwd(), model._check_sync_bufs_post_fwd())

    for step in range(2):
        model.train_step(share(rank, step)).sum().backward()
        model.zero_grad()
    if where == "before":
        model._sync_buffers()

    assert due == (where == "before", where == "after")
    means = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(means, model.module[1].running_mean)
    assert torch.equal(*means)
    assert Ours._get_active_ddp_module() is None


def test_what_is_no_optimizer_cannot_step_inside_backward() -> None:
    with pytest.raises(ValueError, match="^Optimizer .*int.* does not have a functional counterpart"):
        Ours(net())._register_fused_optim(int, 0.1)


def test_only_modules_are_wrapped() -> None:
    with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module, got int"):
        Ours(3)


def test_replica_finds_the_engine_through_the_wrapper() -> None:
    model = Ours(net())

    assert paceline.replica(model) is paceline.replica(model.module)


@ranks(2)
def test_a_wrapper_and_its_module_are_freed_together(rank: int) -> None:
    model = Ours(net())
    model(share(rank)).sum().backward()
    gone = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.module[0].weight)]

    del model
    gc.collect()

    assert [reference() for reference in gone] == [None, None, None]


class Lonely(dist.ProcessGroup):
    """A group of one rank that is written in Python, as in torch's tests of such groups."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.calls: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> "LonelyWork":
        self.calls.append("allreduce")
        return LonelyWork(tensors, self.calls)

    def getSize(self) -> int:
        return 1


class LonelyWork(dist.Work):
    def __init__(self, tensors: list[torch.Tensor], calls: list[str]) -> None:
        super().__init__()
        self.future: torch.futures.Future = torch.futures.Future()
        self.future.set_result(tensors)
        self.calls = calls

    def wait(self, timeout: object) -> bool:
        self.calls.append("wait")
        return True

    def get_future(self) -> torch.futures.Future:
        return self.future


def test_a_group_of_one_that_is_written_in_python_reduces_the_gradients() -> None:
    group, module = Lonely(), net()
    model = Ours(module, process_group=group, init_sync=False)
    at_the_start = list(group.calls)

    model(torch.ones(2, 6)).sum().backward()

    expected = net()
    expected(torch.ones(2, 6)).sum().backward()
    assert at_the_start == []
    assert set(group.calls) == {"allreduce", "wait"}
    assert model.process_group is group
    for got, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)
