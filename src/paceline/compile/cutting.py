"""Cuts a captured forward by a plan, so that buckets are complete before its backward is over.

    forward          embed  block 0  block 1  block 2  head
    first used in    └ bucket 2      └ bucket 1        └ bucket 0
    pieces           [ 0           ] [ 1             ] [ 2 ]
    backward                                           [ 2 ] bucket 0 goes out
                                     [ 1             ] bucket 1 goes out
                     [ 0           ] bucket 2 goes out

A gradient is complete when the backward has passed the first node that uses its parameter. So a cut is right
before the node that uses a parameter of a bucket first. Where the graph cannot be cut there, the cut moves
towards the front: the bucket is then complete a little later, and complete it is.

Pure: a graph and a plan in, graphs out. Nothing is compiled or run, and no process group is needed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from paceline.compile.inputs import name_in, uses_of
from paceline.compile.seams import body_of, closed_positions, is_repeated, regions_of, value_of
from paceline.errors import name_some
from paceline.plan import Plan

Uses = Mapping[int, Sequence[fx.Node]]  # by the plan's index of a parameter


@dataclass(frozen=True)
class Piece:
    """A part of the graph that runs in one go: a graph of its own, which returns a tuple.

    ``inputs`` and ``outputs`` are nodes of the whole graph. ``buckets`` are complete after its backward, if
    that of all later pieces is over.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One bucket of the plan, as far as the graph uses it, and the piece that completes it."""

    bucket: int
    parameters: tuple[str, ...]
    nbytes: int
    piece: int
    nodes: int
    outputs: int


@dataclass(frozen=True)
class Table:
    """What became of a graph. It holds nothing but numbers and names, so it can be kept."""

    pieces: int
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = ["bucket         bytes  piece   nodes  outputs  parameters"]
        for row in self.rows:
            shown = ", ".join(row.parameters[:3])
            rest = f" and {len(row.parameters) - 3} more" if len(row.parameters) > 3 else ""
            start = f"{row.bucket:>6}  {row.nbytes:>12,}  {row.piece:>5}  {row.nodes:>6}  {row.outputs:>7}"
            lines.append(f"{start}  {shown}{rest}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Cut:
    """A graph in pieces. ``result`` is what the whole graph returns, with nodes in place of values."""

    plan: Plan
    placeholders: tuple[fx.Node, ...]
    pieces: tuple[Piece, ...]
    result: Any
    table: Table

    def explain(self) -> str:
        """Draw the buckets and the pieces that complete them as a table."""
        return str(self.table)


def cut(
    graph_module: fx.GraphModule,
    plan: Plan,
    parameters: Mapping[str, torch.Tensor],
    example_inputs: Sequence[Any] = (),
) -> Cut:
    """Cut a forward graph where the buckets of a plan are complete.

    ``parameters`` has the plan's parameters by name. ``example_inputs`` are needed where the graph has
    parameters as inputs, as Dynamo's have.
    """
    check_plan(plan, parameters)
    names = {id(parameter): name for name, parameter in parameters.items()}
    strangers = [
        name_in(graph_module, node, parameter)
        for parameter, node, _ in uses_of(graph_module, example_inputs)
        if parameter.requires_grad and id(parameter) not in names
    ]
    if strangers:
        told = f"its parameters are not the tensors that the graph uses as {name_some(strangers)}"
        raise ValueError(_of_another_model(told))
    return cut_by(graph_module, plan, uses_in(graph_module, plan, parameters, example_inputs))


def check_plan(plan: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise if a plan was made for other parameters than these."""
    shapes = {spec.name: spec.shape for spec in plan.specs}
    missing = [name for name in parameters if name not in shapes]
    if missing:
        raise ValueError(_of_another_model(f"it does not have {name_some(missing)}"))
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != shapes[name]:
            here, there = list(parameter.shape), list(shapes[name])
            raise ValueError(_of_another_model(f"{name} has shape {here}, and {there} in the plan"))


def _of_another_model(what: str) -> str:
    return f"this is the plan of another model: {what}. Give the plan of the model that is cut, or none"


