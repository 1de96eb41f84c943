"""Hooks that take several collectives, each started from the result of the one before.

A collective must never be started from a callback: callbacks run in another order on each rank. So such a
hook is written as a generator, and the engine advances the generators of all buckets in plan order, once
every rank has sent everything.
"""

from collections.abc import Generator

import torch

from paceline.comm import Pending

# Yields a collective that it has started, is sent the tensor that came of it, returns the bucket's contents.
Stages = Generator[Pending, torch.Tensor, torch.Tensor]


class Staged(Pending):
    """The collectives of a generator, one after the other. The first one starts at once."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._result: torch.Tensor | None = None
        self._current = next(stages)

    def advance(self) -> bool:
        if self._result is not None:
            return False
        if self._current.advance():  # a hook inside a hook has stages of its own
            return True
        value = self._current.wait()
        with torch.no_grad():
            try:
                self._current = self._stages.send(value)
            except StopIteration as end:
                self._result = end.value
                return False
        return True

    def is_done(self) -> bool:
        return self._result is not None or self._current.is_done()

    def linger(self) -> bool:
        return self._result is not None or self._current.linger()

    def wait(self) -> torch.Tensor:
        while self.advance():
            pass
        assert self._result is not None
        return self._result
