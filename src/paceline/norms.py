"""The norm of all gradients, and clipping by it, from the buckets that the gradients are views of.

    bucket    ████████░░░██████     one norm and one multiplication for each stretch of slots whose
              a  b  c  d  e  f      gradients still lie there; d has none, so there are two stretches
    loose     a gradient that was replaced, a sparse one, one that never had a slot: by itself

So nothing is done per parameter but to look where its gradient lies. On a GPU nothing is waited for. Parts of
sharded parameters are put together over the ranks that hold the others: there, all of these have to ask.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.errors import name_some
from paceline.fused_optim import norm_gate
from paceline.guard import check_gradients
from paceline.reducer import Reducer
from paceline.sharded import Spread, owner_of, spread_of
from paceline.shelf import Shelf
from paceline.torch_private import local_of

ROW_NUMEL = 1024  # on a CPU torch adds up numbers one after the other, and loses digits in long rows

Named = tuple[str, torch.Tensor]
Pieces = dict[Spread | None, list[torch.Tensor]]


def grad_norm(named: Sequence[Named], reducers: Sequence[Reducer], norm_type: float) -> torch.Tensor:
    """Return the norm of the gradients of some parameters, seen as one vector."""
    order = _read_order(norm_type)
    _check(named, reducers, "grad_norm()")
    with torch.no_grad():
        return _norm(_pieces(named, reducers), order, _home(named))


def clip_grad_norm(
    named: Sequence[Named],
    reducers: Sequence[Reducer],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale the gradients, in place, so that their norm is at most ``max_norm``; return what it was."""
    limit, order = _read_limit(max_norm), _read_order(norm_type)
    _check(named, reducers, "clip_grad_norm_()")
    with torch.no_grad():
        pieces = _pieces(named, reducers)
        total = _norm(pieces, order, _home(named))
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise _not_finite(named, total, order)
        _scale(pieces, torch.clamp(limit / (total + 1e-6), max=1.0))
    return total


def _check(named: Sequence[Named], reducers: Sequence[Reducer], what: str) -> None:
    """Refuse gradients that only this rank has, and those that an optimizer inside backward has freed."""
    parameters = [parameter for _, parameter in named]
    for reducer in reducers:
        if reducer.wiring.consumer is not None:
            norm_gate.check(parameters)
        if held := reducer.passes.holding(parameters):
            names = [name for name, parameter in named if any(parameter is each for each in held)]
            raise ValueError(
                f"{what} looks at .grad, but these gradients are in a context of distributed autograd: "
                f"{name_some(names)}. Take their norm from torch.distributed.autograd.get_gradients()"
            )
        if reducer.wiring.comm.size > 1:
            check_gradients(reducer, what)


def _read_order(norm_type: float) -> float:
    order = float(norm_type)
    if math.isnan(order) or order == 0:
        raise ValueError(f"norm_type has to be a number other than 0, or inf, got {norm_type!r}")
    return order


def _read_limit(max_norm: float) -> float:
    limit = float(max_norm)
    if not limit >= 0:
        raise ValueError(f"max_norm has to be a number of 0 or more, got {max_norm!r}")
    return limit


# ---- where the gradients lie --------------------------------------------------------------------------


def _pieces(named: Sequence[Named], reducers: Sequence[Reducer]) -> Pieces:
    """Return as few tensors as hold every gradient once, by how they are spread over other ranks."""
    pieces: Pieces = {None: []}
    asked, covered = {id(parameter) for _, parameter in named}, set[int]()
    for shelf in [shelf for reducer in reducers for shelf in reducer.shelves]:
        for stretch, positions in _stretches(shelf):
            inside = {id(owner_of(shelf.parameters[position])) for position in positions}
            if inside <= asked:  # of a keeper's, some may be another module's
                pieces.setdefault(spread_of(shelf.parameters[positions[0]]), []).append(stretch)
                covered |= inside
    for _, parameter in named:
        gradient = parameter.grad
        if gradient is not None and id(parameter) not in covered:
            # Empty parts, too: others have theirs, and nobody is left alone with the question.
            pieces.setdefault(spread_of(parameter), []).append(local_of(gradient))
    return pieces


