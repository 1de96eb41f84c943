"""Puts the arrival of gradients into compiled backward graphs, whoever compiles them.

Every backend that is made for training comes by AotAutograd, with the compiler of its backward graphs. That
compiler gets a graph in which groups of gradients leave as soon as they are complete, so that their buckets
are reduced while the rest is computed. The forward stays whole, and the number of graphs does not depend on
the number of buckets.

Private names of torch, seen on 2.11 and 2.13:

    torch._dynamo.backends.common.AotAutograd          what backends are made of; its kwargs
    torch._guards.TracingContext, CompileContext       under which a graph is compiled later, and how
    torch._subclasses.fake_tensor.unset_fake_temporarily
    meta["desc"] of a graph's output                   what is returned
"""

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paceline.compile.arrivals import ARRIVED, Receiver
from paceline.compile.inputs import parameters_of
from paceline.plan import MIB
from paceline.torch_private import is_dtensor
from paceline.watches.engine import engine_watch

log = logging.getLogger("paceline")
POINTS = 16  # at most about so many, in one graph: each costs the host some time
SMALLEST_NBYTES = MIB // 2

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]
Compiled = Callable[[list[Any]], Any]


def install() -> None:
    """Be there when something is compiled."""
    from torch._dynamo.backends.common import AotAutograd

    compile_plainly: Any = AotAutograd.__call__

    def compile_with_arrivals(
        backend: Any, graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Any:
        watched = _watched(graph, example_inputs)
        if watched:
            backend = AotAutograd(**_with_arrivals(backend.kwargs, example_inputs, watched))
        return compile_plainly(backend, graph, example_inputs, **options)

    AotAutograd.__call__ = compile_with_arrivals  # type: ignore[method-assign, assignment]


def _watched(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> set[int]:
    """Return the positions of the inputs whose gradients may be taken early."""
    ours = {id(p) for reducer in engine_watch.in_order() if reducer.may_take for p in reducer.parameters}
    if not ours or not isinstance(graph, fx.GraphModule):  # with lists among its inputs it comes by again
        return set()
    if any(map(is_dtensor, example_inputs)):  # they are taken apart, and the positions are others then
        return set()
    parameters = parameters_of(graph, example_inputs)
    inputs = graph.graph.find_nodes(op="placeholder")
    return {i for i, node in enumerate(inputs) if node in parameters and id(parameters[node]) in ours}


def _with_arrivals(
    settings: dict[str, Any], example_inputs: Sequence[Any], watched: set[int]
) -> dict[str, Any]:
    forward: Compiler = settings["fw_compiler"]
    backward: Compiler = settings.get("bw_compiler") or forward
    is_tensor = [isinstance(value, torch.Tensor) for value in example_inputs]

    def compile_forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Hide what kind of compiler it is: nothing of ours may end up in a cache of whole compilations."""
        return forward(graph, inputs)

    def compile_backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found = find_gradients(graph.graph, watched, len(is_tensor))
        if not found:
            return backward(graph, inputs)
        return _compile_both_ways(backward, graph, inputs, found, is_tensor)

    return {
        "inference_compiler": forward,
        **settings,
        "fw_compiler": compile_forward,
        "bw_compiler": compile_backward,
    }


def _compile_both_ways(
    backward: Compiler,
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    gradients: Sequence["Gradient"],
    is_tensor: Sequence[bool],
) -> Compiled:
    """Compile the graph with arrivals; and without them, when a run first asks for that."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        untouched = copy.deepcopy(graph)
    groups = gather(gradients)
    insert_arrivals(graph, groups)
    with_arrivals = _boxed(backward(graph, inputs))
    without = _Later(backward, untouched, inputs)
    edges = [[sum(is_tensor[: gradient.position]) for gradient in group] for group in groups]
    receiver = Receiver(edges, sum(is_tensor))

    def run(arguments: list[Any]) -> Any:
        found = receiver.delivery()
        if found is None:
            return without(arguments)
        return list(found.run(with_arrivals, arguments))[:-1]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Later:
    """A graph that is compiled when it is first run, as if that were now."""

    def __init__(self, compiler: Compiler, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._compiler = compiler
        self._graph: fx.GraphModule | None = graph
        self._inputs = inputs
        self._tracing = torch._guards.TracingContext.try_get()
        self._compile = torch._guards.CompileContext.try_get()
        self._compiled: Compiled | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        if self._compiled is None:
            assert self._graph is not None
            guards = torch._guards
            with guards.tracing(self._tracing), guards.compile_context(self._compile), torch.no_grad():
                self._compiled = _boxed(self._compiler(self._graph, self._inputs))
            self._graph = None
        return self._compiled(arguments)


def _boxed(function: Any) -> Compiled:
    """Return a function of a list, which it may empty."""
    if getattr(function, "_boxed_call", False):
        return function  # type: ignore[no-any-return]
    return lambda arguments: function(*arguments)


# ---- the graph -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradient:
    """A gradient that a backward graph returns."""

    position: int  # among the graph's outputs, and among the inputs of the forward
    node: fx.Node

    @property
    def nbytes(self) -> int:
        """Its size; that of a parameter is known."""
        value = self.node.meta["val"]
        return int(value.numel()) * int(value.element_size())


def find_gradients(graph: fx.Graph, watched: set[int], count: int) -> list[Gradient]:
    """Return the gradients of the watched inputs, in the order in which the graph computes them.

    Of a graph whose outputs are not just the gradients of the ``count`` inputs, none.
    """
    output = graph.output_node()
    values, kinds = output.args[0], output.meta.get("desc")
    if kinds is None or not isinstance(values, Sequence) or not len(values) == len(kinds) == count:
        log.info("gradients of a compiled graph are reduced after it: its outputs are of an unknown kind")
        return []
    order = {node: number for number, node in enumerate(graph.nodes)}
    found = [
        Gradient(position, node)
        for position, (node, kind) in enumerate(zip(values, kinds, strict=True))
        if position in watched and isinstance(node, fx.Node) and _is_gradient_of(kind, position)
    ]
    return sorted(found, key=lambda gradient: order[gradient.node])


def _is_gradient_of(kind: Any, position: int) -> bool:
    return getattr(getattr(kind, "grad_of", None), "idx", None) == position


def gather(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """Gather gradients, in the order in which they are computed, into groups that leave together.

    The groups are finer than buckets, so that they serve any plan: buckets change, the graph does not.
    """
    enough = max(SMALLEST_NBYTES, sum(gradient.nbytes for gradient in gradients) // POINTS)
    groups: list[list[Gradient]] = [[]]
    nbytes = 0
    for gradient in gradients:
        if nbytes >= enough:
            groups.append([])
            nbytes = 0
        groups[-1].append(gradient)
        nbytes += gradient.nbytes
    return groups


def insert_arrivals(module: fx.GraphModule, groups: Sequence[Sequence[Gradient]]) -> None:
    """Let each group leave where its last gradient is complete; the graph returns None in their place.

    The operators are chained, so that they run in this order, and the last link is returned as well, so that
    no pass takes them for dead.
    """
    graph = module.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    spot = _last(graph.find_nodes(op="placeholder"), order)
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    link: fx.Node | None = None
    for number, group in enumerate(groups):
        nodes = [gradient.node for gradient in group]
        spot = _last((spot, *nodes), order)
        with graph.inserting_after(spot):
            link = graph.call_function(ARRIVED, (nodes, number, link))
        order[link] = order[spot]
        spot = link
        link.meta["val"] = nodes[0].meta["val"].new_empty(1)
        for gradient in group:
            values[gradient.position] = None
    output.args = ((*values, link),)
    output.meta["desc"] = [*output.meta["desc"], None]
    module.recompile()


def _last(nodes: Iterable[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    """Return the last of some nodes; of those at the same place, the first named."""
    return max(nodes, key=order.__getitem__)
