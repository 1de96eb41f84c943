"""``replicate()``, and functions of a replicated module that do what its handle's methods do."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

from torch import nn

from paceline import finite
from paceline.agreement import or_refuse
from paceline.buffer_policies import Policy
from paceline.compile.guarding import untraced
from paceline.hooks import Hook, average
from paceline.plan import Caps
from paceline.precision import Precision
from paceline.replication import Replica, comm_for, replica
from paceline.settings import (
    Settings,
    check_deterministic,
    check_names,
    hook_for,
    policies_from,
    read_seconds,
    read_timeout,
    reducing_in,
    sparse_in,
)
from paceline.waiting import STALL_SECONDS
from paceline.wiring import Unused

M = TypeVar("M", bound=nn.Module)


@untraced
def replicate(
    module: M,
    *,
    group: Any = None,
    mesh: Any = None,
    bucket_mb: float | Sequence[float] = 25,
    first_bucket_mb: float | None = None,
    unused: Unused = "allow",
    buffers: Policy | Mapping[str, Policy] | None = None,
    broadcast_buffers: bool | None = None,
    guard: bool = True,
    hook: Hook = average,
    reduce: Literal["mean", "sum"] = "mean",
    left_out: Collection[str] = (),
    delayed: Collection[str] = (),
    precision: Precision | None = None,
    deterministic: bool = False,
    check_finite: bool | finite.Mode = False,
    loader_check: bool = True,
    stall_seconds: float = STALL_SECONDS,
    timeout_seconds: float | None = None,
) -> M:
    """Make every rank's copy of ``module`` train as one, and return the same module.

    A collective: every rank of the group calls it with the same model. Parameters and buffers start as rank
    0's.

    ``group`` is a process group (default: all ranks; one process alone if there is no group), ``mesh`` a
    one-dimensional device mesh in its place. Gradients travel in buckets of ``bucket_mb`` MiB, the first
    one of ``first_bucket_mb`` (default 1) so that communication starts early; ``bucket_mb`` may also be a
    list of sizes, the last one for all the rest. ``unused="error"`` raises in a backward that leaves a
    trainable parameter without a gradient on some rank. ``buffers`` says when buffers are made equal, for all
    or by patterns of their names (docs/buffers.md): by default rank 0's are taken after each reduced
    backward; ``broadcast_buffers=False`` is short for ``buffers="start"``. ``guard=False`` takes away the
    gate before ``optimizer.step()``. ``hook`` says what is done with a bucket on its way (see
    paceline.hooks); ``reduce="sum"`` is for those who scale the loss themselves. ``left_out`` names
    parameters and buffers that are each rank's own, ``delayed`` parameters that are reduced last, in one
    bucket. ``precision`` has the module compute, and reduce, in other dtypes than its parameters'.
    ``deterministic=True`` sums gradients in one order: the same bits across bucket sizes, steps and numbers
    of ranks (docs/determinism.md). ``check_finite=True`` looks for NaN and Inf in each rank's gradients: all
    ranks raise NotFinite, or, with "skip", drop the step (docs/checks.md). ``loader_check=False`` lets ranks
    draw different numbers of batches from their DataLoaders for one backward.

    After ``stall_seconds`` of waiting for other ranks a line tells for whom, and what they do; after
    ``timeout_seconds`` (default: the process group's own timeout) PeerTimeout is raised.
    """

    def read() -> Settings:
        if not isinstance(module, nn.Module):
            raise TypeError(f"replicate() takes a torch.nn.Module, got {type(module).__name__}")
        if unused not in ("allow", "error"):
            raise ValueError(f'unused has to be "allow" or "error", got {unused!r}')
        hook_now = hook_for(hook, reduce)
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(f"precision has to be a paceline.Precision, got {type(precision).__name__}")
        check_names(module, "left_out", left_out, [*module.named_parameters(), *module.named_buffers()])
        check_names(module, "delayed", delayed, [*module.named_parameters()])
        if deterministic:
            check_deterministic(reducing_in(precision, hook_now, module), sparse_in(module))
        return Settings(
            Caps.of_sizes(bucket_mb, first_bucket_mb),
            unused,
            reducing_in(precision, hook_now, module),
            guard,
            buffers=policies_from(buffers, broadcast_buffers),
            left_out=frozenset(left_out),
            delayed=frozenset(delayed),
            precision=precision,
            deterministic=deterministic,
            check_finite=finite.read_mode(check_finite),
            loader_check=loader_check,
            stall_seconds=read_seconds("stall_seconds", stall_seconds),
            timeout_seconds=read_timeout(timeout_seconds),
            is_group_chosen=group is not None or mesh is not None,
        )

    comm = comm_for(group, mesh, module)
    Replica(module, comm, or_refuse(comm, read))
    return module


def no_sync(module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
    """Keep the gradients of the backwards inside local to this rank. See Replica.no_sync."""
    return replica(module).no_sync(enabled)


def accumulate(module: nn.Module, micro_batches: int) -> AbstractContextManager[None]:
    """Reduce once for several backwards. See Replica.accumulate."""
    return replica(module).accumulate(micro_batches)


def weight(module: nn.Module, samples: float) -> AbstractContextManager[None]:
    """Let the backwards inside stand for this many samples or tokens. See Replica.weight."""
    return replica(module).weight(samples)


def batch(module: nn.Module) -> AbstractContextManager[None]:
    """Hold this rank to one reduced backward inside. See Replica.batch."""
    return replica(module).batch()


def skip(module: nn.Module) -> None:
    """Leave this rank's batch out. See Replica.skip."""
    replica(module).skip()


def audit(module: nn.Module, every: int | None = 50, heal: bool = False) -> None:
    """Compare parameters and optimizer state between the ranks. See Replica.audit."""
    replica(module).audit(every, heal)


def busy(module: nn.Module, what: str) -> AbstractContextManager[None]:
    """Say what this rank does inside, and stop the clock for the others. See Replica.busy."""
    return replica(module).busy(what)
