"""How the gradients of one bucket become one flat tensor, and views of it afterwards.

    GPU          when the bucket is full: one call copies all gradients, one call makes all views
    CPU          a large gradient is copied when it arrives, while it is in the cache, and freed at once; the
                 small ones follow together when the bucket is full
    gradients that still are views of the last flat tensor: nothing is copied at all

What autograd hands out is always copied, never reduced in place: two parameters' gradients may be one memory.

While a gradient is in a packet or on its way, the parameter's ``.grad`` is its view already, so that what was
copied is freed; or it is hidden (None), if autograd may come back to the parameter.
"""

import functools
import weakref
from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_, is_not
from types import NoneType

import torch

from paceline.memory import Pages
from paceline.plan import SMALL_NBYTES, Bucket, Plan, Run
from paceline.torch_private import flatten, flatten_crowd, is_held, unflatten

# Up to here a new flat tensor for small gradients is cheap: the allocator does not give such sizes back at
# once.
MODEST_NBYTES = 4 * 1024 * 1024
# On a GPU torch.cat() launches a kernel for so many.
CAT_TENSORS = 128
# From here on, on average, to view a run of slots and then its parts pays.
RUN_LENGTH = 4


STRIDED = torch.strided
CAT, MUL = torch.cat, torch.mul


# Every gradient of every step is asked: not in Python.
_VERSION = attrgetter("_version")
_GRADIENT = attrgetter("grad")
_IS_THERE = functools.partial(is_not, None)


class SparseGradient(Exception):
    """A gradient that cannot lie in a bucket: it has to travel by itself."""


# Flat tensors that gradients are views of, by their ids: these share memory, and yet nobody else's is in it.
_handed_out: "weakref.WeakValueDictionary[int, torch.Tensor]" = weakref.WeakValueDictionary()


def _is_held(parameter: torch.Tensor, base: torch.Tensor | None) -> bool:
    """Tell whether somebody else holds a gradient, which is a view of ``base``. The caller has it once."""
    # Without a base it is autograd's own, whatever else autograd may have put into the same memory.
    return is_held(parameter, in_own_memory=base is not None and _handed_out.get(id(base)) is not base)


def _about(gradient: torch.Tensor | None) -> tuple[torch.layout, int, torch.Tensor | None]:
    assert gradient is not None
    return gradient.layout, gradient._version, gradient._base


