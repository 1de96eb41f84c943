"""Steps of a DistributedOptimizer, looked at in the process that owns the parameters.

Private names of torch, seen on 2.11 and 2.13: in ``torch.distributed.optim.optimizer``, ``_LocalOptimizer``,
``_ScriptLocalOptimizer`` and its ``compile_lock``, and ``_local_params`` of both.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from paceline.torch_private import remote_optimizers


class StepChecker(Protocol):
    """Who looks before an optimizer steps on the gradients of a context, in the process that owns them."""

    def before_remote_step(self, context: int, parameters: Sequence[torch.Tensor]) -> None:
        """Raise if the optimizer of these parameters must not step."""

    def during_remote_step(self) -> AbstractContextManager[None]:
        """Surround a step of an ordinary optimizer on such gradients."""

    def meant(self, error: BaseException) -> BaseException:
        """Return what was raised by before_remote_step(), wherever that ran; or the error itself."""


_step_checkers: list[StepChecker] = []  # at most one: the guard's


@torch.jit.ignore  # type: ignore[untyped-decorator]
def _check_scripted_step(context: int, parameters: list[torch.Tensor]) -> None:
    for checker in _step_checkers:
        checker.before_remote_step(context, parameters)


class _CheckedScript(torch.nn.Module):
    """A scripted optimizer that asks before it steps. Called in the place of torch's own."""

    make: Callable[..., Any]
    compile_lock: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner = type(self).make(*args, **kwargs)

    @torch.jit.export
    def step(self, autograd_ctx_id: int) -> None:
        _check_scripted_step(autograd_ctx_id, self.inner._local_params)
        self.inner.step(autograd_ctx_id)


def check_remote_steps(checker: StepChecker) -> None:
    """Have a checker asked before every step of a DistributedOptimizer, for as long as the process lives.

    That imports the optimizers, and takes seconds: to be called when RPC is in use.
    """
    if _step_checkers:
        return
    _step_checkers.append(checker)
    theirs = remote_optimizers()
    step, step_all = theirs._LocalOptimizer.step, theirs.DistributedOptimizer.step

    def check_and_step(local: Any, context: int) -> None:
        checker.before_remote_step(context, local._local_params)
        with checker.during_remote_step():
            step(local, context)

    def step_and_tell(remote: Any, context: int) -> None:
        # Those of this process that were scripted before anybody could look into them.
        for parameters in _scripted_here(remote):
            checker.before_remote_step(context, parameters)
        try:
            step_all(remote, context)
        except Exception as error:
            raise checker.meant(error) from None

    theirs._LocalOptimizer.step = check_and_step
    theirs.DistributedOptimizer.step = step_and_tell
    _CheckedScript.make, _CheckedScript.compile_lock = (
        theirs._ScriptLocalOptimizer,
        theirs._ScriptLocalOptimizer.compile_lock,
    )
    theirs._ScriptLocalOptimizer = _CheckedScript


def _scripted_here(remote: Any) -> Iterable[Sequence[torch.Tensor]]:
    """Yield the parameters of a DistributedOptimizer's scripted parts in this process."""
    for reference in remote.remote_optimizers:
        if reference.is_owner():
            part = reference.local_value()
            if hasattr(part, "_local_params"):
                yield list(part._local_params)
