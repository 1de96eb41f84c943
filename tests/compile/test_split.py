"""The backend "paceline_split": gradients as eager has them, from pieces as the plan says."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import paceline
import paceline.hooks
from paceline.compile import last_cuts, split
from paceline.compile.cutting import Table
from paceline.crossings import Care
from paceline.plan import Caps, Spec, plan_buckets
from paceline.testing import ranks

# What torch does while it captures and compiles is not ours to mend.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

TINY = 1e-6  # MiB: every parameter by itself


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def mlp(layers: int = 4, width: int = 4) -> nn.Sequential:
    torch.manual_seed(5)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
    return nn.Sequential(*parts)


def batch(rows: int = 3, width: int = 4) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


def first_tensor(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def gradients(call: Callable[..., Any], model: nn.Module, *inputs: Any) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    first_tensor(call(*inputs)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def check(model: nn.Module, *inputs: Any, backend: Any = None, **options: Any) -> Table:
    """Compare results, gradients and buffers with eager; return what became of the graph."""
    twin, cloned = copy.deepcopy(model), copy.deepcopy(inputs)
    backend = backend or split("aot_eager", bucket_mb=TINY)
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)

    got, expected = gradients(compiled, model, *inputs), gradients(twin, twin, *cloned)

    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    torch.testing.assert_close(inputs, cloned)
    return last_cuts()[-1]


# ---- pieces and buckets -----------------------------------------------------------------------------


@pytest.mark.parametrize(("layers_in_a_bucket", "pieces"), [(16, 1), (4, 4), (1, 16)])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_there_is_a_piece_for_each_bucket(inner, layers_in_a_bucket, pieces):
    size = layers_in_a_bucket * 64 / 2**20

    table = check(mlp(16), batch(), backend=split(inner, bucket_mb=size, first_bucket_mb=size))

    assert table.pieces == len(table.rows) == pieces


def test_pieces_by_inductor():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    images = torch.randn(2, 2, 7, 7).to(memory_format=torch.channels_last)

    # Dynamo's name for a backend, and the default inner one.
    table = check(
        model, images, backend="paceline_split", options={"bucket_mb": 2e-4, "first_bucket_mb": 2e-4}
    )

    assert table.pieces == 2


def test_a_function_can_compile_the_pieces():
    seen = []

    def inner(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        seen.append((graph, example_inputs))
        return graph.forward

    model = mlp(2)
    check(model, batch(), backend=split(inner, bucket_mb=TINY))

    assert [type(graph).__name__ for graph, _ in seen] == ["Piece0", "Piece1"]
    for graph, inputs in seen:
        assert [example.shape for example in inputs] == [
            node.meta["example_value"].shape for node in graph.graph.find_nodes(op="placeholder")
        ]
        assert all("stack_trace" in n.meta for n in graph.graph.nodes if n.op.startswith("call"))
    # The parameters themselves, so that whoever compiles can tell whose they are.
    held = [value for _, inputs in seen for value in inputs if isinstance(value, nn.Parameter)]
    assert held == list(model.parameters())


def test_the_table_names_parameters_as_the_module_does():
    table = check(mlp(2), batch())

    assert [(row.bucket, row.parameters, row.nbytes, row.piece) for row in table.rows] == [
        (0, ("2.weight",), 64, 1),
        (1, ("0.weight",), 64, 0),
    ]


def test_a_graph_that_trains_nothing_goes_whole():
    assert check(nn.Sequential(nn.Tanh()), batch().requires_grad_()).pieces == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_graph_without_a_backward_goes_whole(mode):
    model = mlp(4)
    compiled = torch.compile(model, backend=split("aot_eager", bucket_mb=TINY))

    with mode():
        torch.testing.assert_close(compiled(batch()), model(batch()))

    assert last_cuts()[-1] == Table(1, ())


def test_frozen_parameters_have_no_bucket():
    model = mlp(4)
    model[2].weight.requires_grad_(False)

    table = check(model, batch())

    assert [row.parameters for row in table.rows] == [("6.weight",), ("4.weight",), ("0.weight",)]
    assert table.pieces == 3


def test_gradients_become_complete_piece_by_piece():
    model, order = mlp(4), []
    two = 128 / 2**20
    compiled = torch.compile(model, backend=split("aot_eager", bucket_mb=two, first_bucket_mb=two))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    result = compiled(batch())
    (earlier,) = (n for n, _ in result.grad_fn.next_functions if n and n.name() == result.grad_fn.name())
    earlier.register_prehook(lambda *_: order.append("the backward of piece 0 starts"))

    result.sum().backward()

    assert order[2] == "the backward of piece 0 starts"
    assert set(order[:2]) == {"4.weight", "6.weight"}
    assert set(order[3:]) == {"0.weight", "2.weight"}


# ---- what has to survive a cut ----------------------------------------------------------------------


class Blocks(nn.Module):
    """Layers with something in between that is hard to cut."""

    def __init__(self, between: Callable[..., Any], layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.register_buffer("seen", torch.zeros(4))
        self.between = between

    def forward(self, x: torch.Tensor) -> Any:
        return self.between(self, x)


def checkpointed(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=False)
    return x


def conditional(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)))
    return x


def flexible(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    for layer in m.layers:
        still = x.detach()[None, None]  # on a CPU it has no backward
        x = layer(x) + flex_attention(still, still, still, score_mod=lambda s, b, h, i, j: s + i - j)[0, 0]
    return x


def chunked(m: Blocks, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = m.layers[0](x).chunk(2, dim=1)
    y = m.layers[1](torch.cat([parts[0], parts[0]], 1))
    z = m.layers[2](torch.cat([y[:, :2], parts[1]], 1))
    return z, parts[1]


def written(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    y = m.layers[0](x)
    left, right = y[:, :2], y[:, 2:]
    z = m.layers[1](torch.cat([left, right], 1))
    y.mul_(2)  # and with it what left and right see
    return m.layers[2](z + torch.cat([right, left], 1))


def written_by_a_later_layer(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    y = x * 2  # not trained, until it is written to
    y.add_(m.layers[0](x))
    z = y + 1
    y[:, 0] = m.layers[1](z)[:, 0]
    return m.layers[2](y)


def input_written(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    m.seen.add_(m.layers[0](y).detach().sum(0))
    z = m.layers[1](y) + m.seen
    m.seen.mul_(0.5)
    return m.layers[2](z) * m.seen


def silent(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    y = m.layers[0](x)
    with torch.no_grad():
        scale = m.layers[2](m.layers[1](x)).sum()  # this use of them has no backward
    return m.layers[2](m.layers[1](y)) * scale


def cast(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            y = m.layers[1](y.float())
        return m.layers[2](y).float()


def tied(m: Blocks, x: torch.Tensor) -> torch.Tensor:
    for layer in (*m.layers, m.layers[0]):
        x = layer(x).tanh()
    return x


def sized(m: Blocks, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    rows = x.shape[0]
    y = m.layers[0](x).repeat(2, 1)
    y = m.layers[1](y).view(rows, 2, -1).sum(1) * rows
    return m.layers[2](y) / (rows + 1), rows


def with_nothing(m: Blocks, x: torch.Tensor) -> tuple[Any, ...]:
    y = m.layers[0](x)
    return m.layers[2](m.layers[1](y)), None, 3, x, y


WAYS = {
    checkpointed: 3,
    conditional: 3,
    flexible: 3,
    chunked: 3,
    written: 2,  # not between layers 0 and 1: what layer 0 returns is written to
    written_by_a_later_layer: 2,
    input_written: 3,
    silent: 3,
    cast: 3,
    tied: 3,
    sized: 3,
    with_nothing: 3,
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_of_eager(way, inner):
    size = 80 / 2**20  # a layer with its bias

    table = check(Blocks(way), batch(), backend=split(inner, bucket_mb=size, first_bucket_mb=size))

    assert table.pieces == WAYS[way]


def test_an_input_that_a_piece_writes_to_gets_its_gradient():
    def add_to(m: Blocks, x: torch.Tensor) -> torch.Tensor:
        x.add_(m.layers[0].bias)
        y = m.layers[1](x)
        return m.layers[2](y + x)

    check(Blocks(add_to), batch())


def test_sizes_may_change_between_calls():
    model = Blocks(sized)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=split("aot_eager", bucket_mb=TINY), dynamic=True, fullgraph=True)
    before = len(last_cuts())

    for rows in (3, 5, 8):
        x = batch(rows)
        torch.testing.assert_close(compiled(x), twin(x))
        torch.testing.assert_close(gradients(compiled, model, x), gradients(twin, twin, x))

    assert len(last_cuts()) == before + 1, "it was compiled again"
    assert last_cuts()[-1].pieces == 3


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_size_that_is_read_from_a_tensor_is_handed_on(inner):
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            first, second, third = self.layers
            padding = torch.ones(rows.item(), 4)  # only the first piece has this node, all have this shape
            return third(second(padding + first(x).mean(0)))

    model = Padded()
    twin = copy.deepcopy(model)
    backend = split(inner, bucket_mb=TINY)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for count in (3, 2, 5):
            inputs = batch(), torch.tensor(count)
            torch.testing.assert_close(gradients(compiled, model, *inputs), gradients(twin, twin, *inputs))

    assert last_cuts()[-1].pieces == 3


def test_blocks_that_differ_by_a_float_are_cut():
    # With dynamic=True a float is a number that is read from an input, which no compiler takes as an input.
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).tanh() * self.scale

    model = nn.Sequential(*(Scaled(0.5 + i) for i in range(3)))

    assert check(model, batch(), dynamic=True).pieces == 3


def test_a_graph_of_another_tracer_is_compiled_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    twin, x = copy.deepcopy(model), batch()
    state = copy.deepcopy(model.state_dict())

    compiled = split("aot_eager", bucket_mb=TINY)(fx.symbolic_trace(model), [x])

    torch.testing.assert_close(model.state_dict(), state)  # nothing was run to find out
    torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(gradients(compiled, model, x), gradients(twin, twin, x))
    assert last_cuts()[-1].pieces == 3


def test_a_plan_can_be_given():
    model = mlp(4)
    specs = [
        Spec(n, tuple(p.shape), p.dtype, p.device, tuple(p.stride())) for n, p in model.named_parameters()
    ]
    plan = plan_buckets(specs, Caps((128,)))

    table = check(model, batch(), backend=split("eager", plan=plan, parameters=model.named_parameters()))

    assert [row.parameters for row in table.rows] == [("6.weight", "4.weight"), ("2.weight", "0.weight")]


# ---- bad input --------------------------------------------------------------------------------------


def failure(**options: Any) -> str:
    model = mlp(2)
    with pytest.raises(Exception) as caught:
        torch.compile(model, backend="paceline_split", **options)(batch())
    return str(caught.value)


def test_an_inner_backend_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="inner backend 'inducter' does not exist; there are .*aot_eager"):
        split("inducter")

    assert "inner backend 'inducter' does not exist" in failure(options={"inner": "inducter"})


def test_it_cannot_be_its_own_inner_backend():
    with pytest.raises(ValueError, match="inner backend 'paceline_split' does not exist"):
        split("paceline_split")


def test_an_inner_backend_is_a_name_or_a_function():
    with pytest.raises(TypeError, match="inner has to be the name of a backend or a function, got int"):
        split(3)


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_cap_has_to_be_positive(size):
    with pytest.raises(ValueError, match="have to be greater than 0"):
        split("eager", bucket_mb=size)

    with pytest.raises(ValueError, match="have to be greater than 0"):
        split("eager", first_bucket_mb=size)


def test_an_unknown_option_is_named():
    assert "has no option 'iner'; it has inner, bucket_mb" in failure(options={"iner": "eager"})


def test_a_mode_is_refused():
    assert 'backend "paceline_split" takes no mode' in failure(mode="reduce-overhead")


def test_a_plan_comes_with_its_parameters():
    with pytest.raises(ValueError, match="a plan together with its parameters"):
        split("eager", plan=plan_buckets([]))


def test_a_plan_of_another_model_is_refused():
    model, other = mlp(2), mlp(2)
    plan = plan_buckets(
        [Spec(n, tuple(p.shape), p.dtype, p.device, tuple(p.stride())) for n, p in other.named_parameters()]
    )
    backend = split("eager", plan=plan, parameters=other.named_parameters())

    words = "another model: its parameters are not the tensors that the graph uses as 0.weight, 2.weight"
    with pytest.raises(Exception, match=words):
        torch.compile(model, backend=backend)(batch())


# ---- with a replica ---------------------------------------------------------------------------------


def reference(model: nn.Module, world: int) -> dict[str, torch.Tensor | None]:
    """Return what one process has with everybody's batch."""
    twin = copy.deepcopy(model)
    for rank in range(world):
        (first_tensor(twin(batch(3 + rank))).square().sum() / world).backward()
    return {name: p.grad for name, p in twin.named_parameters()}


@ranks(2)
@pytest.mark.parametrize(
    ("way", "inner"),
    [(tied, "eager"), (tied, "aot_eager"), (checkpointed, "aot_eager"), (chunked, "aot_eager")],
)
def test_replicas_get_the_gradient_of_everybodys_batch(rank, way, inner):
    model = Blocks(way)
    expected = reference(model, 2)
    paceline.replicate(model, bucket_mb=1e-4, first_bucket_mb=1e-4)
    compiled = torch.compile(model, backend="paceline_split", options={"inner": inner})

    for _ in range(3):  # the plan is a guess, learned, and learned
        torch.testing.assert_close(gradients(compiled, model, batch(3 + rank)), expected)


@ranks(2)
def test_the_pieces_are_those_of_the_replicas_plan(rank):
    model = paceline.replicate(mlp(8), bucket_mb=128 / 2**20, first_bucket_mb=64 / 2**20)
    plan = paceline.replica(model).plan

    torch.compile(model, backend="paceline_split", options={"inner": "eager"})(batch())

    rows = last_cuts()[-1].rows
    assert [row.bucket for row in rows] == [bucket.index for bucket in plan.buckets]
    assert [set(row.parameters) for row in rows] == [
        {plan.specs[slot.parameter].name for slot in bucket.slots} for bucket in plan.buckets
    ]
    assert last_cuts()[-1].pieces == len(plan.buckets) == 5