class Shelf:
    """A bucket of the plan, laid over the real parameters."""

    def __init__(self, plan: Plan, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> None:
        self.bucket = bucket
        self.indices = [slot.parameter for slot in bucket.slots]
        self.parameters = [parameters[index] for index in self.indices]
        self.names = [plan.specs[index].name for index in self.indices]
        self.on_cpu = bucket.device.type == "cpu"
        # On a CPU the plan puts the small slots of a bucket behind the large ones.
        small = SMALL_NBYTES if self.on_cpu else 0
        self.large = sum(slot.numel * bucket.dtype.itemsize >= small for slot in bucket.slots)
        self.large_numel = sum(slot.numel for slot in bucket.slots[: self.large])
        self.is_plain = all(parameter.is_contiguous() for parameter in self.parameters)
        self._runs = plan.runs(bucket)
        self._few_runs = len(self._runs) * RUN_LENGTH <= len(self.indices)
        self._is_flat = self.is_plain and all(parameter.dim() == 1 for parameter in self.parameters)
        self._is_crowded = (
            bucket.device.type == "cuda"
            and len(self.parameters) > CAT_TENSORS
            and all(parameter.dim() and parameter.numel() for parameter in self.parameters)
        )
        specs = [plan.specs[index] for index in self.indices]
        self._places = [
            (s.shape, s.strides, slot.offset) for s, slot in zip(specs, bucket.slots, strict=True)
        ]
        self._pages = Pages()
        self._dtype = bucket.dtype
        self._last_flat: weakref.ref[torch.Tensor] | None = None

    def is_hot(self, position: int) -> bool:
        """Tell whether a gradient is copied as soon as it arrives."""
        return self.on_cpu and position < self.large

    def views(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """View the flat tensor as gradients, in the parameters' own strides."""
        if self._few_runs:
            return [view for run in self._runs for view in _views_of(run, flat)]
        if self.is_plain:
            return unflatten(flat, self.parameters)
        return [flat.as_strided(*place) for place in self._places]

    def empty(self) -> torch.Tensor:
        """Return a flat tensor for the bucket, to be filled."""
        if self.on_cpu:
            return self._pages.empty(self.bucket.numel, self.bucket.dtype)
        device = self.parameters[0].device
        return torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=device)

    def remember(self, flat: torch.Tensor) -> None:
        """Keep a weak eye on the flat tensor that the gradients are views of; zero_grad() frees it."""
        self._last_flat = weakref.ref(flat)
        _handed_out[id(flat)] = flat

    @property
    def last_flat(self) -> torch.Tensor | None:
        """The flat tensor that was handed out last, as long as a gradient is its view."""
        return None if self._last_flat is None else self._last_flat()

    def resident(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the last flat tensor if all gradients still are its views: they were added to in place."""
        flat = self.last_flat
        if flat is None:
            return None
        return flat if all(self._lies_in(flat, i, g) for i, g in enumerate(gradients)) else None

    def is_resident(self, position: int, gradient: torch.Tensor) -> bool:
        """Tell whether one gradient still is a view of the last flat tensor."""
        flat = self.last_flat
        return flat is not None and self._lies_in(flat, position, gradient)

    def _lies_in(self, flat: torch.Tensor, position: int, gradient: torch.Tensor | None) -> bool:
        _, strides, offset = self._places[position]
        return (
            gradient is not None
            and gradient.data_ptr() == flat.data_ptr() + offset * flat.element_size()
            and gradient.stride() == strides
        )

    def fits(self, gradient: torch.Tensor) -> bool:
        """Tell whether a gradient is what the plan expects: dense, of the right dtype, in no graph."""
        return gradient.dtype is self._dtype and gradient.layout is STRIDED and not gradient.requires_grad

    def flatten(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Copy contiguous gradients behind each other into a new flat tensor."""
        try:
            if self._is_crowded and not torch.cuda.is_current_stream_capturing():
                flat = flatten_crowd(gradients)
            else:
                flat = torch.cat(gradients) if self._is_flat else flatten(gradients)
        except RuntimeError:
            self.check(gradients)
            raise
        if flat.dtype is not self.bucket.dtype:
            self.check(gradients)
        return flat

    def check(self, gradients: Sequence[torch.Tensor | None], start: int = 0) -> None:
        """Refuse, by name, gradients that cannot be in this bucket."""
        dtype = self.bucket.dtype
        for position, gradient in enumerate(gradients, start):
            if gradient is None or (gradient.dtype is dtype and gradient.layout is torch.strided):
                continue
            if gradient.layout is not torch.strided:
                raise SparseGradient
            raise TypeError(
                f"{self.names[position]} has a {gradient.dtype} gradient, but was {dtype} when it was "
                "replicated. Cast or move a model before replicate(), or detach() and replicate it again"
            )


def _views_of(run: Run, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """View a run's part of a flat tensor as its slots."""
    block = flat.as_strided(*run.block)
    return (block,) if run.count == 1 else block.unbind()


# So often at least, a gradient's arrival is an occasion to see what can be sent.
LISTEN_EVERY = 32
NOWHERE = (-1, None)
APART = (-2, None)  # sparse: it has no slot
NOTED = (-3, -3)  # it has to be known that it has come, and no more
Expected = tuple[int, int]  # a bucket, and a position there


@dataclass(frozen=True)
class Parcel:
    """What goes into one bucket: positions there, and which of the gradients that came together."""

    place: int
    positions: list[int]
    numbers: list[int]


class Layout:
    """A plan laid over the real parameters. ``is_learned``: it follows the order in which gradients come."""

    def __init__(self, plan: Plan, parameters: Sequence[torch.Tensor], *, is_learned: bool = False) -> None:
        self.plan = plan
        self.parameters = parameters
        self.shelves = [Shelf(plan, bucket, parameters) for bucket in plan.buckets]
        self.is_on_gpu = not all(shelf.on_cpu for shelf in self.shelves)
        self.counts = [len(shelf.indices) for shelf in self.shelves]
        # For each parameter: its bucket, and its position there if it is to be copied as soon as it arrives.
        self.route = {
            index: (place, position if shelf.is_hot(position) else None)
            for place, shelf in enumerate(self.shelves)
            for position, index in enumerate(shelf.indices)
        }
        self.route |= dict.fromkeys(plan.sparse, APART)
        self._positions = {
            index: position for shelf in self.shelves for position, index in enumerate(shelf.indices)
        }
        # By bucket, the parameters whose arrival is no occasion to send anything. Only where the order is
        # known: the last one of a bucket must not be among them.
        self.unheard_in = [self._unheard_in(shelf) if is_learned else frozenset() for shelf in self.shelves]
        self.unheard: frozenset[int] = frozenset().union(*self.unheard_in)
        # Of these, what is copied as soon as it arrives, with its place; the others are only noted.
        self.expected: dict[int, Expected] = {
            index: NOTED if self.route[index][1] is None else self.place_of(index) for index in self.unheard
        }
        self.heard_counts = [
            len(shelf.indices) - len(unheard)
            for shelf, unheard in zip(self.shelves, self.unheard_in, strict=True)
        ]
        self._parcels: dict[tuple[int, ...], list[Parcel]] = {}

    def _unheard_in(self, shelf: Shelf) -> frozenset[int]:
        arrival = {index: number for number, index in enumerate(self.plan.basis)}
        expected = sorted(shelf.indices, key=lambda index: arrival[index])
        heard = {expected[-1], *expected[::LISTEN_EVERY]}
        return frozenset(i for i in expected if i not in heard)

    def places_of(self, indices: tuple[int, ...]) -> Sequence[Parcel]:
        """Sort parameters that always come together by their buckets."""
        found = self._parcels.get(indices)
        if found is None:
            places: dict[int, Parcel] = {}
            for number, index in enumerate(indices):
                place, position = self.place_of(index)
                parcel = places.setdefault(place, Parcel(place, [], []))
                parcel.positions.append(position)
                parcel.numbers.append(number)
            found = self._parcels[indices] = list(places.values())
        return found

    def place_of(self, index: int) -> tuple[int, int]:
        """Return a parameter's bucket, and its position there."""
        return self.route[index][0], self._positions[index]


class Packet:
    """A bucket in one backward, until it goes out: this rank's gradients times ``scale``."""

    def __init__(self, shelf: Shelf, scale: float) -> None:
        self.shelf = shelf
        self.scale = scale
        self._dtype = shelf.bucket.dtype
        self._parameters = shelf.parameters
        self._adds_to_last = shelf.last_flat is not None  # zero_grad() has not freed what was handed out
        self._taken: set[int] = set()
        self._is_patchy = False  # some of the small ones have been taken, too
        # By position, gradients that somebody else holds, too: they stay ``.grad``.
        self.kept: dict[int, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        self.views: Sequence[torch.Tensor] = ()
        self.is_out_of_hand = False  # every gradient is a view of the flat tensor

    @property
    def flat(self) -> torch.Tensor:
        """The flat tensor, once there is one."""
        assert self._flat is not None
        return self._flat

    def take(self, position: int) -> None:
        """Copy a large gradient that has just arrived, and free it. Called by autograd's thread.

        The gradient has just been through the caches, and what Python does for it is not in them any more:
        each name that is looked up here is felt.
        """
        parameter = self._parameters[position]
        gradient = parameter.grad
        # One that is new, and nobody else's.
        if (
            gradient is None
            or gradient._version
            or gradient.dtype is not self._dtype
            or gradient.layout is not STRIDED
        ):
            self.take_odd(position, hide=False)
            return
        view = (self.views or self._start())[position]
        if self.scale == 1:  # what _put() does, without its frame
            CAT((gradient,), out=view)
        else:
            MUL(gradient, self._factor, out=view)
        self._taken.add(position)
        parameter.grad = view

    def take_odd(self, position: int, *, hide: bool) -> None:
        """Do the same for any gradient. With ``hide`` autograd may come back to the parameter."""
        shelf, taken = self.shelf, self._taken
        parameter = shelf.parameters[position]
        gradient = parameter.grad
        if gradient is None:
            return
        if position in taken:
            view = self.views[position]
            if gradient is not view:
                view.add_(gradient.detach(), alpha=self.scale)
        # What does not fit stays where it is until the bucket is full.
        elif not shelf.fits(gradient) or (self._adds_to_last and shelf.is_resident(position, gradient)):
            return
        else:
            view = (self.views or self._start())[position]
            if gradient._version and _is_held(parameter, gradient._base):
                self.kept[position] = gradient
            self._put(view, gradient)
            taken.add(position)
        parameter.grad = None if hide else view

    @property
    def _is_full(self) -> bool:
        """Whether every gradient has been taken."""
        return len(self._taken) == len(self.shelf.indices)

    def take_given(self, positions: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Copy gradients that no parameter has: they come out of the middle of a compiled backward."""
        if self._flat is None:
            self._start()
        self._put_together(positions, gradients)
        self._taken.update(positions)
        self._is_patchy = True

    def holds(self, position: int) -> bool:
        """Tell whether a gradient has been taken."""
        return position in self._taken

    def put_views(self, seen: Container[int], *, hide: bool) -> None:
        """Replace the gradients of this backward by views, so that what was copied is freed."""
        shelf = self.shelf
        self.is_out_of_hand = not (hide or self.kept) and all(map(seen.__contains__, shelf.indices))
        if self.is_out_of_hand:
            # What was taken is there already, if nobody has put anything else there.
            if self._is_full and all(map(is_, map(_GRADIENT, shelf.parameters), self.views)):
                return
            for parameter, view in zip(shelf.parameters, self.views, strict=True):
                parameter.grad = view
            return
        for index, parameter, view in zip(shelf.indices, shelf.parameters, self.views, strict=True):
            if index in seen:
                parameter.grad = None if hide else view

    def hide(self) -> None:
        """Empty ``.grad`` where it is a view of this packet."""
        for position, view in enumerate(self.views):
            parameter = self.shelf.parameters[position]
            if parameter.grad is view:
                parameter.grad = None

    def fill(self, *, in_place: bool) -> list[int]:
        """Take all gradients that are still outside, with zeros for those that do not exist.

        With ``in_place`` nothing is copied where that is possible. Returns the positions without a gradient.
        """
        if self._is_full:
            return []
        gradients = [parameter.grad for parameter in self.shelf.parameters]
        for position in self._taken:
            gradients[position] = None
        missing: list[int] = []
        if NoneType in map(type, gradients):
            missing = [i for i, g in enumerate(gradients) if g is None and i not in self._taken]
        if in_place and not missing and not self._taken and self._adopt(gradients):
            return missing
        self._keep(gradients)
        if self._is_patchy:
            self._copy_rest(gradients, missing)
        elif self.shelf.on_cpu:
            self._copy_on_cpu(gradients, missing)
        else:
            self._copy_at_once(gradients, missing)
        return missing

    def _keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which gradients autograd has added to while somebody else holds them: a list of the user's, or
        one flat tensor for all. What was there before is what autograd has written in place.
        """
        if not any(map(_VERSION, filter(_IS_THERE, gradients))):
            return
        for position in [p for p, gradient in enumerate(gradients) if gradient is not None]:
            parameter, (layout, version, base) = self.shelf.parameters[position], _about(gradients[position])
            if version and layout is STRIDED and _is_held(parameter, base):
                self.kept[position] = gradients[position]  # type: ignore[assignment] # it is there

    def write_kept(self, views: Sequence[torch.Tensor], untouched: Container[int]) -> None:
        """Give those gradients what was reduced, but for parameters that no rank has used."""
        indices, parameters = self.shelf.indices, self.shelf.parameters
        kept = {p: gradient for p, gradient in self.kept.items() if indices[p] not in untouched}
        if not kept:
            return
        with torch.no_grad():
            values = [views[position] for position in kept]
            torch._foreach_copy_([gradient.detach() for gradient in kept.values()], values)
        for position, gradient in kept.items():
            parameters[position].grad = gradient

    def set_aside_sparse(self) -> dict[int, torch.Tensor]:
        """Take the sparse gradients out, by position; their slots are empty then."""
        found = {
            position: parameter.grad
            for position, parameter in enumerate(self.shelf.parameters)
            if parameter.grad is not None and parameter.grad.layout is not torch.strided
        }
        for position in found:
            self.shelf.parameters[position].grad = None
        return found

    def drop(self) -> None:
        """Let go of the memory: nobody is going to ask for these gradients again."""
        self._flat, self.views = None, ()

    def fill_with_zeros(self) -> None:
        """Make an empty bucket, which keeps the other ranks' collectives matched."""
        self._flat = self.shelf.empty().zero_()
        self.views = self.shelf.views(self._flat)

    def _adopt(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Go without a copy, if the gradients are one flat tensor already."""
        flat = self.shelf.resident(gradients)
        if flat is None:
            return False
        self._flat = flat if self.scale == 1 else flat.mul_(self.scale)
        self.views = [gradient for gradient in gradients if gradient is not None]
        return True

    def _copy_at_once(self, gradients: list[torch.Tensor | None], missing: Sequence[int]) -> None:
        """Copy by one operator for the whole bucket, and scale by another where that is needed."""
        shelf = self.shelf
        if shelf.is_plain and len(gradients) > 1:  # of one tensor, flatten makes no copy but a view
            pairs = zip(gradients, shelf.parameters, strict=True)
            dense = [torch.zeros_like(p) if g is None else g for g, p in pairs] if missing else gradients
            self._flat = shelf.flatten(dense)  # type: ignore[arg-type] # nothing is missing
            self.views = shelf.views(self._flat)
        else:
            self._start()
            self._copy_from(0, gradients)
        if self.scale != 1:
            self.flat.mul_(self.scale)

    def _copy_on_cpu(self, gradients: list[torch.Tensor | None], missing: Sequence[int]) -> None:
        """Copy the large ones that were not taken one by one, and the small ones together."""
        shelf, large = self.shelf, self.shelf.large
        if not large and shelf.is_plain and not missing and shelf.bucket.nbytes < MODEST_NBYTES:
            self._copy_at_once(gradients, missing)
            return
        if self._flat is None:
            self._start()
        for position, gradient in enumerate(gradients[:large]):
            if gradient is not None:
                shelf.check([gradient], position)
                self._put(self.views[position], gradient)
        for position in missing:
            if position < large:
                self.views[position].zero_()
        if large < len(gradients):
            self._copy_from(large, gradients[large:])
            if self.scale != 1:
                self.flat[shelf.large_numel :].mul_(self.scale)

    def _copy_rest(self, gradients: Sequence[torch.Tensor | None], missing: Sequence[int]) -> None:
        """Copy what was not taken, with zeros for what does not exist."""
        for position in missing:
            self.views[position].zero_()
        self.shelf.check(gradients)
        given = [(position, gradient) for position, gradient in enumerate(gradients) if gradient is not None]
        if given:
            self._put_together(*zip(*given, strict=True))

    def _copy_from(self, start: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients from one position on, by one operator."""
        self.shelf.check(gradients, start)
        given = []
        for view, gradient in zip(self.views[start:], gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                given.append((view, gradient))
        if given:
            torch._foreach_copy_([view for view, _ in given], [gradient for _, gradient in given])

    def _start(self) -> Sequence[torch.Tensor]:
        self._flat = self.shelf.empty()
        self.views = self.shelf.views(self._flat)
        return self.views

    def _put_together(self, positions: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Copy some gradients, the small ones by one operator."""
        views, small = [], []
        for position, gradient in zip(positions, gradients, strict=True):
            if self.shelf.is_hot(position):
                self._put(self.views[position], gradient)
            else:
                views.append(self.views[position])
                small.append(gradient)
        if views:
            torch._foreach_copy_(views, small)
            if self.scale != 1:
                torch._foreach_mul_(views, self.scale)

    def _put(self, view: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.scale == 1:
            torch.cat((gradient,), out=view)  # as memcpy: quicker than copy_() into a cold slot
        else:
            torch.mul(gradient, self._factor, out=view)

    @functools.cached_property
    def _factor(self) -> torch.Tensor | float:
        """The scale as an operator takes it at the least cost: of a number it makes a tensor each time.

        In 16 bits that tensor would lose digits.
        """
        dtype = self.shelf.bucket.dtype
        is_exact = dtype is torch.float32 or dtype is torch.float64
        return torch.tensor(self.scale, dtype=dtype, device="cpu") if is_exact else self.scale
