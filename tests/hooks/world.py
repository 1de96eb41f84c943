"""Several ranks in one process: their hooks take turns, and a collective ends when all have started it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm import Comm, Pending
from paceline.hooks import GradBucket, Hook, StatefulHook

Gradients = Mapping[str, torch.Tensor]


@dataclass
class Call:
    """One rank's part in a collective."""

    kind: str
    tensor: torch.Tensor
    sent: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sent = self.tensor.clone()  # the tensor is written to when the first rank has waited


class World:
    """``size`` ranks; ``calls`` has what each of them sent, in order."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.calls: list[list[Call]] = [[] for _ in range(size)]
        self.comms = [RankComm(self, rank) for rank in range(size)]

    def nbytes(self) -> list[int]:
        """Return how much rank 0 sent in each collective."""
        return [call.sent.nbytes for call in self.calls[0]]


class RankComm(Comm):
    """One rank's view of the world."""

    seconds = 60.0

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank, self.size, self.divisor = rank, world.size, world.size

    def _start(self, kind: str, tensor: torch.Tensor, result: Callable[..., torch.Tensor]) -> Pending:
        calls = self.world.calls[self.rank]
        calls.append(Call(kind, tensor))
        return RankPending(self, len(calls) - 1, result)

    def mean_factor(self, device: torch.device) -> float:
        return 1 / self.size

    def total(self, flat: torch.Tensor) -> Pending:
        return self._start("total", flat, lambda sent: flat.copy_(sum(sent[1:], sent[0])))

    def average(self, flat: torch.Tensor) -> Pending:
        return self.total(flat.mul_(1 / self.divisor))

    def gather(self, flat: torch.Tensor) -> Pending:
        return self._start("gather", flat, torch.stack)

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return self._start("broadcast", flat, lambda sent: flat.copy_(sent[source]))

    def split(self, size: int) -> Comm:
        raise NotImplementedError

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        raise NotImplementedError


class RankPending(Pending):
    def __init__(self, comm: RankComm, place: int, result: Callable[..., torch.Tensor]) -> None:
        self._comm = comm
        self._place = place
        self._result = result

    def wait(self) -> torch.Tensor:
        calls = [of_rank[self._place] for of_rank in self._comm.world.calls]
        kinds = {(call.kind, call.sent.dtype, call.sent.shape) for call in calls}
        assert len(kinds) == 1, f"the ranks' collectives do not match: {kinds}"
        return self._result([call.sent for call in calls])


def bucket_of(gradients: Gradients, index: int = 0, *, is_last: bool = True) -> GradBucket:
    """Lay gradients end to end, each in its own strides."""
    places = []
    end = 0
    for gradient in gradients.values():
        places.append((gradient.shape, gradient.stride(), end))
        end += gradient.numel()
    first = next(iter(gradients.values()))
    flat = torch.empty(end, dtype=first.dtype, device=first.device)

    def split(flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat.as_strided(*place) for place in places]

    for view, gradient in zip(split(flat), gradients.values(), strict=True):
        view.copy_(gradient)
    return GradBucket(index, flat, list(gradients.values()), list(gradients), is_last, split)


def begin(hook: Hook) -> None:
    """Tell a hook that a backward begins, as the engine does."""
    if isinstance(hook, StatefulHook):
        hook.begin()


def reduce(
    hooks: Sequence[Hook], *buckets: Sequence[Gradients], world: World | None = None
) -> list[Gradients]:
    """Run a step: each rank's buckets through its hook. Returns each rank's gradients afterwards."""
    world = world or World(len(hooks))
    pending, sent = [], []
    for rank, (hook, comm) in enumerate(zip(hooks, world.comms, strict=True)):
        mine = [bucket_of(bucket[rank], i, is_last=bucket is buckets[-1]) for i, bucket in enumerate(buckets)]
        begin(hook)
        pending.append([hook(bucket, comm) for bucket in mine])
        sent.append(mine)
    # As the engine: in rounds, each rank's buckets in plan order.
    while sum(flight.advance() for flights in pending for flight in flights):
        pass
    results: list[Gradients] = []
    for mine, flights in zip(sent, pending, strict=True):
        result: dict[str, torch.Tensor] = {}
        for bucket, flight in zip(mine, flights, strict=True):
            flat = flight.wait().view_as(bucket.flat)
            result |= zip(bucket.names, bucket.split(flat), strict=True)
        results.append(result)
    return results


def drawn(
    seed: int, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Draw gradients of the given shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def mean_of(gradients: Sequence[Gradients]) -> dict[str, torch.Tensor]:
    """Return the exact mean over the ranks, in float64."""
    return {name: torch.stack([g[name].double() for g in gradients]).mean(dim=0) for name in gradients[0]}


def assert_equal(one: Gradients, other: Gradients) -> None:
    """See that two ranks hold the same bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
