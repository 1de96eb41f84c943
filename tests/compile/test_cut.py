"""Cutting a forward graph by a plan: pure, on graphs from any tracer, without a process group."""

import operator
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from paceline.compile import cut
from paceline.compile.cutting import Cut
from paceline.compile.inputs import parameters_of
from paceline.compile.pieces import Chain
from paceline.compile.seams import body_of, written_by
from paceline.plan import Caps, Plan, Spec, plan_buckets


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def plan_for(model: nn.Module, *nbytes: int, order: Sequence[int] | None = None) -> Plan:
    specs = [
        Spec(name, tuple(p.shape), p.dtype, p.device, tuple(p.stride())) for name, p in named(model).items()
    ]
    return plan_buckets(specs, Caps(nbytes) if nbytes else None, order=order)


def layers(count: int) -> nn.Sequential:
    """Make a model of ``count`` parameters of 16 bytes, each used by one node."""
    return nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count)))


def cut_of(model: nn.Module, *nbytes: int, order: Sequence[int] | None = None) -> Cut:
    return cut(fx.symbolic_trace(model), plan_for(model, *nbytes, order=order), named(model))


def run(found: Cut, *inputs: torch.Tensor) -> object:
    return Chain(found, [piece.module for piece in found.pieces])(*inputs)


# ---- where it is cut --------------------------------------------------------------------------------


@pytest.mark.parametrize(("cap", "pieces"), [(16 * 16, 1), (16 * 4, 4), (16, 16), (1, 16)])
def test_there_is_a_piece_for_each_bucket(cap, pieces):
    assert len(cut_of(layers(16), cap).pieces) == pieces


def test_the_last_piece_completes_the_first_bucket():
    found = cut_of(layers(4), 32)

    assert [piece.buckets for piece in found.pieces] == [(1,), (0,)]
    assert [[node.name for node in piece.nodes] for piece in found.pieces] == [["_0", "_1"], ["_2", "_3"]]


def test_nodes_without_parameters_stay_with_what_computes_their_input():
    model = nn.Sequential(
        nn.ReLU(), nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.ReLU()
    )

    names = [[node.name for node in piece.nodes] for piece in cut_of(model, 1).pieces]

    assert names == [["_0", "_1", "_2"], ["_3", "_4"]]


