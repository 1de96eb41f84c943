"""Where a captured graph may be cut, and where not.

    h = linear(x, w)      ┐
    v = h[:, :2]          │ one storage: no cut between the first value and the last write, or a piece would
    v.mul_(2)             ┘ be compiled for what the value is after it
    enter_autocast()      ┐ a cut inside is made good: the region is left before and entered again behind it
    exit_autocast()       ┘
    set_grad_enabled(no)  ┐ no cut
    set_grad_enabled(yes) ┘

Pure: a graph in, positions out. A cut at position ``p`` is before the p-th node of the body. What is known of
values comes from Dynamo's examples; a graph without them is run to get some, so it can be cut anywhere.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

Span = tuple[int, int]  # no cut behind the first of two positions, up to the second
UNKNOWN = object()
IN_PLACE = {
    getattr(operator, "i" + name)
    for name in ("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub")
} | {operator.itruediv, operator.ixor, operator.setitem}
HAS_NO_VALUE = (operator.setitem, operator.delitem)
HARMLESS = ("_set_grad_enabled", "lazy_load_decompositions")  # the first one is looked at by itself
OPENING, CLOSING = "_increment_nesting", "_decrement_nesting"


def value_of(node: fx.Node) -> Any:
    """Return the example of a node's value, or UNKNOWN."""
    return node.meta.get("example_value", UNKNOWN)


