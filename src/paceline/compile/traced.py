"""Distributed objects inside traced code: constants, each with a guard, so that no change runs stale.

What a program asks of torch.distributed while it is traced becomes a number in the graph. torch checks few of
these numbers afterwards: get_rank() not at all, of a mesh not the rank that looks at it, of a group only its
type (2.13). So we stand where Dynamo takes in a group or a mesh, and where it answers a question about the
world, and leave a guard there:

    group, mesh      the object at the same place has the same ranks, names, groups and coordinates
    get_rank(), ...  asked again, the question has the same answer
    paceline.world() the world is the same

Eager code never comes by. Private names of torch, seen on 2.11 and 2.13: torch._dynamo.variables
(builder.VariableBuilder._wrap and its source, torch.TorchInGraphFunctionVariable.call_function and its value,
distributed.WorldMetaClassVariable.var_getattr and its value, tensor.TensorVariable.method_backward),
torch._dynamo.exc.unimplemented, the mark _dynamo_marked_constant on a function,
torch.distributed.distributed_c10d (_get_group_size_by_name, _resolve_group_name_by_ranks_and_tag,
_rank_not_in_group); on 2.13 torch._library.opaque_object (MemberType, get_opaque_obj_info) and
torch.distributed.device_mesh._register_distributed_opaque_types.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch.distributed as dist

from paceline.compile import backward_hooks, torch_2_11
from paceline.compile.guarding import guard_on, guard_on_answer, question_of
from paceline.watches.engine import engine_watch


@cache
def install() -> None:
    """Have Dynamo guard distributed objects and trace backward hooks, for as long as the process lives."""
    backward_hooks.install()
    _keep_backward_out()
    if not dist.is_available():
        return
    if torch_2_11.is_here():
        torch_2_11.mend()
    else:
        _name_more_members()
    _guard_objects()
    _guard_questions()
    _guard_world()


def _keep_backward_out() -> None:
    """End the graph before backward() while a model is replicated, whatever torch is asked to trace.

    With trace_autograd_ops on it would be traced away: gradients added up where nobody reduces them.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables import tensor

    kind: Any = tensor.TensorVariable
    trace = kind.method_backward

    def trace_or_refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if engine_watch.in_order():
            unimplemented(
                gb_type="backward() inside traced code beside a replicated model",
                context="paceline",
                explanation="gradients that are added up inside a graph would stay this rank's own.",
                hints=[
                    "Compile the forward and the loss, and call backward() outside, or leave out fullgraph."
                ],
            )
        return trace(self, *args, **kwargs)

    kind.method_backward = trace_or_refuse


# ---- what the guards compare -----------------------------------------------------------------------


def describe_group(group: Any) -> Any:
    """Return all that traced code can learn from a process group, and who it is."""
    group = _real(group)
    if not isinstance(group, dist.ProcessGroup):  # a rank outside of it holds a number in its place
        return group
    return id(group), group.rank(), group.size(), group.group_name, dist.get_process_group_ranks(group)


def describe_mesh(mesh: Any) -> Any:
    """Return all that traced code can learn from a device mesh."""
    mesh = _real(mesh)
    return hash(mesh), mesh.get_rank(), _group_names(mesh)  # the mesh itself would be kept alive


def _group_names(mesh: Any) -> list[str] | None:
    try:
        return [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]
    except RuntimeError:  # made without groups, or without this rank
        return None


def _real(value: Any) -> Any:
    """Return the object itself for what stands for it while graphs are traced in graphs."""
    return getattr(value, "real_obj", value)


# ---- where they are left ----------------------------------------------------------------------------


def _guard_objects() -> None:
    """Leave a guard wherever Dynamo takes in a group or a mesh."""
    from torch._dynamo.variables import builder
    from torch.distributed.device_mesh import DeviceMesh

    kind: Any = builder.VariableBuilder
    wrap = kind._wrap

    def wrap_and_guard(self: Any, value: Any) -> Any:
        if isinstance(value, dist.ProcessGroup):
            guard_on(self.source, describe_group, value, "the ranks and the name")
        elif isinstance(value, DeviceMesh):
            guard_on(self.source, describe_mesh, value, "the ranks, names and groups")
        elif isinstance(value, FunctionType) and (question := question_of(value)) is not None:
            guard_on_answer(question, question(), f"the answer of {value.__name__}()")
            value._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return wrap(self, value)

    kind._wrap = wrap_and_guard


def _guard_questions() -> None:
    """Leave a guard wherever Dynamo answers a question about the world that no group was named for."""
    from torch._dynamo.variables import torch as functions

    kind: Any = functions.TorchInGraphFunctionVariable
    call = kind.call_function
    questions = _questions()

    def call_and_guard(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = call(self, tx, args, kwargs)
        if callable(self.value) and _is_in(self.value, questions):
            _guard_question(self.value, args, kwargs)
        return result

    kind.call_function = call_and_guard


def _questions() -> set[Callable[..., Any]]:
    from torch.distributed import distributed_c10d as c10d

    # Those with their group as an argument need nothing more than the guard on the group.
    return {
        dist.is_initialized,
        dist.get_rank,
        dist.get_world_size,
        dist.get_process_group_ranks,
        c10d._get_group_size_by_name,
        c10d._resolve_group_name_by_ranks_and_tag,
        c10d._rank_not_in_group,
    }


def _is_in(value: Any, questions: set[Callable[..., Any]]) -> bool:
    try:
        return value in questions
    except TypeError:  # not all that can be called can be hashed
        return False


def _guard_question(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    try:
        values = [each.as_python_constant() for each in args]
        named = {name: each.as_python_constant() for name, each in kwargs.items()}
    except NotImplementedError:
        return
    if any(isinstance(each, dist.ProcessGroup) for each in (*values, *named.values())):
        return
    ask = partial(function, *values, **named)
    guard_on_answer(ask, ask(), f"the answer of torch.distributed.{function.__name__}()")


def _guard_world() -> None:
    """Take WORLD in like any other group, and a non-member as the number that it is."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import distributed
    from torch._dynamo.variables.base import VariableTracker

    kind: Any = distributed.WorldMetaClassVariable
    get = kind.var_getattr

    def get_guarded(self: Any, tx: Any, name: str) -> Any:
        if name not in ("WORLD", "NON_GROUP_MEMBER") or self.source is None:
            return get(self, tx, name)
        value = getattr(self.value, name)
        if name == "WORLD":
            guard_on_answer(dist.is_initialized, value is not None, "whether there is a world")
        return VariableTracker.build(tx, value, AttrSource(self.source, name))

    kind.var_getattr = get_guarded


def _name_more_members() -> None:
    """Let torch 2.13 read what it does not list of groups and meshes."""
    from torch._library.opaque_object import MemberType, get_opaque_obj_info
    from torch.distributed import device_mesh

    found: Any = device_mesh
    found._register_distributed_opaque_types()
    groups, meshes = get_opaque_obj_info(dist.ProcessGroup), get_opaque_obj_info(found.DeviceMesh)
    assert groups is not None
    assert meshes is not None
    groups.members.setdefault("name", MemberType.USE_REAL)
    meshes.members.setdefault("get_all_groups", MemberType.INLINED)
