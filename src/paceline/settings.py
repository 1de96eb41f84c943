"""How a module is replicated: the settings, and what is refused before anything is sent."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from paceline.buffer_policies import Policies, Policy
from paceline.buffers import names_of
from paceline.errors import name_some
from paceline.finite import Mode
from paceline.hooks import Hook, average, in_dtype, is_sure, name_of, total
from paceline.hooks.checks import odd_signature
from paceline.hooks.in_dtype import InDtype
from paceline.plan import Caps, Wishes
from paceline.precision import Precision
from paceline.tree import refuse_sparse
from paceline.waiting import STALL_SECONDS
from paceline.wiring import Unused


@dataclass(frozen=True)
class Settings:
    """How a module is replicated."""

    caps: Caps = field(default_factory=Caps)
    unused: Unused = "allow"
    hook: Hook = average
    guard: bool = True
    take_state: bool = True  # start from rank 0's parameters and buffers
    buffers: Policies = field(default_factory=Policies)  # when they are made equal
    forward_sync_buffers: bool | None = None  # what a wrapper, which does it in its forward, was told
    left_out: frozenset[str] = frozenset()  # parameters and buffers that are each rank's own
    delayed: frozenset[str] = frozenset()  # parameters that go last, in one bucket
    may_use_differ: bool = False  # somebody expects parameters to go unused
    skip_unused: bool = False  # do not send buckets that no rank has put anything into
    precision: Precision | None = None
    deterministic: bool = False  # sums have a fixed order
    check_finite: Mode | None = None  # what to do about NaN and Inf in one rank's gradients
    loader_check: bool = True  # compare how many batches the ranks have drawn
    stall_seconds: float = STALL_SECONDS  # of waiting, before a line tells what for
    timeout_seconds: float | None = None  # of waiting; None: the process group's own
    is_group_chosen: bool = False  # somebody has said which ranks are data-parallel

    def own(self, module: nn.Module) -> frozenset[str]:
        """Name the parameters and buffers that are each rank's own from the beginning."""
        return self.left_out | self.buffers.never(names_of(module))

    def traits(self) -> list[tuple[str, str]]:
        """Write down what has to be the same on every rank. Bucket sizes show in the plan."""
        return [
            ("the setting unused", repr(self.unused)),
            ("the setting buffers", str(self.buffers)),
            ("the setting forward_sync_buffers", str(self.forward_sync_buffers)),
            ("the setting hook", name_of(self.hook)),
            ("the setting precision", str(self.precision)),
            ("the setting deterministic", str(self.deterministic)),
            ("the setting check_finite", repr(self.check_finite)),
            ("the setting loader_check", str(self.loader_check)),
            ("the setting init_sync", str(self.take_state)),
            ("the setting skip_all_reduce_unused_params", str(self.skip_unused)),
            ("the setting find_unused_parameters", str(self.may_use_differ)),
        ]