def body_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that have to be in one piece each, in an order in which they can run.

    What is taken out of a tuple is taken at once: tensors can be handed from piece to piece, tuples cannot.
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_repeated(n)]
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if _is_part(node):
            parts.setdefault(node.args[0], []).append(node)

    def with_parts(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for part in parts.get(node, ()):
            yield from with_parts(part)

    return [each for node in nodes if not _is_part(node) for each in with_parts(node)]


def is_repeated(node: fx.Node) -> bool:
    """Tell whether a node is put into each piece that uses it, because its value cannot be handed over.

    These are attributes (the body of a higher-order operator goes with its operator) and numbers that are
    read from an input, which is how Dynamo keeps a float from making a graph of its own.
    """
    if node.op == "get_attr":
        return True
    if not isinstance(value_of(node), torch.SymFloat):
        return False
    return all(source.op == "placeholder" or is_repeated(source) for source in node.all_input_nodes)


def _is_part(node: fx.Node) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    whole = node.args[0]
    if not isinstance(whole, fx.Node) or whole.op == "placeholder" or is_repeated(whole):
        return False
    return not isinstance(value_of(whole), torch.Tensor)


def regions_of(body: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the autocast regions: the node that enters and the node that leaves."""
    entries = [node for node in body if _name(node) == "_enter_autocast"]
    return {node: next(iter(node.users)) for node in entries if len(node.users) == 1}


def closed_positions(body: Sequence[fx.Node]) -> set[int]:
    """Return the positions at which the graph may not be cut."""
    if all(value_of(node) is UNKNOWN for node in body):
        return set()
    places = {node: place for place, node in enumerate(body)}
    spans = chain(_kept(body, places), _modes(body), _effects(body), _writes(body, places))
    return {place for start, end in spans for place in range(start + 1, end + 1)}


def _kept(body: Sequence[fx.Node], places: dict[fx.Node, int]) -> Iterator[Span]:
    """Keep values that cannot be handed from piece to piece together with their users."""
    regions = regions_of(body)
    for node in body:
        users = [places[user] for user in node.users if user in places]
        if users and node not in regions and not _can_pass(value_of(node)):
            yield places[node], max(users)


def _can_pass(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        functorch: Any = torch._C._functorch
        return not functorch.is_functorch_wrapped_tensor(value) and not free_unbacked_symbols(value)
    return isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)


def _modes(body: Sequence[fx.Node]) -> Iterator[Span]:
    """Keep code that runs with gradients switched off, or on, by itself."""
    usual, start = torch.is_grad_enabled(), None
    for place, node in enumerate(body):
        if _name(node) != "_set_grad_enabled":
            continue
        if start is not None:
            yield start, place
        start = place if node.args[0] is not usual else None
    if start is not None:
        yield start, len(body)


def _effects(body: Sequence[fx.Node]) -> Iterator[Span]:
    """Keep together what is called for its effect alone; what most effects are, nobody says."""
    regions = regions_of(body)
    known = {*regions, *regions.values()}
    effects = [(place, _name(n)) for place, n in enumerate(body) if n not in known and _is_effect(n)]
    depth, start = 0, 0
    for place, name in effects:  # vmap, grad and their like, which nest
        start = start if depth else place
        depth += name.endswith(OPENING) - name.endswith(CLOSING)
        yield start, place
    others = [place for place, name in effects if not name.endswith((OPENING, CLOSING))]
    if others:
        yield others[0], others[-1]


def _is_effect(node: fx.Node) -> bool:
    if node.op != "call_function" or node.users or value_of(node) is not UNKNOWN:
        return False
    return node.target not in HAS_NO_VALUE and _name(node) not in HARMLESS


# ---- in-place operators -----------------------------------------------------------------------------


def _writes(body: Sequence[fx.Node], places: dict[fx.Node, int]) -> Iterator[Span]:
    """Keep what is written in place together with everything that shares its memory, up to the write."""
    sharing = _by_storage(body)
    for place, node in enumerate(body):
        for target in written_by(node):
            group = sharing.get(_storage_of(target), [target])
            yield min((places[n] for n in group if n in places), default=place), place
            # Written by something trained, an input has a gradient from here on, which its example has not.
            if any(n.op == "placeholder" for n in group) and any(_is_trained(n) for n in group):
                yield place, max(places[user] for n in group for user in (n, *n.users) if user in places)


def _by_storage(body: Sequence[fx.Node]) -> dict[Any, list[fx.Node]]:
    groups: dict[Any, list[fx.Node]] = {}
    for node in body[0].graph.nodes if body else ():
        if isinstance(value_of(node), torch.Tensor):
            groups.setdefault(_storage_of(node), []).append(node)
    return groups


def _storage_of(node: fx.Node) -> Any:
    value = value_of(node)
    try:
        return value.untyped_storage()._cdata
    except (AttributeError, NotImplementedError, RuntimeError):  # not a tensor, or a wrapper around some
        return id(value)


def _is_trained(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node writes in place, as far as can be told from its name or schema."""
    written = [node.kwargs.get("out")]
    if node.op == "call_function" and isinstance(
        node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket
    ):
        written += _by_schema(node)
    elif _is_in_place(node):
        written.append(node.args[0] if node.args else node.kwargs.get("input"))
    elif "kernel_wrapper_mutation" in _name(node):
        written += node.all_input_nodes
    return list(dict.fromkeys(n for n in written if isinstance(n, fx.Node)))


def _is_in_place(node: fx.Node) -> bool:
    if node.target in IN_PLACE or _argument(node, "inplace") is True:
        return True
    name = _name(node)
    if node.op == "call_method" and name.startswith("__"):
        return name == "__setitem__" or getattr(operator, name, None) in IN_PLACE
    # operator.and_ and its like have the mark for another reason.
    return name.endswith("_") and not name.endswith("__") and not hasattr(operator, name)


def _argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a call, by position or by name."""
    if node.op != "call_function" or name in node.kwargs:
        return node.kwargs.get(name)
    assert callable(node.target)
    names = _names_of(node.target)
    return node.args[names.index(name)] if name in names[: len(node.args)] else None


def _names_of(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built-in
        return []


def _by_schema(node: fx.Node) -> Iterator[Any]:
    target: Any = node.target
    overloads = [target] if isinstance(target, torch._ops.OpOverload) else _overloads(target)
    for schema in (overload._schema for overload in overloads):
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