def test_a_tied_parameter_is_complete_where_it_is_used_first():
    model = layers(4)
    model[3].weight = model[0].weight  # the plan has it in bucket 0 of 3, and the backward comes to it last

    found = cut_of(model, 16, order=[0, 2, 1])

    assert [piece.buckets for piece in found.pieces] == [(0,), (2,), (1,)]
    torch.testing.assert_close(run(found, torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_a_plan_in_the_opposite_order_is_cut_between_the_same_layers():
    found = cut_of(layers(4), 32, order=[0, 1, 2, 3])

    assert [piece.buckets for piece in found.pieces] == [(0,), (1,)]
    assert [len(piece.nodes) for piece in found.pieces] == [2, 2]


def test_a_bucket_that_has_an_early_and_a_late_parameter_is_complete_early():
    found = cut_of(layers(4), 32, order=[3, 0, 2, 1])

    assert [piece.buckets for piece in found.pieces] == [(0,), (1,)]
    assert [len(piece.nodes) for piece in found.pieces] == [1, 3]


def test_a_graph_without_parameters_is_one_piece():
    found = cut_of(nn.ReLU())

    assert len(found.pieces) == 1
    assert found.table.rows == ()


def test_parameters_that_the_graph_does_not_use_are_not_in_the_table():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    found = cut_of(Unused(), 1)

    assert [row.parameters for row in found.table.rows] == [("used.weight",)]


def test_the_table_has_a_row_for_each_bucket():
    found = cut_of(layers(5), 32)

    lines = found.explain().splitlines()

    assert lines[0].split() == ["bucket", "bytes", "piece", "nodes", "outputs", "parameters"]
    assert [line.split() for line in lines[1:]] == [
        ["0", "32", "2", "2", "1", "4.weight,", "3.weight"],
        ["1", "32", "1", "2", "1", "2.weight,", "1.weight"],
        ["2", "16", "0", "1", "1", "0.weight"],
    ]


# ---- what the pieces keep ---------------------------------------------------------------------------


class Busy(nn.Module):
    """Tuples, several outputs, a constant, a view and an in-place operator between four parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self, x: torch.Tensor):
        h = x @ self.a
        left, right = h[0:1], h.chunk(2, 1)[1]
        k = h.relu() @ self.b
        k.mul_(2)
        flat = k.view(-1)
        m = k @ self.c
        return m @ self.d + left, (right, None), flat, 3


def test_pieces_return_what_the_whole_graph_returns():
    model, x = Busy(), torch.randn(3, 4)

    got = run(cut_of(model, 1), x)

    torch.testing.assert_close(got, model(x))


def test_notes_on_nodes_are_kept():
    model = layers(2)
    graph = fx.symbolic_trace(model)
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = f"line of {node.name}"

    pieces = cut(graph, plan_for(model, 1), named(model)).pieces

    notes = [[node.meta.get("stack_trace") for node in piece.module.graph.nodes] for piece in pieces]
    assert notes == [["line of input_1", "line of _0", None], ["line of _0", "line of _1", None]]


def test_parameters_are_found_as_attributes_inputs_and_in_modules():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.layer = nn.Parameter(torch.ones(2, 2)), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.layer(x @ self.w) * v

    model, v = Both(), nn.Parameter(torch.ones(2))
    graph = fx.symbolic_trace(model)

    found = parameters_of(graph, [torch.ones(1, 2), v])

    assert {node.name: value for node, value in found.items()} == {"v": v, "w": model.w}
    inside = {**named(model), "v": v}
    specs = [Spec(n, tuple(p.shape), p.dtype, p.device, tuple(p.stride())) for n, p in inside.items()]
    pieces = cut(graph, plan_buckets(specs, Caps((1,))), inside, [torch.ones(1, 2), v]).pieces
    assert [[node.name for node in piece.nodes] for piece in pieces] == [["matmul"], ["layer"], ["mul"]]


# ---- in-place operators -----------------------------------------------------------------------------


F, aten = nn.functional, torch.ops.aten


@pytest.mark.parametrize(
    ("target", "more", "writes"),
    [
        ("add_", (1,), True),
        ("add", (1,), False),
        ("__setitem__", (0, 1), True),
        ("__iadd__", (1,), True),
        ("__invert__", (), False),
        (torch.relu_, (), True),
        (operator.iadd, (1,), True),
        (operator.setitem, (0, 1), True),
        (operator.and_, (1,), False),
        (F.relu, (True,), True),
        (F.relu, (False,), False),
        (F.dropout, (0.5, True, True), True),
        (F.dropout, (0.5, True, False), False),
        (aten.add_.Tensor, (1,), True),
        (aten.add_, (1,), True),
        (aten.add.Tensor, (1,), False),
    ],
)
def test_a_write_is_recognized(target, more, writes):
    graph = fx.Graph()
    x = graph.placeholder("x")
    create = graph.call_method if isinstance(target, str) else graph.call_function

    node = create(target, (x, *more))

    assert written_by(node) == ([x] if writes else [])


def test_a_write_is_recognized_by_its_keyword():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    assert written_by(graph.call_function(torch.neg, (x,), {"out": y})) == [y]
    assert written_by(graph.call_function(F.relu, (x,), {"inplace": True})) == [x]
    assert written_by(graph.call_function(F.relu, (x,), {"inplace": False})) == []


# ---- bad input --------------------------------------------------------------------------------------


def test_a_plan_of_another_model_is_refused_by_shape():
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3)))

    with pytest.raises(
        ValueError, match=r"plan of another model: 0.weight has shape \[3, 2\], and \[5, 2\] in the"
    ):
        cut(graph, plan_for(nn.Sequential(nn.Linear(2, 5))), named(graph))


def test_a_plan_of_another_model_is_refused_by_name():
    graph = fx.symbolic_trace(layers(3))

    with pytest.raises(ValueError, match="plan of another model: it does not have 2.weight"):
        cut(graph, plan_for(layers(2)), named(graph))


def test_a_graph_of_another_model_is_refused():
    model = layers(2)

    with pytest.raises(ValueError, match="are not the tensors that the graph uses as 0.weight, 1.weight"):
        cut(fx.symbolic_trace(layers(2)), plan_for(model), named(model))


# ---- any graph, any plan ----------------------------------------------------------------------------


class Random(nn.Module):
    """Each step takes two earlier values and perhaps a parameter."""

    def __init__(self, steps: list[tuple[int, int, int | None]], sizes: list[int]) -> None:
        super().__init__()
        self.steps = steps
        self.weights = nn.ParameterList(
            torch.arange(1.0, size + 1).mul(1 + i).div(7) for i, size in enumerate(sizes)
        )

    def forward(self, x: torch.Tensor):
        values = [x]
        for first, second, weight in self.steps:
            value = values[first % len(values)].sin() + values[second % len(values)].split(1)[0]
            values.append(value if weight is None else value * self.weights[weight].sum())
        return values[-1], values[len(values) // 2], None


@st.composite
def models(draw: st.DrawFn) -> Random:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    weights = st.none() | st.integers(0, len(sizes) - 1)
    return Random(
        draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), weights), max_size=12)), sizes
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data(), model=models(), caps=st.lists(st.integers(1, 80), min_size=1, max_size=3))
def test_any_graph_in_pieces_is_the_same_graph(data, model, caps):
    graph = fx.symbolic_trace(model)
    order = data.draw(st.permutations(range(len(model.weights))))
    plan = plan_for(model, *caps, order=order)
    x = torch.ones(1)

    found = cut(graph, plan, named(model))

    torch.testing.assert_close(run(found, x), model(x))
    assert [node for piece in found.pieces for node in piece.nodes] == body_of(graph.graph)
    assert len(found.pieces) <= max(1, len(plan.buckets))
    rows = {row.bucket: row for row in found.table.rows}
    assert list(rows) == sorted(rows)
    used = {weight for _, _, weight in model.steps if weight is not None}
    for bucket in plan.buckets:
        inside = {plan.specs[slot.parameter].name for slot in bucket.slots if slot.parameter in used}
        assert set(rows[bucket.index].parameters if bucket.index in rows else ()) == inside
        # No piece in front of it uses a parameter of the bucket, so nothing in front can hold it up.
        for piece in found.pieces[: rows[bucket.index].piece] if inside else ():
            targets = {str(node.target) for node in piece.module.graph.find_nodes(op="get_attr")}
            assert not targets & inside
