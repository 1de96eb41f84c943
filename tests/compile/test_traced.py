"""Section 3 of FEATURES.md: one small program per row and per name, traced whole, with eager's values."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import paceline
from paceline.compile import guarding, traced
from paceline.testing import ranks

Program = Callable[[torch.Tensor, Any], Any]
BACKENDS = ["eager", "aot_eager"]
ROWS: dict[str, dict[str, Program]] = {}


def row(feature: str) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        ROWS.setdefault(feature, {})[program.__name__] = program
        return program

    return add


def join_fake_world(rank: int, size: int) -> SimpleNamespace:
    """Enter a world of any size, alone, and make what programs ask for in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    mine = sorted({0, rank, size - 1})
    theirs = [each for each in range(size) if each != rank][:2]
    return SimpleNamespace(
        rank=rank,
        group=dist.new_group(mine),
        others=dist.new_group(theirs),
        mesh=mesh,
        shard=Shard(1),
        placements=[Shard(0), Replicate()],
        world=paceline.world(),
    )


def compiled(program: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    run: Callable[..., Any] = torch.compile(program, fullgraph=True, backend=backend)
    return run


def assert_same(got: Any, expected: Any, what: str) -> None:
    assert type(got) is type(expected), what
    if isinstance(expected, DTensor):
        assert (got.placements, got.device_mesh) == (expected.placements, expected.device_mesh), what
        got, expected = got.to_local(), expected.to_local()
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected), what
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), what
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, what)
    else:
        assert got == expected, what


# ---- 3.1 process groups ------------------------------------------------------------------------------


@row("3.1")
def get_rank(x: torch.Tensor, at: Any) -> Any:
    return x + dist.get_rank(), dist.get_rank(at.group), dist.get_rank(group=at.others)


@row("3.1")
def get_world_size(x: torch.Tensor, at: Any) -> Any:
    return x + dist.get_world_size(), dist.get_world_size(at.group), dist.get_world_size(group=at.others)


@row("3.1")
def rank_and_size_of_the_group_object(x: torch.Tensor, at: Any) -> Any:
    return x * at.group.size() + at.group.rank()


@row("3.1")
def get_process_group_ranks(x: torch.Tensor, at: Any) -> Any:
    return x + 1, dist.get_process_group_ranks(at.group), dist.get_process_group_ranks(None)


@row("3.1")
def names(x: torch.Tensor, at: Any) -> Any:
    return x + 1, at.group.group_name, at.group.name(), at.group.group_desc


@row("3.1")
def ranks_in_and_out_of_a_group(x: torch.Tensor, at: Any) -> Any:
    return x + dist.get_group_rank(at.group, at.rank) + dist.get_global_rank(at.group, 1)


@row("3.1")
def constant_functions(x: torch.Tensor, at: Any) -> Any:
    return (
        x + c10d._get_group_size_by_name(at.group.group_name),
        c10d._get_group_tag(at.group),
        c10d._resolve_group_name_by_ranks_and_tag(dist.get_process_group_ranks(at.group), ""),
    )


@row("3.1")
def membership(x: torch.Tensor, at: Any) -> Any:
    return x + 1, c10d._rank_not_in_group(at.group), c10d._rank_not_in_group(at.others)


@row("3.1")
def backends(x: torch.Tensor, at: Any) -> Any:
    return x + 1, dist.get_backend(), dist.get_backend(at.group), dist.is_initialized(), dist.is_available()


@row("3.1")
def a_group_as_a_value(x: torch.Tensor, at: Any) -> Any:
    return x + 1, at.group, isinstance(at.group, dist.ProcessGroup), at.group == at.group


@row("3.1")
def an_all_reduce_over_it(x: torch.Tensor, at: Any) -> Any:
    y = x * 2
    dist.all_reduce(y, group=at.group)
    return y


# ---- 3.2 WORLD and non-members -----------------------------------------------------------------------


@row("3.2")
def world(x: torch.Tensor, at: Any) -> Any:
    return x + dist.group.WORLD.rank() + dist.GroupMember.WORLD.size()


