"""What Dynamo of torch 2.11 gets wrong about distributed objects, mended.

2.12 and later represent groups, meshes and placements in another way, so nothing here is done for them. On
2.11 traced code silently returns Partial("sum") for Partial("avg"), takes type(Shard(0)) for another class
than Shard, and cannot return a sub-mesh or the group of a mesh.

Private names of torch, seen on 2.11: torch._dynamo.variables.distributed (DeviceMeshVariable,
ProcessGroupVariable, PlacementVariable, PlacementClassVariable), torch._dynamo.variables.builder
(SourcelessBuilder.create), torch._dynamo.variables.builtin.BuiltinVariable.call_hash (absent there),
PyCodegen (create_load_global, load_import_from, append_output, extend_output, add_push_null),
OutputGraph.install_global_by_id, InstructionTranslator.import_source.
"""

from typing import Any

Variable = Any  # a VariableTracker of Dynamo


def is_here() -> bool:
    """Tell whether this torch has the variables that are mended here."""
    from torch._dynamo.variables import distributed

    return hasattr(distributed, "PlacementVariable")


def mend() -> None:
    """Mend them, for as long as the process lives."""
    from torch._dynamo.variables import distributed as found

    found_now: Any = found
    _rebuild_placements(found_now.PlacementVariable)
    _know_placement_classes(found_now.PlacementClassVariable)
    _return_derived(found_now.DeviceMeshVariable)
    _return_derived(found_now.ProcessGroupVariable)
    _ask_meshes(found_now.DeviceMeshVariable)
    _ask_groups(found_now.ProcessGroupVariable)
    _hash_objects(found_now.DistributedVariable)


def _rebuild_placements(kind: Any) -> None:
    """Return placements with all that they were made with."""
    from torch._dynamo.bytecode_transformation import create_call_function
    from torch._dynamo.variables.constant import ConstantVariable
    from torch.distributed.tensor.placement_types import Partial

    rebuild = kind.reconstruct

    def rebuild_whole(self: Variable, codegen: Any) -> None:
        if type(self.value) is not Partial:
            rebuild(self, codegen)
            return
        codegen.add_push_null(lambda: codegen.load_import_from(Partial.__module__, "Partial"))
        codegen(ConstantVariable.create(self.value.reduce_op))
        codegen.extend_output(create_call_function(1, False))

    kind.reconstruct = rebuild_whole


def _know_placement_classes(kind: Any) -> None:
    """Find the same class whether it was read from a name or from an object."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import builder

    builders: Any = builder.SourcelessBuilder
    create = builders.create

    def create_known(tx: Any, value: Any) -> Variable:
        if kind.is_placement_type(value):
            home = tx.import_source(value.__module__)
            return builder.VariableBuilder(tx, AttrSource(home, value.__name__))(value)
        return create(tx, value)

    builders.create = staticmethod(create_known)


def _return_derived(kind: Any) -> None:
    """Return objects that were derived from a guarded one, such as a sub-mesh, as what they are."""

    def rebuild(self: Variable, codegen: Any) -> None:
        name = codegen.tx.output.install_global_by_id("distributed", self.value)
        codegen.append_output(codegen.create_load_global(name, add=True))

    kind.reconstruct = rebuild


def _ask_meshes(kind: Any) -> None:
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import ListVariable

    call, get = kind.call_method, kind.var_getattr

    def call_more(self: Variable, tx: Any, name: str, args: Any, kwargs: Any) -> Variable:
        if name != "get_all_groups":
            return call(self, tx, name, args, kwargs)
        dims: list[Any] = [ConstantVariable.create(dim) for dim in range(self.value.ndim)]
        return ListVariable([call(self, tx, "get_group", [dim], {}) for dim in dims])

    def get_more(self: Variable, tx: Any, name: str) -> Variable:
        if name == "mesh" and self.source is not None:
            return VariableTracker.build(tx, self.value.mesh, AttrSource(self.source, name))
        return get(self, tx, name)

    kind.call_method, kind.var_getattr = call_more, get_more


def _ask_groups(kind: Any) -> None:
    from torch._dynamo.variables.constant import ConstantVariable

    call = kind.call_method

    def call_more(self: Variable, tx: Any, name: str, args: Any, kwargs: Any) -> Variable:
        if name == "name":
            return ConstantVariable.create(self.value.name())
        return call(self, tx, name, args, kwargs)

    kind.call_method = call_more


def _hash_objects(kind: Any) -> None:
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable

    builtins: Any = BuiltinVariable
    theirs = getattr(builtins, "call_hash", None)

    def call_hash(self: Variable, tx: Any, found: Variable) -> Variable | None:
        if isinstance(found.realize(), kind):
            return ConstantVariable.create(hash(found.as_python_constant()))
        return theirs(self, tx, found) if theirs is not None else None

    builtins.call_hash = call_hash
