"""Collectives and frames among threads of one process: what a rehearsal has in place of a process group.

A rank that starts a collective leaves a copy of its tensor and goes on. Whoever waits for it takes the copies
of all ranks and adds them up in the order of the ranks, so that all get the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.comm import Comm, Pending
from paceline.control import Control
from paceline.errors import RanksDisagree
from paceline.hub import Hub, Wait

Tensors = Sequence[torch.Tensor]


class Call:
    """One collective, while ranks come to it. ``given`` has what each rank has left there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kinds: dict[int, str] = {}
        self.given: dict[int, Any] = {}


class Line:
    """What the ranks of one group share: their collectives in the order of the calls, and their frames.

    ``members`` are the group's ranks by their place in the rehearsal.
    """

    def __init__(self, hub: Hub, members: Sequence[int], label: bytes = b"rehearsal") -> None:
        self.hub = hub
        self.members = members
        self.label = label
        self._begun = [0] * len(members)
        self._calls: dict[int, Call] = {}
        self._frames: dict[bytes, list[list[bytes]]] = {}
        self._parts: dict[tuple[int, int], Line] = {}
        self._owners: dict[int, int] = {}  # of parameters, by their ids
        self._modules: list[torch.nn.Module] = []

    # ---- collectives -----------------------------------------------------------------------------

    def start(self, rank: int, kind: str, given: Any) -> Call:
        """Come to the next collective, and wait for nobody."""
        with self.hub.changed:
            number = self._begun[rank]
            self._begun[rank] += 1
            call = self._calls.setdefault(number, Call(number))
            call.kinds[rank], call.given[rank] = kind, given
            if not self._absent(call):
                del self._calls[number]
            self.hub.changed.notify_all()
        return call

    def finish(self, rank: int, call: Call, seconds: float) -> list[Any]:
        """Wait until all ranks have come, and return what they have left, by rank."""
        what = f"collective {call.number + 1} ({call.kinds[rank]})"
        self.hub.wait(Wait(self.members[rank], what, partial(self._absent, call)), seconds)
        if len(set(call.kinds.values())) > 1:
            raise _mismatch(call, self.members)
        return [call.given[each] for each in range(len(self.members))]

    def is_done(self, call: Call) -> bool:
        """Tell whether ``finish()`` would return at once, or raise."""
        absent = self._absent(call)
        return not absent or self.hub.is_vain(absent)

    def _absent(self, call: Call) -> list[int]:
        return [member for rank, member in enumerate(self.members) if rank not in call.given]

    def part(self, rank: int, size: int) -> "Line":
        """Return the line of the ``size`` neighbours that a rank is among. A new one at every call."""
        with self.hub.changed:
            number, first = self._begun[rank], rank - rank % size
            members = self.members[first : first + size]
            label = b"%b.%d.%d" % (self.label, number, first)
            return self._parts.setdefault((number, first), Line(self.hub, members, label))

    def claim(self, rank: int, module: torch.nn.Module) -> None:
        """Note whose a module is. It is kept: what it hangs into torch must not go while others train."""
        with self.hub.changed:
            for name, parameter in module.named_parameters():
                owner = self._owners.setdefault(id(parameter), rank)
                if owner != rank:
                    raise ValueError(
                        f"ranks {owner} and {rank} of a rehearsal hold one and the same parameter {name}. "
                        "Each rank needs a model of its own: build it inside the step function, or "
                        "copy.deepcopy() it there"
                    )
            self._modules.append(module)

    def release(self) -> None:
        """Keep the modules no more."""
        with self.hub.changed:
            self._owners.clear()
            self._modules.clear()

    # ---- frames ----------------------------------------------------------------------------------

    def post(self, rank: int, topic: bytes, frame: bytes) -> None:
        """Leave a frame for every rank."""
        with self.hub.changed:
            self._of(topic)[rank].append(frame)
            self.hub.changed.notify_all()

    def silent(self, topic: bytes, number: int) -> list[int]:
        """Return the members that have posted no more than ``number`` frames of a topic."""
        boxes = zip(self.members, self._of(topic), strict=True)
        return [member for member, box in boxes if len(box) <= number]

    def read(self, topic: bytes, number: int) -> list[bytes]:
        """Return every rank's frame of that number."""
        return [box[number] for box in self._of(topic)]

    def _of(self, topic: bytes) -> list[list[bytes]]:
        return self._frames.setdefault(topic, [[] for _ in self.members])


