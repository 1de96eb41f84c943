"""Sharded parameters (DTensors): the engine works on the part that this rank holds.

    users, optimizers, checkpoints   weight    DTensor, Shard(0) over tp    .grad: a DTensor, placed alike
                                       │ the same memory
    reducer, buckets, hooks          Part      a plain tensor               .grad: its part, a plain tensor

A part is a tensor whose ``.grad`` is read from, and written to, the sharded parameter's. So what is reduced
over the data-parallel ranks are parts of the same place, and nobody else sees anything but DTensors.
"""

import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import UnsyncedGradients, name_ranks, name_some
from paceline.torch_private import NO_TORCH_FUNCTION, is_dtensor, local_of, placed_like, waited


class Part(torch.Tensor):
    """This rank's part of a sharded parameter."""

    sharded: Any  # the DTensor
    label: str  # its name
    __torch_function__ = NO_TORCH_FUNCTION  # what is computed from it is a plain tensor

    @property
    def grad(self) -> torch.Tensor | None:
        """The part of the gradient that belongs to it."""
        gradient = self.sharded.grad
        if gradient is None:
            return None
        if is_dtensor(gradient) and gradient.placements != self.sharded.placements:
            raise self._misplaced(gradient)  # somebody has put it there: autograd's are settled
        return local_of(gradient)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        there = self.sharded.grad
        if value is not None and there is not None and there.requires_grad:
            local_of(there).data.copy_(value)  # part of a graph (create_graph=True): the same tensor
        else:
            self.sharded.grad = None if value is None else placed_like(value, self.sharded)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter is trained."""
        return bool(self.sharded.requires_grad)

    def data_ptr(self) -> int:
        """Return where the parameter's part lies now."""
        return local_of(self.sharded).data_ptr()

    def settle(self) -> None:
        """Bring a new gradient to where the parameter is: what is partial over its mesh is summed up there.

        Called by the autograd thread that wrote the gradient, so at the same point on all ranks of the mesh.
        """
        gradient, sharded = self.sharded.grad, self.sharded
        if gradient is None or (
            gradient.device_mesh == sharded.device_mesh and gradient.placements == sharded.placements
        ):
            return
        if gradient.device_mesh != sharded.device_mesh:
            raise self._misplaced(gradient)
        settled = gradient.redistribute(placements=sharded.placements)
        if not gradient.requires_grad:
            settled = placed_like(waited(local_of(settled)), sharded)
        sharded.grad = settled

    def _misplaced(self, gradient: Any) -> UnsyncedGradients:
        return UnsyncedGradients(
            f"the gradient of {self.label} is {_where(gradient)}, but the parameter is "
            f"{_where(self.sharded)}, so that the ranks would not add up the same. Redistribute a gradient "
            "to the parameter's own mesh and placements before it is put there.",
            [self.label],
        )


def leaf_of(parameter: nn.Parameter, name: str = "a parameter") -> torch.Tensor:
    """Return what the engine works on: this rank's part of a sharded parameter, else the parameter itself."""
    if not is_dtensor(parameter):
        return parameter
    part = local_of(parameter).detach().as_subclass(Part)
    part.sharded, part.label = parameter, name
    return part


def owner_of(leaf: torch.Tensor) -> torch.Tensor:
    """Return the parameter that users know."""
    owner: torch.Tensor = leaf.sharded if isinstance(leaf, Part) else leaf
    return owner


def local_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of tensors on this rank: of sharded ones, the part."""
    return [local_of(tensor) if is_dtensor(tensor) else tensor for tensor in tensors]


@dataclass(frozen=True)
class Spread:
    """Over which dimensions of a mesh the parts of a tensor are spread; along the others they are copies."""

    mesh: Any
    is_cut: tuple[bool, ...]

    def norm(self, part: torch.Tensor, order: float) -> torch.Tensor:
        """Return the norm of the whole from that of this rank's part. All ranks of the mesh call this."""
        if math.isinf(order):
            return self._reduced(part, "max" if order > 0 else "min")
        total: torch.Tensor = self._reduced(part**order, "sum") ** (1 / order)
        return total

    def _reduced(self, value: torch.Tensor, op: str) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        placements = [Partial(op) if is_cut else Replicate() for is_cut in self.is_cut]
        whole: Any = DTensor.from_local(value, self.mesh, placements, run_check=False)
        reduced: torch.Tensor = whole.full_tensor()
        return reduced