def uses_in(
    graph_module: fx.GraphModule,
    plan: Plan,
    parameters: Mapping[str, torch.Tensor],
    example_inputs: Sequence[Any],
) -> dict[int, list[fx.Node]]:
    """Find the nodes that use the plan's parameters; what else the graph trains is nobody's business here."""
    places = {spec.name: index for index, spec in enumerate(plan.specs)}
    indices = {id(parameter): places[name] for name, parameter in parameters.items()}
    uses: dict[int, list[fx.Node]] = {}
    for parameter, _, users in uses_of(graph_module, example_inputs):
        if id(parameter) in indices:
            uses.setdefault(indices[id(parameter)], []).extend(users)
    return uses


def cut_by(graph_module: fx.GraphModule, plan: Plan, uses: Uses) -> Cut:
    """Cut a graph, given which nodes use which parameters of the plan."""
    body = body_of(graph_module.graph)
    firsts = _first_uses(body, plan, uses)
    starts = _starts(body, firsts)
    pieces = tuple(_pieces(graph_module, body, starts, firsts))
    return Cut(
        plan,
        tuple(graph_module.graph.find_nodes(op="placeholder")),
        pieces,
        graph_module.graph.output_node().args[0],
        Table(len(pieces), tuple(_rows(plan, uses, pieces))),
    )


def _first_uses(body: Sequence[fx.Node], plan: Plan, uses: Uses) -> dict[int, int]:
    """Return, by bucket, the position of the first node that uses one of its parameters."""
    places = {node: place for place, node in enumerate(body)}
    firsts: dict[int, int] = {}
    for bucket in plan.buckets:
        users = [user for slot in bucket.slots for user in uses.get(slot.parameter, ())]
        found = [places[n] for user in users for n in _in_body(user) if n in places and _has_backward(n)]
        if found:
            firsts[bucket.index] = min(found)
    return firsts


def _has_backward(node: fx.Node) -> bool:
    """Tell whether gradients may pass a node: a parameter can also be looked at under no_grad."""
    value = value_of(node)
    return not isinstance(value, torch.Tensor) or value.requires_grad