@ranks(2)
def test_sizes_given_to_split_make_other_pieces_of_the_same_plan(rank):
    model = paceline.replicate(mlp(8))
    assert len(paceline.replica(model).plan.buckets) == 1

    torch.compile(model, backend=split("eager", bucket_mb=128 / 2**20, first_bucket_mb=128 / 2**20))(batch())

    assert last_cuts()[-1].pieces == 4


@ranks(2)
def test_buckets_go_out_while_backward_is_running(rank):
    events: list[str] = []

    def hook(bucket: paceline.hooks.GradBucket, comm: Any) -> Any:
        events.append(f"bucket {bucket.index}")
        return paceline.average(bucket, comm)

    one = 64 / 2**20
    model = paceline.replicate(mlp(4), bucket_mb=one, first_bucket_mb=one, hook=hook)
    compiled = torch.compile(model, backend="paceline_split", options={"inner": "aot_eager"})
    result = compiled(batch(3 + rank))
    nodes = [result.grad_fn]  # the backwards of the pieces, the last piece first
    for _ in range(3):
        nodes.append(next(n for n, _ in nodes[-1].next_functions if n and n.name() == nodes[0].name()))
    nodes[-1].register_prehook(lambda *_: events.append("the backward of piece 0 starts"))

    with mock.patch.object(Care, "holds", return_value=False):  # as in all backwards but the first
        result.sum().backward()

    assert events == ["bucket 0", "bucket 1", "bucket 2", "the backward of piece 0 starts", "bucket 3"]