class ThreadPending(Pending):
    """A collective that waits for other threads; ``take`` makes its result of what they have left."""

    def __init__(
        self, line: Line, call: Call, take: Callable[[Tensors], torch.Tensor], rank: int, seconds: float
    ) -> None:
        self._line = line
        self._call = call
        self._rank = rank
        self._seconds = seconds
        self._take = take
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._result is None:
            with torch.no_grad():
                self._result = _settled(self._take(self._gathered()))
        return self._result

    def _gathered(self) -> Tensors:
        return self._line.finish(self._rank, self._call, self._seconds)

    def is_done(self) -> bool:
        return self._result is not None or self._line.is_done(self._call)


class ThreadComm(Comm):
    """The collectives of one thread among the threads of a line."""

    def __init__(self, line: Line, rank: int) -> None:
        self._line = line
        self._control = ThreadControl(line, rank)
        self.rank = rank
        self.size = self.divisor = len(line.members)
        self.seconds = line.hub.seconds

    def mean_factor(self, device: torch.device) -> float:
        return 1 / self.divisor

    def own_control(self) -> "ThreadControl":
        return self._control

    def claim(self, module: torch.nn.Module) -> None:
        self._line.claim(self.rank, module)

    def total(self, flat: torch.Tensor) -> Pending:
        return self._start("sum", flat, lambda given: flat.copy_(_sum(given)))

    def average(self, flat: torch.Tensor) -> Pending:
        # Divided before the sum, as over a process group, so that 16-bit sums do not overflow.
        return self.total(flat.mul_(1 / self.divisor))

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return self._start(f"broadcast from rank {source}", flat, lambda given: flat.copy_(given[source]))

    def gather(self, flat: torch.Tensor) -> Pending:
        return self._start("gather", flat, lambda given: torch.stack([each.reshape(-1) for each in given]))

    def split(self, size: int) -> Comm:
        if size < 1 or self.size % size:
            raise ValueError(f"{self.size} ranks cannot be split into groups of {size}")
        self.gather_bytes(b"")  # so that two splits one after the other have lines of their own
        return ThreadComm(self._line.part(self.rank, size), self.rank % size)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        call = self._line.start(self.rank, "exchange of messages", payload)
        return self._line.finish(self.rank, call, self.seconds)

    def _start(self, kind: str, flat: torch.Tensor, take: Callable[[Tensors], torch.Tensor]) -> Pending:
        # A copy: whoever gives a collective up may use the tensor for something else before all have come.
        given = _settled(flat.detach().clone())
        kind = f"{kind} of {flat.numel()} {str(flat.dtype).removeprefix('torch.')}"
        return ThreadPending(
            self._line, self._line.start(self.rank, kind, given), take, self.rank, self.seconds
        )


class ThreadControl(Control):
    """The frames of one thread among the threads of a line."""

    def __init__(self, line: Line, rank: int) -> None:
        super().__init__()
        self.label = line.label
        self._line = line
        self._rank = rank
        self._read: dict[bytes, int] = {}  # frames of each topic that were collected

    def post(self, topic: bytes, frame: bytes) -> None:
        self._line.post(self._rank, topic, frame)

    def ready(self, topic: bytes) -> bool:
        silent = self._line.silent(topic, self._read.get(topic, 0))
        return not silent or self._line.hub.is_vain(silent)

    def collect(self, topic: bytes, seconds: float, waiter: object = None) -> list[bytes]:
        number = self._read.get(topic, 0)
        missing = partial(self._line.silent, topic, number)
        self._line.hub.wait(Wait(self._line.members[self._rank], _words_for(topic, number), missing), seconds)
        self._read[topic] = number + 1
        return self._line.read(topic, number)


def _words_for(topic: bytes, number: int) -> str:
    """Say what a rank is in that collects a topic."""
    name, _, kind = topic.decode(errors="replace").rpartition(".")
    model = f"model {name.rpartition('#')[2]}"
    return f"backward {number + 1} of {model}" if kind == "opening" else f"{kind} of {model}"


def _mismatch(call: Call, members: Sequence[int]) -> RanksDisagree:
    where = ", ".join(f"rank {members[rank]} in a {kind}" for rank, kind in sorted(call.kinds.items()))
    return RanksDisagree(
        f"the ranks are in different collectives: {where}. Make every rank do the same things in the same "
        "order."
    )


def _sum(given: Tensors) -> torch.Tensor:
    total = given[0].clone()
    for each in given[1:]:
        total.add_(each)
    return total


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a GPU: the streams of other threads know nothing of this one's."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor
