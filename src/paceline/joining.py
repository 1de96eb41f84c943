"""Ranks with different numbers of batches: who has run out keeps the others company.

    rank 0   step  step  step  step  step
    rank 1   step  step  step  zeros zeros  └ takes the weights of a rank that has finished last

A rank that has left its block says so in the opening frame of each backward that the others still run, sends
zeros, and steps nothing. When all have left, every rank takes the weights of one that was there to the end.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from paceline.interrupts import interrupts
from paceline.replication import Replica, replica
from paceline.trouble import tell_all
from paceline.wiring import Joining


@contextlib.contextmanager
def join(
    *modules: nn.Module,
    divide_by: Literal["active", "initial"] = "active",
    early: Literal["continue", "stop"] = "continue",
) -> Iterator[None]:
    """Train inside although the ranks have different numbers of batches.

    ``divide_by`` says whether a gradient is the mean over the ranks that still have batches, or the sum over
    the initial number of ranks. With ``early="stop"`` all ranks raise InputsExhausted as soon as one has run
    out. With several modules, each has one reduced backward in every iteration, in the order given.
    """
    if divide_by not in ("active", "initial"):
        raise ValueError(f'divide_by has to be "active" or "initial", got {divide_by!r}')
    if early not in ("continue", "stop"):
        raise ValueError(f'early has to be "continue" or "stop", got {early!r}')
    if not modules:
        raise ValueError("join() takes the replicated modules that are trained inside, got none")
    replicas = [replica(module) for module in modules]
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as end:
        for each in replicas:
            stack.enter_context(each.joining(Joining(divide_by, early)))
        try:
            yield
            _keep_company(replicas, end)
        except BaseException as error:
            tell_all((trouble for each in replicas for trouble in each.troubles()), error)
            raise


def _keep_company(replicas: Sequence[Replica], end: contextlib.ExitStack) -> None:
    is_over = False
    while not is_over:
        with contextlib.ExitStack() as iteration:
            iteration.enter_context(interrupts)
            is_over = not _keep_company_once(replicas)
            if is_over:  # nobody has a batch any more: all ranks go on to take one's state
                end.push(iteration.pop_all())
    for each in replicas:
        each.copy_state(each.last_active[0])


def _keep_company_once(replicas: Sequence[Replica]) -> bool:
    """Match one iteration of the others, a backward for each module; tell if some had a batch."""
    rounds = [each.keep_company() for each in replicas]
    return any(rounds)


class WrapperJoin(Join):
    """torch's ``Join`` around one wrapper, which is told when the block has ended, however it ends."""

    def __init__(self, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__([wrapper], *args, **kwargs)
        self._wrapper = wrapper

    def __enter__(self) -> None:
        replica(self._wrapper).enter_join()

    def __exit__(self, *reason: Any) -> None:
        try:
            super().__exit__(*reason)
        finally:
            self._wrapper.leave_join()


class WrapperJoinHook(JoinHook):
    """What a wrapper does inside torch's ``Join``, beside other joinables such as ZeroRedundancyOptimizer.

    ``wrapper`` is a DistributedDataParallel; it says before each forward whether a reduced backward follows.
    """

    def __init__(self, wrapper: Any, joining: Joining) -> None:
        self._wrapper = wrapper
        self._joining = joining
        wrapper.begin_join(joining)

    def main_hook(self) -> None:
        """Match the others' iteration. Called by torch on a rank that has run out of batches."""
        if self._wrapper.meet_in_join(joined=True):
            self._wrapper.keep_company()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the weights of a rank that has finished last. Called by torch on every rank."""
        self._wrapper.end_join(is_last=is_last_joiner)


def last_of(claims: Sequence[bytes]) -> int:
    """Return the last rank that claims to have something the others want; rank 0 if none does."""
    return max((rank for rank, claim in enumerate(claims) if claim == b"1"), default=0)