def _in_body(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, or what uses it where it is put into several pieces."""
    if not is_repeated(node):
        yield node
        return
    for user in node.users:
        yield from _in_body(user)


def _starts(body: Sequence[fx.Node], firsts: Mapping[int, int]) -> list[int]:
    """Choose where pieces start."""
    closed = closed_positions(body)
    # What comes before the first trained node has no backward that anybody waits for.
    wanted = sorted(set(firsts.values()))[1:]
    starts = {0, *(_open_position(place, closed) for place in wanted)}
    if wanted:
        starts -= set(range(1, min(firsts.values()) + 1))
    return _without_dead_ends(body, sorted(starts))


def _open_position(place: int, closed: set[int]) -> int:
    while place in closed:
        place -= 1
    return max(place, 0)


def _without_dead_ends(body: Sequence[fx.Node], starts: list[int]) -> list[int]:
    """Join a piece that returns nothing to its neighbour: compilers have no use for it."""
    kept = starts[:1]
    for start in starts[1:]:
        if _outputs_of(body[kept[-1] : start]):
            kept.append(start)
    return kept if len(kept) == 1 or _outputs_of(body[kept[-1] :]) else kept[:-1]


def _outputs_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that somebody else uses; regions are entered again instead."""
    inside, entries = set(nodes), regions_of(nodes)
    return [n for n in nodes if n not in entries and any(user not in inside for user in n.users)]


def _pieces(
    graph_module: fx.GraphModule, body: Sequence[fx.Node], starts: Sequence[int], firsts: Mapping[int, int]
) -> Iterator[Piece]:
    regions = regions_of(body)
    places = {node: place for place, node in enumerate(body)}
    sizes = _size_nodes(graph_module.graph)
    spans = list(pairwise([*starts, len(body)]))
    builders = [_Builder(graph_module, body[start:end], sizes) for start, end in spans]
    taken = {node for builder in builders for node in builder.inputs}
    for number, (builder, (start, end)) in enumerate(zip(builders, spans, strict=True)):
        # Places rather than times: a region is open here if it is entered before and left behind.
        for entry, leaving in regions.items():
            if places[entry] < start <= places[leaving]:
                builder.enters(entry)
        builder.copies()
        for entry, leaving in reversed(regions.items()):
            if places[entry] < end <= places[leaving]:
                builder.leaves(entry, leaving)
        buckets = tuple(bucket for bucket, place in firsts.items() if start <= place < end)
        yield builder.piece(f"Piece{number}", buckets, taken)


def _size_nodes(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Return, by symbol, the nodes whose value is a size that is not a constant."""
    nodes: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            nodes.setdefault(value.node.expr, node)
    return nodes


class _Builder:
    """Copies some nodes of a graph into a graph of their own, with everything that is noted on them."""

    def __init__(
        self, graph_module: fx.GraphModule, nodes: Sequence[fx.Node], sizes: Mapping[Any, fx.Node]
    ) -> None:
        self._whole = graph_module
        self._nodes = nodes
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self.inputs = tuple(_inputs_of(nodes, sizes))
        for node in self.inputs:
            self._copies[node] = self._placeholder(node)

    def _placeholder(self, node: fx.Node) -> fx.Node:
        new = self._graph.placeholder(node.name, type_expr=node.type)
        new.meta = dict(node.meta)
        if hasattr(self._whole, "_param_name_to_source"):  # Dynamo's: every input tells where it comes from
            new._dynamo_source = getattr(node, "_dynamo_source", None)
        return new

    def enters(self, entry: fx.Node) -> None:
        """Start inside of a region."""
        self._copies[entry] = self._graph.node_copy(entry, self._copy_of)

    def copies(self) -> None:
        """Copy all nodes, in order."""
        for node in self._nodes:
            self._copies[node] = self._graph.node_copy(node, self._copy_of)

    def leaves(self, entry: fx.Node, leaving: fx.Node) -> None:
        """End inside of a region."""
        self._graph.call_function(leaving.target, (self._copies[entry],))  # type: ignore[arg-type]

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            assert is_repeated(node), f"{node} is computed in a later piece"
            self._copies[node] = self._graph.node_copy(node, self._copy_of)
        return self._copies[node]

    def piece(self, name: str, buckets: tuple[int, ...], taken: Collection[fx.Node]) -> Piece:
        """Return the finished piece. It also hands on the sizes that others take, which no node may use."""
        used = {*taken, *_outputs_of(self._nodes)}
        outputs = [node for node in self._nodes if node in used]
        self._graph.output(tuple(self._copies[node] for node in outputs))
        module = fx.GraphModule(self._whole, self._graph, name)
        module.meta = dict(self._whole.meta)
        for note in ("_param_name_to_source", "_source_to_user_stacks"):
            if hasattr(self._whole, note):
                setattr(module, note, getattr(self._whole, note))
        return Piece(module, self.inputs, tuple(outputs), tuple(self._nodes), buckets)


def _inputs_of(nodes: Sequence[fx.Node], sizes: Mapping[Any, fx.Node]) -> list[fx.Node]:
    """Return what nodes use and do not compute, behind the sizes that its shapes are made of."""
    inside = set(nodes)
    found: dict[fx.Node, None] = {}

    def look_at(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if is_repeated(source):
                look_at(source)
            elif source not in inside and not _enters(source):
                found[source] = None

    for node in nodes:
        look_at(node)
    symbols = [sizes[s] for node in found for s in symbols_of(value_of(node)) if s in sizes]
    return list(dict.fromkeys([*(node for node in symbols if node not in inside), *found]))


def _enters(node: fx.Node) -> bool:
    return node in regions_of([node])


def symbols_of(value: Any) -> list[Any]:
    """Return the symbols in the shape of a value, in a fixed order."""
    return sorted(free_symbols(value), key=str) if isinstance(value, torch.Tensor | torch.SymInt) else []


def _rows(plan: Plan, uses: Uses, pieces: Sequence[Piece]) -> Iterator[Row]:
    completing = {bucket: number for number, piece in enumerate(pieces) for bucket in piece.buckets}
    for bucket in plan.buckets:
        if bucket.index not in completing:
            continue
        number = completing[bucket.index]
        used = [plan.specs[slot.parameter] for slot in bucket.slots if slot.parameter in uses]
        names, nbytes = tuple(spec.name for spec in used), sum(spec.nbytes for spec in used)
        piece = pieces[number]
        yield Row(bucket.index, names, nbytes, number, len(piece.nodes), len(piece.outputs))
