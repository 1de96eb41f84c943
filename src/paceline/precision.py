"""Mixed precision: a module computes in low precision, and its parameters stay in full.

What is trained, reduced, stepped and saved are the module's own parameters. Only what forward reads is a
cast, tied to the parameter by autograd, so that gradients arrive at the parameter in full precision:

    optimizer, state_dict, reducer     parameter ─── cast ──> forward
                                       gradient  <── cast ─── backward

Casts stand in for the parameters while forward runs, see paceline.stand_ins.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.casts import AGAIN, TRACED, Forward, Source, Wanted
from paceline.errors import name_some
from paceline.nested import map_tensors
from paceline.stand_ins import Calls, StandIns, is_computed_again

BATCH_NBYTES = 4 * 1024 * 1024
BATCHES_AT_MOST = 64

# These want their parameters in the dtype of their running figures.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# What the configurations of other wrappers can ask for beyond the dtypes.
NOT_TAKEN = ("keep_low_precision_grads", "output_dtype")


@dataclass(frozen=True)
class Precision:
    """In which dtype a module computes, sends its gradients and keeps its buffers; None leaves it as it is.

    ``inputs=False`` leaves the tensors that the module is called with as they are.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    inputs: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("param", "reduce", "buffer"):
            _check_dtype(name, getattr(self, name))

    @classmethod
    def of(cls, config: Any) -> "Precision":
        """Read torch's ``_MixedPrecision``, which sends gradients in the parameters' dtype unless told."""
        if isinstance(config, cls):
            return config
        if not hasattr(config, "param_dtype") or not hasattr(config, "reduce_dtype"):
            raise TypeError(
                "mixed_precision has to be a paceline.Precision or torch's _MixedPrecision, got "
                f"{type(config).__name__}"
            )
        asked = [name for name in NOT_TAKEN if getattr(config, name, None)]
        if asked:
            raise ValueError(
                f"mixed precision does not take {name_some(asked)}: gradients are handed over in the "
                "parameters' own dtype, and outputs stay as the module computed them. Leave it out"
            )
        param, reduce = config.param_dtype, config.reduce_dtype
        buffer = getattr(config, "buffer_dtype", None)
        inputs = getattr(config, "cast_forward_inputs", True)
        return cls(param, param if reduce is None else reduce, buffer, inputs=inputs)

    def check(self, module: nn.Module, left_out: frozenset[str] = frozenset()) -> None:
        """Refuse a module that cannot compute like this, by name."""
        if self.param is not None:
            named = [(name, p) for name, p in module.named_parameters() if name not in left_out]
            _check_parameters(type(module).__name__, named)
            _check_parts(module)


