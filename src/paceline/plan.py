"""Where each gradient travels: parameters -> buckets -> slots.

    parameters (registration order)     a  b  c  d  e  f
    expected arrival (reversed)         f  e  d  c  b  a
    buckets, in the order they go out   [f e] [d c b] [a]
                                         │ └ slot: offset and length inside the bucket's flat buffer
                                         └ small, so that the first collective starts early

Pure: names, shapes and sizes in, buckets and slots out. No process group and no tensor data, so that eager,
compiled and simulated runs, and every rank, work from the same plan.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch

MIB = 1024 * 1024
FEW_NBYTES = 4 * MIB  # of gradients altogether: not worth to be cut
SMALL_NBYTES = 16 * 1024  # gradients below are cheaper to copy together than one by one


@dataclass(frozen=True)
class Spec:
    """What the plan knows of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Caps:
    """How large buckets may get, in bytes: the first ones in order, the last one for all the rest.

    A parameter larger than the cap still travels, in a bucket of its own. Gradients of one device and dtype
    that are no more than ``together`` bytes travel as one bucket, whatever the caps.
    """

    nbytes: tuple[int, ...] = (1 * MIB, 25 * MIB)
    together: int = 0
    is_first_free: bool = field(default=False, compare=False)  # nobody has asked for a first size

    def __post_init__(self) -> None:
        if not self.nbytes or any(cap <= 0 for cap in self.nbytes):
            raise ValueError(f"bucket caps have to be positive, got {list(self.nbytes)} bytes")

    @classmethod
    def of_mib(cls, sizes: Iterable[float]) -> "Caps":
        """Take caps in MiB, as users write them; anything positive is at least one byte."""
        sizes = list(sizes)
        bad = [size for size in sizes if not size > 0]
        if bad or not sizes:
            raise ValueError(f"bucket sizes are in MiB and have to be greater than 0, got {bad or sizes}")
        return cls(tuple(max(1, int(min(size, 2**40) * MIB)) for size in sizes))

    @classmethod
    def of_sizes(cls, rest: float | Sequence[float], first: float | None = None) -> "Caps":
        """Take one size in MiB, or a list of them; the first bucket's is 1 at most if it is not said."""
        if isinstance(rest, int | float):
            caps = cls.of_mib([min(1, rest) if first is None else first, rest])
            return replace(caps, is_first_free=first is None)
        return cls.of_mib(rest if first is None else [first, *rest])

    def among(self, *, is_local: bool) -> "Caps":
        """Return caps for ranks that share a machine, where a message costs more than it can hide, or not."""
        together = min(FEW_NBYTES, self.nbytes[-1]) if is_local and self.is_first_free else 0
        return replace(self, together=together)

    def __getitem__(self, index: int) -> int:
        return self.nbytes[min(index, len(self.nbytes) - 1)]


NO_CAP = Caps((2**63,))


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket. ``parameter`` indexes the registration order."""

    parameter: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Run:
    """Neighbouring slots of one shape: views of all of them come from one operation."""

    count: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @cached_property
    def block(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The shape, strides and offset of all slots together, as ``as_strided`` takes them."""
        if self.count == 1:
            return self.shape, self.strides, self.offset
        return (self.count, *self.shape), (math.prod(self.shape), *self.strides), self.offset


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel as one flat buffer: one device, one dtype."""

    index: int
    device: torch.device
    dtype: torch.dtype
    slots: tuple[Slot, ...]

    @cached_property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Wishes:
    """Parameters that travel in a way of their own, by their place in the registration order.

    ``delayed`` ones go last, in one bucket whatever its size. ``sparse`` ones have no slot: their rows are
    gathered when everything else is out.
    """

    delayed: frozenset[int] = frozenset()
    sparse: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which every rank sends them."""

    specs: tuple[Spec, ...]
    buckets: tuple[Bucket, ...]
    caps: Caps = field(default_factory=Caps)
    wishes: Wishes = field(default_factory=Wishes)
    sparse: tuple[int, ...] = ()  # the trained parameters without a slot
    basis: tuple[int, ...] = ()  # the order that it was made from

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The parameters in the order in which the plan expects their gradients."""
        return tuple(slot.parameter for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Every parameter whose gradient travels, with a slot or without."""
        return (*self.order, *self.sparse)

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that are equal exactly when two ranks would send the same buckets."""
        text = "|".join(self.lines())
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def lines(self) -> Iterator[str]:
        """Write the plan down, a line for each bucket and slot."""
        for bucket in self.buckets:
            # The device's index may differ between ranks (cuda:0 here, cuda:1 there); its type may not.
            yield f"bucket {bucket.device.type} {bucket.dtype}"
            for slot in bucket.slots:
                spec = self.specs[slot.parameter]
                yield f"{spec.name} {spec.shape} {spec.strides} {slot.offset}"
        for parameter in self.sparse:
            yield f"{self.specs[parameter].name} sparse"

    def runs(self, bucket: Bucket) -> list[Run]:
        """Group the slots of a bucket into runs of equal shape and strides."""
        forms = [(_form(self.specs[slot.parameter]), slot.offset) for slot in bucket.slots]
        groups = [list(group) for _, group in groupby(forms, key=lambda item: item[0])]
        return [Run(len(group), group[0][1], *group[0][0]) for group in groups]

    def reordered(self, arrival: Sequence[int]) -> "Plan":
        """Plan the same parameters again, by the order in which their gradients were seen to arrive.

        Parameters that did not arrive go last, so that they hold up nobody.
        """
        planned = set(self.members)
        seen = dict.fromkeys(index for index in arrival if index in planned)
        return self._again([*seen, *(index for index in self.members if index not in seen)])

    def with_late(self, misses: Mapping[int, float], threshold: float = 0.5) -> "Plan":
        """Move the parameters that missed more than ``threshold`` of the backwards to the end."""
        late = {index for index, share in misses.items() if share > threshold}
        if not late:
            return self
        on_time = [index for index in self.basis if index not in late]
        return self._again([*on_time, *(index for index in self.basis if index in late)])

    def with_sparse(self, found: Iterable[int]) -> "Plan":
        """Take the slots away from parameters whose gradients were found to be sparse."""
        wishes = replace(self.wishes, sparse=self.wishes.sparse | set(found))
        return plan_buckets(self.specs, self.caps, order=self.basis, wishes=wishes)

    def _again(self, order: Sequence[int]) -> "Plan":
        return plan_buckets(self.specs, self.caps, order=order, wishes=self.wishes)

    def describe(self) -> str:
        """Draw the plan as a table."""
        rows = ["bucket  device  dtype            MiB  parameters"]
        for bucket in self.buckets:
            names = [self.specs[slot.parameter].name for slot in bucket.slots]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            dtype = str(bucket.dtype).removeprefix("torch.")
            size = bucket.nbytes / MIB
            rows.append(f"{bucket.index:>6}  {bucket.device.type:<6}  {dtype:<12}  {size:>6.2f}  {shown}")
        rows += [f"sparse  gathered by rows                  {self.specs[p].name}" for p in self.sparse]
        return "\n".join(rows)


def plan_buckets(
    specs: Sequence[Spec],
    caps: Caps | None = None,
    *,
    order: Sequence[int] | None = None,
    wishes: Wishes | None = None,
) -> Plan:
    """Cut parameters into buckets, in ``order`` (default: last registered first, as backward reaches them).

    Only one device and one dtype share a bucket. A bucket is closed before it would outgrow its cap.
    Parameters that ``order`` does not name, frozen ones, get no slot.
    """
    caps, wishes = caps or Caps(), wishes or Wishes()
    order = range(len(specs))[::-1] if order is None else order
    if len(set(order)) != len(order) or not set(order) <= set(range(len(specs))):
        raise ValueError(
            f"order has to name parameters 0 to {len(specs) - 1} at most once, got {list(order)[:20]}"
        )
    sparse = tuple(index for index in order if index in wishes.sparse)
    delayed = [index for index in order if index in wishes.delayed - wishes.sparse]
    usual = [index for index in order if index not in wishes.delayed | wishes.sparse]
    # Buckets go out in the order in which they are expected to be complete.
    groups = sorted(_cut(specs, caps, usual), key=lambda group: group[-1][0])
    groups += _cut(specs, NO_CAP, delayed)
    buckets = tuple(_bucket(i, specs, [p for _, p in group]) for i, group in enumerate(groups))
    return Plan(tuple(specs), buckets, caps, wishes, sparse, tuple(order))


def _cut(specs: Sequence[Spec], caps: Caps, order: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield groups of (position in the order, parameter), each to become a bucket."""
    open_groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, int]]] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}
    whole: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for parameter in order:
        whole[specs[parameter].device, specs[parameter].dtype] += specs[parameter].nbytes
    closed: dict[tuple[torch.device, torch.dtype], int] = {}
    for position, parameter in enumerate(order):
        spec = specs[parameter]
        kind = (spec.device, spec.dtype)
        group = open_groups.setdefault(kind, [])
        cap = max(caps[closed.get(kind, 0)], caps.together if whole[kind] <= caps.together else 0)
        if group and filled[kind] + spec.nbytes > cap:
            yield group
            closed[kind] = closed.get(kind, 0) + 1
            group = open_groups[kind] = []
        group.append((position, parameter))
        filled[kind] = spec.nbytes + (filled[kind] if len(group) > 1 else 0)
    yield from open_groups.values()


def _bucket(index: int, specs: Sequence[Spec], parameters: Sequence[int]) -> Bucket:
    """Lay slots end to end: equal shapes side by side, and on a CPU the small ones behind the large ones."""
    shapes = {shape: i for i, shape in enumerate(dict.fromkeys(_form(specs[p]) for p in parameters))}
    small = SMALL_NBYTES if specs[parameters[0]].device.type == "cpu" else 0
    parameters = sorted(parameters, key=lambda p: (specs[p].nbytes < small, shapes[_form(specs[p])]))
    ends = [0, *accumulate(specs[parameter].numel for parameter in parameters)]
    slots = (Slot(p, start, end - start) for p, (start, end) in zip(parameters, pairwise(ends), strict=True))
    first = specs[parameters[0]]
    return Bucket(index, first.device, first.dtype, tuple(slots))


def _form(spec: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return spec.shape, spec.strides