# Plain parameters that are parts of sharded ones (see paceline.localized); an entry ends with its parameter.
localized: MutableMapping[torch.Tensor, Any] = WeakIdKeyDictionary()


def _behind(tensor: torch.Tensor) -> Any:
    """Return the sharded parameter that a tensor is, or is a part of; None, if it is all there is."""
    owner = owner_of(tensor)
    return owner if is_dtensor(owner) else localized.get(owner)


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the mesh that a tensor is sharded over, or copied; None, if it is on no mesh."""
    found = _behind(tensor)
    return None if found is None else found.device_mesh


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """Tell how a tensor is spread over other ranks; None, if this rank has all of it."""
    owner = _behind(tensor)
    if owner is None or all(placement.is_replicate() for placement in owner.placements):
        return None
    return Spread(owner.device_mesh, tuple(not placement.is_replicate() for placement in owner.placements))


def count_sharded(tensors: Iterable[torch.Tensor]) -> str:
    """Say how many of some tensors are sharded, and over which dimensions of a mesh; nothing, if none is."""
    sharded: list[Any] = [tensor for tensor in tensors if is_dtensor(tensor)]
    names = dict.fromkeys(name for tensor in sharded for name in _dimensions(tensor))
    return f"{len(sharded)} of them sharded over {', '.join(names)}" if sharded else ""


def describe(tensor: torch.Tensor) -> str:
    """Say how a tensor is sharded, and which part is here: alike on ranks that hold the same part."""
    if not is_dtensor(tensor):
        return ""
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    place = ",".join(map(str, mesh.get_coordinate() or ()))
    return f", {_where(tensor)}, part {place} of {'x'.join(map(str, mesh.shape))}"


def check_sharding(
    tensors: Sequence[tuple[str, torch.Tensor]], ranks_of: Callable[[], Sequence[int]], *, is_chosen: bool
) -> None:
    """Refuse DTensors whose parts would be averaged with each other, and those that are partial.

    ``ranks_of`` returns the data-parallel ranks; ``is_chosen`` says that somebody has named them.
    """
    named = [(name, tensor) for name, tensor in tensors if is_dtensor(tensor)]
    partial = [f"{name} ({_where(t)})" for name, t in named if any(p.is_partial() for p in t.placements)]  # type: ignore[attr-defined]
    if partial:
        raise ValueError(
            f"{name_some(partial)} hold a sum that was never made; redistribute them to Replicate() or "
            "Shard() first"
        )
    ranks = ranks_of() if named else ()
    if len(ranks) < 2:
        return
    shared = [(name, t) for name, t in named if len(set(ranks).intersection(_ranks_of(t))) > 1]
    if not shared:
        return
    names = name_some([f"{name} ({_where(t)})" for name, t in shared])
    theirs = name_ranks(sorted(set(ranks).intersection(_ranks_of(shared[0][1]))))
    if not is_chosen:
        raise ValueError(
            f"these parameters are sharded, and their parts cannot be averaged with each other: {names}. Say "
            "over which dimension of the mesh the module is data-parallel, as in "
            'replicate(module, mesh=mesh["dp"])'
        )
    raise ValueError(
        f"these parameters are spread over ranks that they would be averaged over ({theirs}): {names}. "
        "Shard a module over the other dimensions of the mesh only, as "
        'parallelize_module(module, mesh["tp"]) does, and give the data-parallel one: mesh=mesh["dp"]'
    )


def _ranks_of(tensor: Any) -> list[int]:
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def _where(tensor: Any) -> str:
    """Say how a DTensor is placed, and over which dimensions."""
    placed = zip(tensor.placements, _dimensions(tensor), strict=True)
    return ", ".join(f"{_word(placement)} over {name}" for placement, name in placed)


def _dimensions(tensor: Any) -> Sequence[str]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or [f"dimension {number}" for number in range(mesh.ndim)]


def _word(placement: Any) -> str:
    if placement.is_partial():
        return f"Partial({placement.reduce_op})"
    dim = getattr(placement, "dim", None)
    return "Replicate()" if dim is None else f"Shard({dim})"