class LowPrecision:
    """Has a module compute in mixed precision, until ``remove()``.

    It works where the module itself is called; a part of it that is called on its own computes as before.
    Inputs are cast to the dtype of computation, outputs are left as they come. ``left_out`` names parameters
    and buffers that stay as they are. The dtype for reduction is not its affair.
    """

    def __init__(
        self, module: nn.Module, precision: Precision, left_out: frozenset[str] = frozenset()
    ) -> None:
        precision.check(module, left_out)
        self.precision = precision
        self.running = 0  # forwards; for compiled code, which cannot look at more
        self._module = weakref.ref(module)
        self._batches: list[partial[Iterator[Wanted]]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._calls = Calls(self._begin, self._end)
        self._handles: list[Any] = []
        self._buffers = _cast_buffers(module, precision.buffer, left_out)
        if precision.param is not None:
            self._attach(module, precision.param, left_out)
            self._handles = self._calls.attach(module, self._cast_inputs)

    def _attach(self, module: nn.Module, dtype: torch.dtype, left_out: frozenset[str]) -> None:
        kept = {id(p) for name, p in module.named_parameters() if name in left_out}
        dictionaries = []
        for owner in module.modules():
            if owner._parameters:
                keys = frozenset(key for key, p in owner._parameters.items() if id(p) in kept)
                parameters = _Parameters(owner._parameters, self, _dtype_for(owner, dtype), keys)
                owner.__dict__["_parameters"] = parameters
                dictionaries.append(parameters)
        self._batches = _batches(dictionaries)

    def attach_anew(self, left_out: frozenset[str]) -> None:
        """Take in the parts that the module has got since, and their buffers. Not inside a forward."""
        module = self._module()
        if module is not None:
            self._buffers = {**_cast_buffers(module, self.precision.buffer, left_out), **self._buffers}
            if self.precision.param is not None:
                self._attach(module, self.precision.param, left_out)

    def remove(self) -> None:
        """Take everything off again: a plain module, its buffers in the dtypes that they had."""
        self._calls.end()
        for handle in self._handles:
            handle.remove()
        module = self._module()
        if module is not None:
            for owner in module.modules():
                parameters = owner.__dict__.get("_parameters")
                if isinstance(parameters, _Parameters) and parameters.low is self:
                    owner.__dict__["_parameters"] = parameters.copy()
            _cast_back(module, self._buffers)
        self._handles, self._batches, self._buffers = [], [], {}

    # ---- the module is called --------------------------------------------------------------------

    def _begin(self) -> Forward:
        self.running += 1
        return Forward(self._batches, self._streams)

    def _end(self, forward: Forward) -> None:
        self.running -= 1
        forward.close()

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.precision.param
        if dtype is None or not self.precision.inputs:
            return args, kwargs
        cast = partial(_cast_floating, dtype=dtype)
        return map_tensors(cast, args), map_tensors(cast, kwargs)

    # ---- a parameter is read ---------------------------------------------------------------------

    def source(self, *, of_many: bool = False) -> Source | None:
        """Return who casts for a reader that asks now; see StandIns."""
        if torch.compiler.is_dynamo_compiling():
            return TRACED if self.running else None
        return self._calls.current(surely=of_many) or (AGAIN if is_computed_again() else None)


class _Parameters(StandIns):
    """A module's parameters by name, which forward reads as casts."""

    def __init__(
        self, parameters: dict[str, Any], low: LowPrecision, dtype: torch.dtype, kept: frozenset[str]
    ) -> None:
        super().__init__(parameters)
        self.low = low
        self.dtype = dtype
        self.batch_of: dict[str, int] = {}
        self._kept = kept

    def source(self, *, of_many: bool = False) -> Source | None:
        return self.low.source(of_many=of_many)

    def stand_in(self, key: str, parameter: Any, source: Source) -> Any:
        if not self._is_cast(key, parameter):
            return parameter
        return source.cast(parameter, self.dtype, self.batch_of.get(key))

    def _is_cast(self, key: str, parameter: Any) -> bool:
        return (
            parameter is not None
            and parameter.dtype is not self.dtype
            and key not in self._kept
            and parameter.is_floating_point()
        )

    def wanted(self, key: str) -> Wanted | None:
        """Return what forward is going to read here as a cast, as things are now."""
        parameter = dict.get(self, key)
        return (parameter, self.dtype) if parameter is not None and self._is_cast(key, parameter) else None


def _batches(dictionaries: Sequence[_Parameters]) -> list[partial[Iterator[Wanted]]]:
    """Put the places of parameters into batches, in the order of the module's parts, and note it there."""
    found = [(d, key, wanted[0]) for d in dictionaries for key in d if (wanted := d.wanted(key))]
    sizes = [parameter.numel() * d.dtype.itemsize for d, _, parameter in found]
    room = max(BATCH_NBYTES, sum(sizes) // BATCHES_AT_MOST)
    batches: list[list[_Place]] = []
    left = 0
    last = None
    for (dictionary, key, _), size in zip(found, sizes, strict=True):
        # A bias goes with its weight, however large that is: their gradients come at the same time.
        is_small_change = dictionary is last and size <= room // 16
        if not batches or (size > left and not is_small_change):
            batches.append([])
            left = room
        left -= size
        last = dictionary
        # Weak, or the dictionaries and we would keep each other, and the parameters, alive.
        batches[-1].append((weakref.ref(dictionary), key))
        dictionary.batch_of[key] = len(batches) - 1
    return [partial(_wanted, batch) for batch in batches]


_Place = tuple["weakref.ref[_Parameters]", str]


def _wanted(places: Sequence[_Place]) -> Iterator[Wanted]:
    """Yield what forward is going to read at these places."""
    for reference, key in places:
        dictionary = reference()
        wanted = dictionary and dictionary.wanted(key)
        if wanted:
            yield wanted


def _dtype_for(owner: nn.Module, dtype: torch.dtype) -> torch.dtype:
    if isinstance(owner, BATCH_NORMS) and owner.running_mean is not None:
        return owner.running_mean.dtype
    return dtype


def _cast_floating(tensor: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor or a PackedSequence, if it holds floating-point numbers."""
    return tensor.to(dtype) if torch.is_floating_point(tensor.data) else tensor


def _cast_buffers(
    module: nn.Module, dtype: torch.dtype | None, left_out: frozenset[str]
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers in place, and return which dtypes they had."""
    before: dict[str, torch.dtype] = {}
    for name, buffer in module.named_buffers():
        if dtype is not None and buffer.is_floating_point() and name not in left_out:
            before[name] = buffer.dtype
            buffer.data = buffer.data.to(dtype)
    return before


def _cast_back(module: nn.Module, before: dict[str, torch.dtype]) -> None:
    for name, buffer in module.named_buffers():
        if name in before and buffer.is_floating_point():
            buffer.data = buffer.data.to(before[name])


# ---- what is refused -----------------------------------------------------------------------------


def _check_dtype(name: str, dtype: Any) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has to be a dtype such as torch.bfloat16, or None, got {dtype!r}")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(
            "mixed precision needs floating-point dtypes that layers compute in, such as torch.bfloat16, "
            f"but {name} is {dtype}"
        )


def _check_parameters(kind: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    described = [(f"{name} ({str(p.dtype).removeprefix('torch.')})", p) for name, p in named]
    imaginary = [text for text, p in described if p.is_complex()]
    if imaginary:
        raise ValueError(
            f"mixed precision cannot cast complex parameters: {name_some(imaginary)}. Leave them out by "
            "name, or hold their real and imaginary parts as floating-point parameters"
        )
    if named and not any(p.is_floating_point() for _, p in named):
        raise ValueError(
            f"mixed precision casts floating-point parameters, and this {kind} has only "
            f"{name_some([text for text, _ in described])}. Train it without mixed precision"
        )


def _check_parts(module: nn.Module) -> None:
    kind = type(module).__name__
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise ValueError(
            f"mixed precision begins where a module is called, and {kind} has no forward. Give it to each "
            "of the parts that are called"
        )
    parts = [(name or kind, part.__dict__.get("_parameters")) for name, part in module.named_modules()]
    already = [name for name, parameters in parts if isinstance(parameters, _Parameters)]
    if already:
        raise ValueError(
            f"{name_some(already)} computes in mixed precision already; remove() that first, or give it to "
            "the outer module only"
        )
    localized = [name for name, parameters in parts if isinstance(parameters, StandIns)]
    if localized:
        raise ValueError(
            f"mixed precision cannot reach the parameters of {name_some(localized)}: they are localized. "
            "Replicate the sharded module itself, which needs no localize()"
        )
    odd = [name for name, parameters in parts if not isinstance(parameters, dict)]
    if odd:
        raise ValueError(
            f"mixed precision cannot reach the parameters of {name_some(odd)}: they are not held in Python. "
            "Use the modules that these were scripted from"
        )
