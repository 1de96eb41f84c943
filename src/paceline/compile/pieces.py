"""Compiles the pieces of a cut graph, each by itself, and runs them as one.

A compiler inside Dynamo leaves notes in the tracing context, and reads them again when it compiles the
backward, which may be much later. One graph in several pieces has several sets of notes, so each piece gets a
context of its own, which shares with Dynamo's what has to be shared: guards, shapes and the fake mode.

Nothing is run to learn what travels from piece to piece: Dynamo has noted an example of every value.

Private names of torch, seen on 2.11 and 2.13: ``torch._guards.TracingContext`` with the fields in NOTES,
``torch._guards._TLS.tracing_context``, ``torch._subclasses.fake_tensor``, ``example_value`` in a node's meta,
``torch.utils._pytree``.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import _TLS, TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from paceline.compile.cutting import Cut, Piece
from paceline.compile.seams import UNKNOWN, value_of

Compiled = Callable[..., Any]
Inner = Callable[[fx.GraphModule, list[Any]], Compiled]

# What AOTAutograd and Inductor leave behind for one graph.
NOTES = (
    "fw_metadata",
    "aot_graph_name",
    "params_flat",
    "params_flat_unwrap_subclasses",
    "params_unwrapped_to_flat_index",
    "output_strides",
)


@dataclass(frozen=True)
class Step:
    """One piece: what it takes and returns, by place among the values, and what nobody needs after it."""

    run: Compiled
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...]


class Chain:
    """Runs compiled pieces one after another, as the whole graph would. It keeps nothing of the graph."""

    def __init__(self, cut: Cut, runs: Sequence[Compiled]) -> None:
        nodes = [*cut.placeholders, *(node for piece in cut.pieces for node in piece.outputs)]
        places = {node: place for place, node in enumerate(nodes)}
        leaves, self._form = pytree.tree_flatten(cut.result)
        self._constants = [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        self._returned = [(i, places[leaf]) for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        # What the caller passed in is the caller's to keep; what is returned is kept to the end.
        kept = {*cut.placeholders, *leaves}
        self._steps = [Step(*step) for step in _schedule(cut, runs, places, kept)]
        self._room = len(nodes) - len(cut.placeholders)

    def __call__(self, *inputs: Any) -> Any:
        values: list[Any] = [*inputs, *[None] * self._room]
        for step in self._steps:
            outputs = step.run(*[values[place] for place in step.inputs])
            for place in step.done:
                values[place] = None
            for place, value in zip(step.outputs, outputs, strict=True):
                values[place] = value
        leaves = self._constants.copy()
        for leaf, place in self._returned:
            leaves[leaf] = values[place]
        return pytree.tree_unflatten(leaves, self._form)


def _schedule(
    cut: Cut, runs: Sequence[Compiled], places: Mapping[fx.Node, int], kept: Collection[Any]
) -> Iterator[tuple[Compiled, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    def places_of(nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        return tuple(places[node] for node in nodes)

    lasts = {node: number for number, piece in enumerate(cut.pieces) for node in piece.inputs}
    for number, (piece, run) in enumerate(zip(cut.pieces, runs, strict=True)):
        done = [node for node in piece.inputs if node not in kept and lasts[node] == number]
        yield run, places_of(piece.inputs), places_of(piece.outputs), places_of(done)


def compile_pieces(cut: Cut, example_inputs: Sequence[Any], inner: Inner) -> Chain:
    """Compile each piece by ``inner``, in the order in which they run."""
    examples = _Examples(cut, example_inputs)
    runs = []
    for piece in cut.pieces:
        given = [examples.of(node) for node in piece.inputs]
        with _own_context():
            runs.append(inner(piece.module, given))
        examples.passes(piece)
    return Chain(cut, runs)


@contextlib.contextmanager
def _own_context() -> Iterator[None]:
    usual = TracingContext.try_get()
    if usual is None:
        yield
        return
    mine = copy.copy(usual)
    for note in NOTES:
        setattr(mine, note, None)
    # torch's own way of changing the context also drops the stacks that Dynamo still needs for its messages.
    _TLS.tracing_context = mine
    try:
        yield
    finally:
        _TLS.tracing_context = usual


class _Examples:
    """Knows an example of every value that a piece takes."""

    def __init__(self, cut: Cut, example_inputs: Sequence[Any]) -> None:
        context = TracingContext.try_get()
        between = [node for piece in cut.pieces for node in piece.outputs]
        self._are_known = not any(value_of(node) is UNKNOWN for node in between)
        self._mode = context.fake_mode if context is not None else None
        if self._mode is None:
            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values = dict(zip(cut.placeholders, example_inputs, strict=True))
        if not self._are_known:
            self._values = {node: self._without_data(value) for node, value in self._values.items()}

    def _without_data(self, value: Any) -> Any:
        """Make a value that can be computed with and written to at no cost; leave parameters as they are."""
        return value if isinstance(value, torch.nn.Parameter) else self._copy(value)

    def _copy(self, value: Any) -> Any:
        is_mine = isinstance(value, FakeTensor) and value.fake_mode is self._mode
        if is_mine or not isinstance(value, torch.Tensor):
            return value
        assert self._mode is not None
        with warnings.catch_warnings():  # torch looks at its .grad, and would print nothing, but may raise
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            return self._mode.from_tensor(value)

    def of(self, node: fx.Node) -> Any:
        """Return the example of a value that an earlier piece, or the caller, hands over."""
        if node not in self._values:
            # Dynamo's examples belong to the mode that it traced in, which compilers do not share.
            self._values[node] = self._without_data(value_of(node))
        return self._values[node]

    def passes(self, piece: Piece) -> None:
        """Go past a piece; where nobody has noted its results, run it without data."""
        if self._are_known:
            return
        assert self._mode is not None
        held = {**dict(piece.module.named_parameters()), **dict(piece.module.named_buffers())}
        with self._mode:
            inside = {name: self._copy(value) for name, value in held.items()}
            inputs = tuple(self._copy(self.of(node)) for node in piece.inputs)
            outputs = torch.func.functional_call(piece.module, inside, inputs)
        self._values.update(zip(piece.outputs, outputs, strict=True))