@row("3.2")
def world_as_a_value(x: torch.Tensor, at: Any) -> Any:
    same = dist.group.WORLD is dist.GroupMember.WORLD
    return x + 1, dist.group.WORLD, same, at.group is dist.group.WORLD, at.group == dist.group.WORLD


@row("3.2")
def ranks_of_world(x: torch.Tensor, at: Any) -> Any:
    return x + 1, dist.get_process_group_ranks(dist.group.WORLD)


@row("3.2")
def non_members(x: torch.Tensor, at: Any) -> Any:
    nobody = dist.GroupMember.NON_GROUP_MEMBER
    return x + 1, at.others is nobody, at.others == nobody, at.group is nobody, at.group == nobody, nobody


@row("3.2")
def a_branch_for_members(x: torch.Tensor, at: Any) -> Any:
    return x + 1 if at.others is dist.GroupMember.NON_GROUP_MEMBER else x - 1


# ---- 3.3 device meshes --------------------------------------------------------------------------------


@row("3.3")
def sizes(x: torch.Tensor, at: Any) -> Any:
    return x + at.mesh.size() * at.mesh.size(1) + at.mesh.ndim, at.mesh.shape


@row("3.3")
def names_and_device(x: torch.Tensor, at: Any) -> Any:
    return x + 1, at.mesh.mesh_dim_names, at.mesh.device_type


@row("3.3")
def get_coordinate(x: torch.Tensor, at: Any) -> Any:
    return x + 1, at.mesh.get_coordinate(), at.mesh.get_rank()


@row("3.3")
def get_local_rank(x: torch.Tensor, at: Any) -> Any:
    return x + at.mesh.get_local_rank("dp") * 10 + at.mesh.get_local_rank(mesh_dim=1)


@row("3.3")
def get_group(x: torch.Tensor, at: Any) -> Any:
    group = at.mesh.get_group("tp")
    return x + group.rank() + dist.get_world_size(at.mesh.get_group(0)), group.group_name


@row("3.3")
def get_all_groups(x: torch.Tensor, at: Any) -> Any:
    return x + 1, [group.size() for group in at.mesh.get_all_groups()]


@row("3.3")
def sub_meshes(x: torch.Tensor, at: Any) -> Any:
    part = at.mesh["tp"]
    return x + part.size() + part.get_local_rank(), part.get_group().group_name, at.mesh["dp", "tp"].ndim


@row("3.3")
def meshes_as_values(x: torch.Tensor, at: Any) -> Any:
    return x + 1, at.mesh, at.mesh["tp"], at.mesh == at.mesh, at.mesh["tp"] == at.mesh["dp"]


@row("3.3")
def the_ranks_of_a_mesh(x: torch.Tensor, at: Any) -> Any:
    return x + at.mesh.mesh.sum(), {at.mesh: 7}[at.mesh]


# ---- 3.4 placements -----------------------------------------------------------------------------------


@row("3.4")
def made_inside(x: torch.Tensor, at: Any) -> Any:
    return x + 1, Shard(0), Shard(dim=1), Replicate(), Partial(), Partial("avg"), Partial(reduce_op="max")


@row("3.4")
def made_outside(x: torch.Tensor, at: Any) -> Any:
    return x + 1, at.shard, at.placements, (at.placements[1], Shard(0))


@row("3.4")
def compared(x: torch.Tensor, at: Any) -> Any:
    shard = Shard(1)
    return (
        x + 1,
        [shard == at.shard, at.shard == Shard(1), shard != Shard(0), shard == Replicate()],
        [Partial("sum") == Partial("avg"), Partial() == Partial("sum")],
        [Shard(0) in at.placements, at.placements.index(Replicate())],
        tuple(at.placements) == (Shard(0), Replicate()),
    )


@row("3.4")
def asked(x: torch.Tensor, at: Any) -> Any:
    return (
        x + at.shard.dim + Shard(2).dim,
        [at.shard.is_shard(), at.shard.is_shard(1), at.shard.is_shard(0), at.shard.is_replicate()],
        [Partial().is_partial(), Replicate().is_replicate(), Partial("avg").reduce_op],
    )