def _stretches(shelf: Shelf) -> Iterator[tuple[torch.Tensor, range]]:
    """Yield the parts of a bucket that gradients lie in without a gap, and the positions of their slots."""
    flat, slots = shelf.last_flat, shelf.bucket.slots
    if flat is None or not flat.numel():
        return
    gradients = [parameter.grad for parameter in shelf.parameters]
    spreads = [spread_of(parameter) for parameter in shelf.parameters]
    if len(set(spreads)) == 1 and shelf.resident(gradients) is flat:
        yield flat, range(len(slots))
        return

    def kind(position: int) -> Any:
        """Tell stretches apart; gradients that do not lie here are in none."""
        gradient = gradients[position]
        is_here = gradient is not None and shelf.is_resident(position, gradient)
        return spreads[position] if is_here else shelf

    for found, run in itertools.groupby(range(len(slots)), kind):
        positions = list(run)
        if found is not shelf:
            first, last = slots[positions[0]], slots[positions[-1]]
            yield flat[first.offset : last.offset + last.numel], range(positions[0], positions[-1] + 1)


def _home(named: Sequence[Named]) -> torch.device:
    """Return where the first gradient is."""
    return next((p.grad.device for _, p in named if p.grad is not None), torch.device("cpu"))


# ---- arithmetic ---------------------------------------------------------------------------------------


def _norm(pieces: Pieces, order: float, home: torch.device) -> torch.Tensor:
    """Put the norms of all pieces together, on one device, and over the ranks that hold the other parts."""
    norms = [
        norm if spread is None else spread.norm(norm, order)
        for spread, some in sorted(pieces.items(), key=lambda item: str(item[0]))  # alike on every rank
        if (norm := _norm_here(some, order, home)) is not None
    ]
    if not norms:
        return torch.tensor(0.0, device=home)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def _norm_here(pieces: Sequence[torch.Tensor], order: float, home: torch.device) -> torch.Tensor | None:
    """Put the norms of some pieces together, on one device; nothing, if there are none."""
    small, parts = [], []
    for piece in pieces:
        dense = piece.coalesce().values() if piece.layout is torch.sparse_coo else piece
        if dense.device.type == "cpu" and dense.numel() > ROW_NUMEL and dense.is_contiguous():
            parts += _norms_of_rows(dense.view(-1), order)
        elif dense.numel():
            small.append(dense)
    for alike in _by_kind(small):
        parts += torch._foreach_norm(alike, order, dtype=_dtype_of(alike[0]))
    if not parts:
        return torch.tensor(0.0 if order > 0 else math.inf, device=home) if pieces else None
    everything = torch.cat([part.to(home).view(-1) for part in parts])
    exact = torch.float64 if home.type in ("cpu", "cuda") else None
    total: torch.Tensor = torch.linalg.vector_norm(everything, order, dtype=exact)
    return total.to(everything.dtype)


def _norms_of_rows(flat: torch.Tensor, order: float) -> list[torch.Tensor]:
    """Return the norms of equal rows of a long tensor, by one operator, and that of what is left over."""
    whole = flat.numel() - flat.numel() % ROW_NUMEL
    dtype = _dtype_of(flat)
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, ROW_NUMEL), order, dim=1, dtype=dtype)]
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:], order, dtype=dtype))
    return norms


def _dtype_of(tensor: torch.Tensor) -> torch.dtype | None:
    """Return what to add up in, if it is not the tensor's own dtype."""
    return torch.float32 if tensor.dtype.itemsize < 4 else None


def _scale(spread: Pieces, factor: torch.Tensor) -> None:
    pieces = [piece for some in spread.values() for piece in some]
    factors = {device: factor.to(device) for device in {piece.device for piece in pieces}}
    dense = [piece for piece in pieces if piece.layout is torch.strided]
    for alike in _by_kind(dense):
        torch._foreach_mul_(alike, factors[alike[0].device])
    for piece in pieces:
        if piece.layout is not torch.strided:
            piece.mul_(factors[piece.device])


def _by_kind(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Put tensors of one device and dtype together."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def _not_finite(named: Sequence[Named], total: torch.Tensor, order: float) -> RuntimeError:
    def is_odd(gradient: torch.Tensor) -> bool:
        values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
        return not bool(values.isfinite().all())

    odd = [name for name, p in named if p.grad is not None and is_odd(local_of(p.grad))]
    large = "none of them: their norm is too large for its dtype"
    elsewhere = "none of the parts here: look at the other ranks of the mesh"
    nothing = elsewhere if any(spread_of(p) is not None for _, p in named) else large
    return RuntimeError(
        f"the norm of order {order:g} of the gradients is {total.item()}, so nothing was clipped. NaN or Inf "
        f"in: {name_some(odd) or nothing}. Drop this step with "
        "zero_grad(), or clip anyway with error_if_nonfinite=False"
    )