def read_seconds(what: str, seconds: Any) -> float:
    """Read a number of seconds as users give it."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{what} has to be a number of seconds, got {type(seconds).__name__}")
    if not seconds > 0:
        raise ValueError(f"{what} has to be above 0 seconds, got {seconds!r}")
    return float(seconds)


def read_timeout(seconds: Any) -> float | None:
    """Read how long a rank may keep the others waiting; None leaves it to the process group."""
    return None if seconds is None else read_seconds("timeout_seconds", seconds)


def reducing_in(precision: Precision | None, hook: Hook, module: nn.Module) -> Hook:
    """Return the hook that reduces in the dtype asked for: the same one, if gradients have that dtype."""
    if precision is None or precision.reduce is None:
        return hook
    if {p.dtype for p in module.parameters() if p.requires_grad} <= {precision.reduce}:
        return hook
    return in_dtype(precision.reduce, hook)


def check_hook(hook: Any) -> None:
    """Refuse what cannot be called as ``hook(bucket, comm)``."""
    if not callable(hook):
        raise TypeError(f"hook has to be a function of (bucket, comm), got {type(hook).__name__}")
    if (signature := odd_signature(hook, 2)) is not None:
        name = name_of(hook)
        raise TypeError(
            f"hook has to be a function of (bucket, comm), but it is {name}{signature}; a hook in torch's "
            "form, (state, bucket), goes to register_comm_hook() or paceline.hooks.FromTorch(state, hook)"
        )


def hook_for(hook: Hook, reduce: Any) -> Hook:
    """Read a hook, and the short word for the two plain ones."""
    check_hook(hook)
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce has to be "mean" or "sum", got {reduce!r}')
    if reduce == "mean":
        return hook
    if hook is not average:
        raise ValueError(
            f'give a hook ({name_of(hook)}) or reduce="sum", not both: what is summed up is up to the hook'
        )
    return total


def check_beside_optimizer(hook: Hook, unused: Unused) -> None:
    """Refuse what an optimizer inside backward cannot wait for."""
    if unused == "error":
        raise ValueError(
            'unused="error" and an optimizer inside backward exclude each other: parameters are stepped '
            'before the ranks have said which of them they used. Take unused="allow", or step after '
            "backward()"
        )
    if not is_sure(hook) or not getattr(hook, "may_join", True):
        raise ValueError(
            f"the hook {name_of(hook)} and an optimizer inside backward exclude each other: a bucket is "
            "stepped before the ranks have confirmed what the hook made of it. Use the plain average, or "
            "step after backward()"
        )


def check_deterministic(hook: Hook, sparse: Collection[str] = ()) -> None:
    """Refuse what has no fixed order."""
    plain = hook.inner if isinstance(hook, InDtype) else hook
    if plain not in (average, total):
        raise ValueError(
            f"deterministic=True and the hook {name_of(hook)} exclude each other: what it sends depends on "
            "how gradients lie in buckets. Take average, total, or in_dtype() around one of them"
        )
    if sparse:
        refuse_sparse(sorted(sparse))


def check_names(
    module: nn.Module, what: str, names: Collection[str], known: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Refuse names that the module does not have."""
    if isinstance(names, str):
        raise TypeError(f"{what} takes a list of names, got the one string {names!r}")
    unknown = sorted(set(names) - {name for name, _ in known})
    if unknown:
        raise ValueError(f"{what} names what {type(module).__name__} does not have: {name_some(unknown)}")


def wishes_for(module: nn.Module, watched: Sequence[tuple[str, nn.Parameter]], settings: Settings) -> Wishes:
    """Find the parameters that travel in a way of their own."""
    sparse = sparse_in(module)
    return Wishes(
        delayed=frozenset(i for i, (name, _) in enumerate(watched) if name in settings.delayed),
        sparse=frozenset(i for i, (name, _) in enumerate(watched) if name in sparse),
    )


def sparse_in(module: nn.Module) -> set[str]:
    """Name the parameters whose gradients are going to be sparse."""
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    sparse = {id(part.weight) for part in embeddings if part.sparse}
    return {name for name, parameter in module.named_parameters() if id(parameter) in sparse}


def policies_from(buffers: Policy | Mapping[str, Policy] | None, broadcast: bool | None) -> Policies:
    """Read the policies of buffers as users give them."""
    if broadcast is None:
        return Policies() if buffers is None else Policies.of(buffers)
    if buffers is not None:
        raise ValueError(
            f"give buffers ({buffers!r}) or broadcast_buffers ({broadcast}), not both: "
            'broadcast_buffers=True is buffers="after_backward", and False is buffers="start"'
        )
    return Policies() if broadcast else Policies.of("start")


def tensors_in(module: nn.Module, left_out: frozenset[str]) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers that are not each rank's own."""
    named = (*module.named_parameters(), *module.named_buffers())
    return [(name, tensor) for name, tensor in named if name not in left_out]


def watched_in(module: nn.Module, left_out: frozenset[str]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that can have a gradient, the frozen ones included."""
    return [
        (name, p)
        for name, p in module.named_parameters()
        if name not in left_out and (p.is_floating_point() or p.is_complex()) and not p.is_inference()
    ]


class UninitializedParameters(ValueError, RuntimeError):
    """A bad argument, as everywhere here; torch's class raises a RuntimeError, with such words."""


def check_model(module: nn.Module, settings: Settings) -> None:
    """Refuse what cannot be replicated, by name."""
    settings.buffers.check(names_of(module))
    tensors = tensors_in(module, settings.left_out)
    lazy = [name for name, t in tensors if isinstance(t, UninitializedParameter | UninitializedBuffer)]
    if lazy:
        raise UninitializedParameters(
            f"Modules with uninitialized parameters can't be replicated: {name_some(lazy)} have no shape "
            "yet; run one forward through the model first"
        )
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{name_some(meta)} are on the meta device and hold no numbers; materialise the model first"
        )
    folded = [name for name, tensor in tensors if _is_folded(tensor)]
    if folded:
        raise ValueError(f"{name_some(folded)} use the same memory for several elements; clone() them first")
    if settings.precision is not None:
        settings.precision.check(module, settings.left_out)


def _is_folded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor was expanded, so that its elements cannot be written one by one."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
