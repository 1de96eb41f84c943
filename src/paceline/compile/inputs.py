"""Which values of a captured graph are parameters, and which of its nodes use them.

Dynamo lifts parameters to inputs and passes the real ones as examples. Other tracers, and Dynamo where it is
told not to look into modules, leave them in the graph module: as attributes, or in modules that are called.

Private names of torch, seen on 2.11 and 2.13: ``_dynamo_source`` of a node, ``grapharg`` in its meta.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor


def parameters_of(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """Return the nodes that stand for a real parameter, inputs and attributes, with the parameter."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    # Tracers other than Dynamo's may be given without examples.
    held = [(node, _real(node, value)) for node, value in zip(placeholders, example_inputs, strict=False)]
    held += [
        (node, attribute_of(graph_module, node)) for node in graph_module.graph.find_nodes(op="get_attr")
    ]
    return {node: value for node, value in held if _is_parameter(value)}


def uses_of(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any]
) -> Iterator[tuple[torch.Tensor, fx.Node, list[fx.Node]]]:
    """Yield each parameter with the node that names it and the nodes that compute with it.

    One parameter may come more than once: tied ones may have two names.
    """
    for node, parameter in parameters_of(graph_module, example_inputs).items():
        yield parameter, node, list(node.users)
    for node in graph_module.graph.nodes:
        inside = _module_of(graph_module, node)
        if inside is not None:
            users = [node] if node.op == "call_module" else list(node.users)
            yield from ((parameter, node, users) for parameter in inside.parameters())


def name_in(graph_module: fx.GraphModule, node: fx.Node, parameter: torch.Tensor) -> str:
    """Name a parameter as its module would, where the graph tells."""
    if node.op != "placeholder":
        names = {id(value): name for name, value in graph_module.named_parameters()}
        return names.get(id(parameter), node.name)
    source = getattr(node, "_dynamo_source", None)
    text = str(getattr(source, "name", ""))
    parts = re.findall(r"_(?:modules|parameters)\['([^']+)'\]", text)
    return ".".join(parts) or node.name


def attribute_of(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    """Return what a get_attr node reads."""
    value: Any = graph_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _module_of(graph_module: fx.GraphModule, node: fx.Node) -> torch.nn.Module | None:
    """Return the module that a node calls, or hands to a higher-order operator."""
    if node.op not in ("call_module", "get_attr"):
        return None
    value = attribute_of(graph_module, node)
    return value if isinstance(value, torch.nn.Module) else None


def _real(node: fx.Node, value: Any) -> Any:
    """Return the tensor that an example stands for: a fake one may have been put in its place."""
    if not isinstance(value, FakeTensor) or "grapharg" not in node.meta:
        return value
    try:
        return node.meta["grapharg"].example
    except AssertionError:  # Dynamo has let go of it
        return value


def _is_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and not isinstance(value, FakeTensor)
