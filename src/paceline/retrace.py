"""After a communication hook has raised on one rank: bring the ranks' collectives level again.

What a hook starts goes through the comm that it is given, so it is known what each rank has started. A rank
that has stopped short of the others starts the rest with zeros: theirs come to an end, nobody uses the sums,
and the next backward finds the group as it has to be.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm import Comm, Pending

Exchange = Callable[[bytes], Sequence[bytes]]  # tells every rank, and returns what every rank told
Started = list[str | int]  # the verb, how many elements, of which dtype and on which device, from which rank


class Retraceable(Comm):
    """A comm that notes what is started."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.rank, self.size, self.divisor = inner.rank, inner.size, inner.divisor
        self.seconds = inner.seconds
        self._started: list[Started] = []
        self._pending: list[Pending] = []
        self._is_whole = True  # nothing was started that was not noted

    def mean_factor(self, device: torch.device) -> float:
        return self._inner.mean_factor(device)

    def total(self, flat: torch.Tensor) -> Pending:
        return self._note("total", flat, self._inner.total(flat))

    def average(self, flat: torch.Tensor) -> Pending:
        return self._note("average", flat, self._inner.average(flat))

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return self._note("broadcast", flat, self._inner.broadcast(flat, source), source)

    def gather(self, flat: torch.Tensor) -> Pending:
        return self._note("gather", flat, self._inner.gather(flat))

    def exchange(self, flat: torch.Tensor) -> Pending:
        return self._note("exchange", flat, self._inner.exchange(flat))

    def split(self, size: int) -> Comm:
        self._is_whole = False
        return self._inner.split(size)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        self._is_whole = False
        return self._inner.gather_bytes(payload)

    def started_on(self) -> int:
        return self._inner.started_on()

    def _note(self, verb: str, flat: torch.Tensor, pending: Pending, source: int = 0) -> Pending:
        dtype = str(flat.dtype).removeprefix("torch.")
        self._started.append([verb, flat.numel(), dtype, flat.device.type, source])
        self._pending.append(pending)
        return pending

    def catch_up(self, exchange: Exchange) -> bool:
        """Start what other ranks have started and this one has not; tell whether all ranks are level then.

        Every rank calls this at the same point.
        """
        mine = self._started if self._is_whole else None
        everyone = [json.loads(frame) for frame in exchange(json.dumps(mine).encode())]
        if None in everyone:
            return False
        longest: list[Started] = max(everyone, key=len)
        if any(longest[: len(each)] != each for each in everyone):
            return False
        for started in longest[len(self._started) :]:
            self._repeat(*started)
        for pending in self._pending:
            pending.wait()
        # Whatever a hook has started in another way shows here.
        return len(set(exchange(b"%d" % self.started_on()))) == 1

    def _repeat(self, verb: Any, numel: Any, dtype: Any, device: Any, source: Any) -> None:
        flat = torch.zeros(numel, dtype=getattr(torch, dtype), device=device)
        if verb == "broadcast":
            self.broadcast(flat, source)
        else:
            getattr(self, verb)(flat)