@row("3.4")
def their_classes(x: torch.Tensor, at: Any) -> Any:
    kinds = [type(at.shard) is Shard, type(Shard(0)) is Shard, type(Replicate()) is Shard]
    return x + 1, kinds, isinstance(at.shard, Shard), isinstance(Shard(0), Placement), Shard


@row("3.4")
def as_keys(x: torch.Tensor, at: Any) -> Any:
    return x + {Shard(0): 1, Replicate(): 2}[Replicate()], hash(Shard(0)) == hash(Shard(0)), repr(Shard(0))


# ---- 3.5 DTensor --------------------------------------------------------------------------------------


@row("3.5")
def from_local_and_back(x: torch.Tensor, at: Any) -> Any:
    return (DTensor.from_local(x, at.mesh["tp"], [Shard(0)]) * 2).to_local()


@row("3.5")
def from_local_by_keyword(x: torch.Tensor, at: Any) -> Any:
    whole = DTensor.from_local(x, device_mesh=at.mesh, placements=at.placements, run_check=False)
    return (whole + 1).to_local()


@row("3.5")
def returned(x: torch.Tensor, at: Any) -> Any:
    return DTensor.from_local(x, at.mesh["tp"], [Partial("sum")])


@row("3.5")
def its_layout(x: torch.Tensor, at: Any) -> Any:
    whole = DTensor.from_local(x, at.mesh["tp"], [at.shard])
    return x + 1, whole.placements, whole.device_mesh, tuple(whole.shape)


@row("3.5")
def laid_out_anew(x: torch.Tensor, at: Any) -> Any:
    mesh = at.mesh["tp"]
    return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()


# ---- our own -------------------------------------------------------------------------------------------


@row("ours")
def a_world_from_outside(x: torch.Tensor, at: Any) -> Any:
    return x.to(at.world.device) * at.world.size + at.world.rank + at.world.local_rank, at.world.backend


@row("ours")
def a_world_asked_for_inside(x: torch.Tensor, at: Any) -> Any:
    return x * paceline.world().size + paceline.world().rank


@pytest.mark.parametrize("feature", list(ROWS))
@ranks(1, backend=None, warnings="default")
def test_every_program_is_one_graph_and_returns_what_eager_returns(feature: str) -> None:
    traced.install()
    at = join_fake_world(1, 4)
    failed = {}
    for name, program in ROWS[feature].items():
        x = torch.arange(16.0).reshape(4, 4)
        try:
            assert_same(compiled(program, "aot_eager")(x, at), program(x, at), name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed


# ---- changes -------------------------------------------------------------------------------------------


@dataclass
class Changes:
    """Runs a program, compiled once, wherever it is told to, and counts what is compiled."""

    program: Program

    def __post_init__(self) -> None:
        self.counter = CompileCounterWithBackend("eager")
        self._run = compiled(self.program, self.counter)

    @property
    def count(self) -> int:
        return self.counter.frame_count

    def follow(self, at: Any) -> None:
        x = torch.ones(4, 4)
        assert_same(self._run(x, at), self.program(x, at), self.program.__name__)


def followers(features: set[str]) -> Iterator[Changes]:
    leave_out = {"a_group_as_a_value", "world_as_a_value", "meshes_as_values"}  # they compare other worlds'
    for feature, programs in ROWS.items():
        if feature in features:
            yield from (Changes(each) for name, each in programs.items() if name not in leave_out)


@pytest.mark.parametrize("after", [(2, 4), (1, 8)])
@ranks(1, backend=None, warnings="default")
def test_another_world_is_never_answered_from_the_graph_of_the_one_before(after: tuple[int, int]) -> None:
    traced.install()
    for changes in followers({"3.1", "3.2", "3.3", "3.5", "ours"}):
        before = join_fake_world(1, 4)
        changes.follow(before)
        changes.follow(before)
        assert changes.count == 1, changes.program.__name__

        changes.follow(join_fake_world(*after))


ASKED: dict[str, tuple[Program, int]] = {
    "rank": (lambda x, _: x + dist.get_rank(), 1),
    "size": (lambda x, _: x + dist.get_world_size(), 0),
    "WORLD": (lambda x, _: x + dist.group.WORLD.rank(), 1),
    "mesh": (lambda x, at: x + at.mesh.get_local_rank("tp"), 1),
    "our world": (lambda x, at: x + at.world.rank, 1),
    "world()": (lambda x, _: x + paceline.world().rank, 1),
    "nothing": (lambda x, _: x + 1, 0),
}


@ranks(1, backend=None, warnings="default")
def test_what_asked_for_the_rank_is_compiled_anew_when_it_changes_and_nothing_else() -> None:
    traced.install()
    counts = {}
    for name, (program, _) in ASKED.items():
        changes = Changes(program)
        changes.follow(join_fake_world(1, 4))
        changes.follow(join_fake_world(2, 4))
        counts[name] = changes.count - 1
    assert counts == {name: expected for name, (_, expected) in ASKED.items()}


@ranks(1, backend=None, warnings="default")
def test_a_world_that_comes_and_goes_is_noticed() -> None:
    traced.install()
    changes = Changes(lambda x, _: x + (dist.get_rank() if dist.is_initialized() else 100))

    changes.follow(None)
    join_fake_world(3, 4)
    changes.follow(None)
    dist.destroy_process_group()
    changes.follow(None)

    assert changes.count == 2


@ranks(1, backend=None, warnings="default")
def test_another_group_or_mesh_in_the_same_place_is_noticed() -> None:
    traced.install()
    at = join_fake_world(1, 4)
    groups = [dist.new_group(each) for each in ([0, 1, 3], [1, 2], [1, 3], [0, 1, 2])]
    groups += [dist.group.WORLD, at.others]
    meshes = [at.mesh, at.mesh["dp"], at.mesh["tp"], init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))]
    asked_of_a_group = [
        lambda x, g: (x + dist.get_rank(g), dist.get_world_size(g), c10d._rank_not_in_group(g)),
        lambda x, g: (x + 1, g is dist.group.WORLD, g == dist.group.WORLD),
        lambda x, g: (x + 1, g is dist.GroupMember.NON_GROUP_MEMBER),
    ]
    asked_of_members = [
        lambda x, g: (x + g.rank() + g.size(), g.group_name),
        lambda x, g: (x + 1, dist.get_process_group_ranks(g), c10d._get_group_tag(g)),
        lambda x, g: x + dist.get_global_rank(g, 1),
    ]
    asked_of_a_mesh = [
        lambda x, m: (x + m.size() + m.get_local_rank(0), m.mesh_dim_names, m.get_coordinate()),
        lambda x, m: (x + m.get_group(0).rank(), m.get_group(0).group_name),
        lambda x, m: (x + 1, DTensor.from_local(x, m, [Shard(0)] * m.ndim).device_mesh.shape),
    ]
    for programs, things in (
        (asked_of_a_group, groups),
        (asked_of_members, groups[:-1]),
        (asked_of_a_mesh, meshes),
    ):
        for program in programs:
            changes = Changes(program)
            for thing in [*things, *things]:
                changes.follow(thing)
            assert changes.count == len(things)


def test_what_can_no_more_be_described_counts_as_changed() -> None:
    check = guarding._Check(len, 2)

    assert check([1, 2])
    assert not check([1])
    assert not check(None)


# ---- a replica's handle ---------------------------------------------------------------------------------


def replicated() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = paceline.replicate(nn.Linear(3, 2))
    return model, paceline.replica(model)


@ranks(2)
def test_a_replica_is_read_inside_traced_code(rank: int) -> None:
    traced.install()
    model, replica = replicated()

    def loss(x: torch.Tensor) -> torch.Tensor:
        mine = paceline.replica(model)
        return model(x).sum() * replica.size + mine.rank + len(mine.plan.buckets)

    x = torch.ones(4, 3)
    for backend in BACKENDS:
        assert torch.equal(compiled(loss, backend)(x), loss(x))


@ranks(2)
def test_a_replica_of_another_group_is_compiled_anew(rank: int) -> None:
    traced.install()
    _, replica = replicated()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    changes = Changes(lambda x, handle: x * handle.size + handle.rank)

    changes.follow(replica)
    changes.follow(replica)
    assert changes.count == 1
    replica.change_group(alone)
    changes.follow(replica)

    assert changes.count == 2


@ranks(2)
def test_the_step_that_is_read_is_the_present_one(rank: int) -> None:
    traced.install()
    model, replica = replicated()
    changes = Changes(lambda x, handle: x + handle.step)

    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
        changes.follow(replica)

    assert changes.count == 2  # a number that changes is an input of the graph from then on


@pytest.mark.parametrize("how", ["weight", "no_sync", "accumulate"])
@ranks(2)
def test_a_compiled_call_inside_weight_and_no_sync_has_eagers_gradients(rank: int, how: str) -> None:
    traced.install()
    x = torch.arange(12.0).reshape(4, 3)[: rank + 2]

    def gradients(backend: str | None) -> list[torch.Tensor]:
        model, replica = replicated()
        loss: Callable[..., Any] = lambda x: model(x).square().mean() * replica.size  # noqa: E731
        if backend is not None:
            loss = compiled(loss, backend)
        if how == "weight":
            with replica.weight(len(x)):
                loss(x).backward()
        elif how == "no_sync":
            with replica.no_sync():
                loss(x).backward()
            loss(x + 1).backward()
        else:
            with replica.accumulate(2):
                loss(x).backward()
                loss(x + 1).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(None)
    torch.testing.assert_close(gradients("aot_eager"), expected)


@ranks(2)
def test_weight_and_no_sync_around_a_traced_forward_change_nothing_as_in_eager(rank: int) -> None:
    traced.install()
    model, replica = replicated()

    def loss(x: torch.Tensor) -> torch.Tensor:
        with replica.weight(3), replica.no_sync():
            return model(x).sum()

    x = torch.ones(2, 3) * (rank + 1)
    compiled(loss, "aot_eager")(x).backward()

    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), 3.0))  # (2 + 4) / 2: reduced, unweighted


@pytest.mark.parametrize("how", ["skip", "batch", "accumulate"])
@ranks(1)
def test_what_talks_to_other_ranks_is_refused_inside_traced_code(how: str) -> None:
    traced.install()
    _, replica = replicated()

    def act(x: torch.Tensor) -> torch.Tensor:
        if how == "skip":
            replica.skip()
        elif how == "batch":
            with replica.batch():
                return x + 1
        else:
            with replica.accumulate(2):
                return x + 1
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(act, "eager")(torch.ones(2))


@pytest.mark.parametrize("tracing", [False, True])
@ranks(2)
def test_a_backward_is_never_traced_away_beside_a_replica(rank: int, tracing: bool) -> None:
    traced.install()
    model, _ = replicated()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    with torch._dynamo.config.patch(trace_autograd_ops=tracing):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="would stay this rank's own"):
            compiled(step, "aot_eager")(torch.ones(2, 3))
    assert model.weight.grad is None


@ranks(2)
def test_a_weight_inside_a_compiled_step_counts_as_in_eager(rank: int) -> None:
    traced.install()
    x = torch.arange(12.0).reshape(4, 3)[: rank + 2]

    def gradient(*, is_compiled: bool) -> torch.Tensor | None:
        model, replica = replicated()

        def step(x: torch.Tensor) -> None:
            loss = model(x).square().mean()
            with replica.weight(len(x)):
                loss.backward()

        (torch.compile(step, backend="aot_eager") if is_compiled else step)(x)
        return model.weight.grad

    torch.testing.assert_close(gradient(is_compiled=True), gradient(is_compiled=False))
