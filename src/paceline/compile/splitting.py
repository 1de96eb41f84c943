"""The torch.compile backend "paceline_split": a captured forward, cut by the plan, each piece compiled alone.

Use it by its name, or as a function made by ``split()``:

    torch.compile(model, backend="paceline_split", options={"inner": "aot_eager"})
    torch.compile(model, backend=paceline.compile.split(inner="aot_eager"))

Private names of torch, seen on 2.11 and 2.13: ``torch._dynamo.register_backend``, ``lookup_backend`` and
``list_backends``, ``torch._dynamo.backends.registry._BACKENDS``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo import list_backends, lookup_backend, register_backend
from torch._dynamo.backends import registry

from paceline.compile.cutting import Cut, Table, cut, cut_by, uses_in
from paceline.compile.inputs import name_in, uses_of
from paceline.compile.pieces import Compiled, Inner, compile_pieces
from paceline.compile.seams import body_of
from paceline.plan import Caps, Plan, Spec, plan_buckets
from paceline.watches.engine import engine_watch

NAME = "paceline_split"
OPTIONS = ("inner", "bucket_mb", "first_bucket_mb", "plan", "parameters")
KEPT = 100

Backend = Callable[[fx.GraphModule, Sequence[Any]], Compiled]
Named = Mapping[str, torch.Tensor]

# Compilation has no object that people hold and could ask. Tables are small and hold no tensor.
_tables: deque[Table] = deque(maxlen=KEPT)


def last_cuts() -> list[Table]:
    """Return what became of the graphs that were compiled last, the latest one at the end.

    Print one to read it. A graph that was left whole is one piece.
    """
    return list(_tables)


@dataclass(frozen=True)
class _Wish:
    """What a user has asked for. ``parameters`` are those of ``plan``, by name."""

    inner: Inner
    caps: Caps | None = None
    plan: Plan | None = None
    parameters: Named | None = None


def split(
    inner: str | Inner = "inductor",
    *,
    bucket_mb: float | Sequence[float] | None = None,
    first_bucket_mb: float | None = None,
    plan: Plan | None = None,
    parameters: Named | Iterable[tuple[str, torch.Tensor]] | None = None,
) -> Backend:
    """Make a backend for torch.compile that cuts forwards by a plan and compiles each piece by ``inner``.

    The plan is that of the replica whose parameters the graph has, and without one a plan of the graph's own
    parameters, in buckets of ``bucket_mb`` MiB, the first one of ``first_bucket_mb``. Sizes given here also
    make pieces of another size than a replica's buckets. ``plan`` comes with the ``parameters`` it is of.
    """
    if (plan is None) is not (parameters is None):
        raise ValueError("split() takes a plan together with its parameters, got one without the other")
    named = None if parameters is None else dict(parameters)
    wish = _Wish(_compiler(inner), _caps(bucket_mb, first_bucket_mb), plan, named)

    def paceline_split(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Compile a graph. Called by Dynamo, once for each graph that it captures."""
        return _compile(graph_module, example_inputs, wish)

    return paceline_split


def by_name(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile a graph as ``torch.compile(backend="paceline_split")`` asks for it. Called by Dynamo."""
    if mode is not None:
        raise ValueError(f'backend "paceline_split" takes no mode, got {mode!r}; give it an inner backend')
    unknown = [name for name in options or () if name not in OPTIONS]
    if unknown:
        raise ValueError(
            f'backend "paceline_split" has no option {unknown[0]!r}; it has {", ".join(OPTIONS)}'
        )
    return split(**(options or {}))(graph_module, example_inputs)


by_name.__name__ = NAME
if NAME not in registry._BACKENDS:  # an entry point may be loading it at this moment
    register_backend(by_name, NAME)


def _compiler(inner: str | Inner) -> Inner:
    if callable(inner):
        return inner
    if not isinstance(inner, str):
        raise TypeError(f"inner has to be the name of a backend or a function, got {type(inner).__name__}")
    names = [name for name in list_backends(exclude_tags=()) if name != NAME]
    if inner not in names:
        raise ValueError(f"inner backend {inner!r} does not exist; there are {', '.join(names)}")
    compiler: Inner = lookup_backend(inner)
    return compiler


def _caps(bucket_mb: float | Sequence[float] | None, first: float | None) -> Caps | None:
    if bucket_mb is None and first is None:
        return None
    return Caps.of_sizes(25 if bucket_mb is None else bucket_mb, first)


def _compile(graph_module: fx.GraphModule, example_inputs: Sequence[Any], wish: _Wish) -> Compiled:
    found = _cut(graph_module, example_inputs, wish) if torch.is_grad_enabled() else None
    _tables.append(found.table if found else Table(1, ()))
    if found is None or len(found.pieces) < 2:
        return wish.inner(graph_module, list(example_inputs))
    return compile_pieces(found, example_inputs, wish.inner)


def _cut(graph_module: fx.GraphModule, example_inputs: Sequence[Any], wish: _Wish) -> Cut | None:
    if wish.plan is not None:
        assert wish.parameters is not None
        return cut(graph_module, wish.plan, wish.parameters, example_inputs)
    used = {id(parameter) for parameter, _, _ in uses_of(graph_module, example_inputs)}
    owner = max(engine_watch.in_order(), key=lambda each: _shared(each, used), default=None)
    if owner is None or not _shared(owner, used):
        plan, named = plan_of(graph_module, example_inputs, wish.caps)
    else:
        plan, named = owner.plan, dict(owner.named())
        if wish.caps is not None:
            plan = plan_buckets(plan.specs, wish.caps, order=plan.members, wishes=plan.wishes)
    return cut_by(graph_module, plan, uses_in(graph_module, plan, named, example_inputs))


def _shared(owner: Any, used: set[int]) -> int:
    return sum(id(parameter) in used for parameter in owner.parameters)


def plan_of(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], caps: Caps | None = None
) -> tuple[Plan, dict[str, torch.Tensor]]:
    """Plan the parameters that a graph trains, in the order in which its backward completes gradients."""
    places = {node: place for place, node in enumerate(body_of(graph_module.graph))}
    named: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    firsts: dict[str, int] = {}
    for parameter, node, users in uses_of(graph_module, example_inputs):
        found = [places[user] for user in users if user in places]
        if found and parameter.requires_grad:
            name = names.setdefault(id(parameter), _new_name(node, graph_module, parameter, named))
            named[name] = parameter
            firsts[name] = min(*found, firsts.get(name, len(places)))
    specs = [Spec(n, tuple(p.shape), p.dtype, p.device, tuple(p.stride())) for n, p in named.items()]
    order = sorted(range(len(specs)), key=lambda index: (firsts[specs[index].name], index), reverse=True)
    return plan_buckets(specs, caps, order=order), named


def _new_name(node: fx.Node, graph_module: fx.GraphModule, parameter: torch.Tensor, taken: Named) -> str:
    name = name_in(graph_module, node, parameter)
    return name if name not in taken else f"{name} ({node.name})"
