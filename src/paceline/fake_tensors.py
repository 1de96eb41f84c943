"""Tensors that have a shape and a dtype and no values, all of them on the CPU, and who hears what is done.

    x.to("cuda"), loss.item(), ...   ── NoValues ──┐  what needs a device or a value
    operators and collectives        ── Listener ──┴─ FakeTensorMode

Private names of torch, seen in 2.11 and 2.13: ``torch._subclasses.fake_tensor`` (FakeTensorMode and what it
raises, unset_fake_temporarily), ``torch.utils._python_dispatch.TorchDispatchMode``,
``torch._C._distributed_c10d._create_work_from_future``, the schemas of the ``c10d`` operators.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.call_site import frames_from, users_line, users_words
from paceline.unread import Unread
from paceline.watches.modules import module_watch

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# Where torch computes with numbers of its own that are no part of the model: ranks of a mesh, indices of a
# dataset. They are computed as usual.
PLAIN = ("torch.distributed.device_mesh", "torch.distributed._mesh_layout", "torch.utils.data")

# What torch and paceline read themselves, and what it is where all is well: the number of a step, how many
# gradients were infinite, and so on.
ANSWERS: tuple[tuple[str, float], ...] = (
    ("torch.optim", 1.0),
    ("torch.amp", 0.0),
    ("paceline.weights", 1.0),
    ("paceline", 0.0),
)

# Through which a call comes here, whoever makes it.
_PASSING = (
    "torch._compile",
    "torch._dynamo",
    "torch._ops",
    "torch._subclasses",
    "torch._tensor",
    "torch.overrides",
    "torch.utils._device",
    "torch.utils._python_dispatch",
    __name__,
)

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")

Heard = Callable[[str, Mapping[str, Any]], None]  # the name of a collective, and its arguments by name


class NeedsValues(RuntimeError):
    """The user's code asks for a number that is not there."""


def no_values() -> FakeTensorMode:
    """Return the mode in which no tensor has values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


# ---- values and devices --------------------------------------------------------------------------


class NoValues(TorchFunctionMode):
    """Answers for values and devices that are not there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reader = _READERS.get(func)
        if reader is not None:
            return reader(func, *args, **kwargs)
        if func in _MOVES:
            args = [_device_here(each, loose=True) for each in args]
        if "device" in kwargs:
            kwargs["device"] = _device_here(kwargs["device"], loose=True)
        kwargs.pop("pin_memory", None)
        return func(*(_device_here(each) for each in args), **kwargs)


def _device_here(given: Any, *, loose: bool = False) -> Any:
    """Return the CPU in place of a GPU. ``loose``: a number or a text stands for a device, too."""
    if isinstance(given, torch.device):
        return torch.device("cpu") if given.type in _ELSEWHERE else given
    is_index = isinstance(given, int) and not isinstance(given, bool)
    is_name = isinstance(given, str) and given.partition(":")[0] in _ELSEWHERE
    return torch.device("cpu") if loose and (is_index or is_name) else given


def _stay(_func: Any, tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


def _address(_func: Any, tensor: torch.Tensor) -> int:
    """Return what is as good as an address: another one for each storage and place in it."""
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata) + int(tensor.storage_offset()) * tensor.element_size()


def _read(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Read a value, if there is one."""
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return func(tensor, *args, **kwargs)
    if func not in _OUT:
        try:
            return func(tensor, *args, **kwargs)
        except NeedsValues:
            pass
    asks = _asker()
    answer = next((each for prefix, each in ANSWERS if f"{asks}.".startswith(f"{prefix}.")), None)
    if answer is not None:
        return _as_kind(func, tensor, answer)
    # Where torch itself needs a number, nothing else will do.
    return refuse_value() if asks.startswith("torch.") else _unread(func, args)


def _unread(func: Any, args: Sequence[Any]) -> Any:
    """Give what may be shown, and refuse what may be decided upon."""
    if func is torch.Tensor.item:
        return Unread(refuse_value)
    if func is torch.Tensor.__format__:
        return format(Unread(refuse_value), *args)
    return refuse_value()


def _as_kind(func: Any, tensor: torch.Tensor, answer: float) -> Any:
    if func is torch.Tensor.item:
        return answer if tensor.is_floating_point() else int(answer)
    return answer if func is torch.Tensor.__float__ else int(answer)


def _asker() -> str:
    """Return the module that has called torch."""
    modules = (_module_of(frame) for frame in frames_from(sys._getframe(2)))
    return next((name for name in modules if not name.startswith(_PASSING)), "")


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def refuse_value() -> NoReturn:
    """Say which line of the user's needs a value, and what to do."""
    raise NeedsValues(_words())


def _words() -> str:
    frames = frames_from(sys._getframe(1))
    sending = (f.f_code.co_name for f in frames if _module_of(f) == "torch.distributed.distributed_c10d")
    objects = next((name for name in sending if name.endswith(("_object", "_object_list"))), "")
    line, words = users_line(), users_words()
    if objects:
        return (
            f"check() cannot follow what Python objects hold on other ranks, and {line} sends some with "
            f"{objects}(): {words}. Leave it out of the step, or run it on processes, as @ranks does."
        )
    return (
        f"check() runs on tensors that have no values, and {line} needs one: {words}. Leave that out of the "
        "step, or use paceline.rehearse(), which computes. (A number of loss.item() may be logged and added "
        "up, but nothing may depend on it.)"
    )


_ELSEWHERE = ("cuda", "meta")
_MOVES: set[Any] = {torch.Tensor.to, torch._C._nn._parse_to}
_OUT: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__}
_READERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data_ptr: _address,
    torch.Tensor.cuda: _stay,
    torch.Tensor.pin_memory: _stay,
    torch.Tensor.item: _read,
    torch.Tensor.tolist: _read,
    torch.Tensor.numpy: _read,
    torch.Tensor.__array__: _read,
    torch.Tensor.__bool__: _read,
    torch.Tensor.__int__: _read,
    torch.Tensor.__float__: _read,
    torch.Tensor.__index__: _read,
    torch.Tensor.__format__: _read,
    torch.Tensor.__contains__: _read,
}


def exchange_contents(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensors are, for ``module.to()``.

    torch's way refuses tensors that something has a weak reference to, which may be torch itself here.
    """
    one.data, other.data = other.data, one.data
    module_watch.swaps += 1


# ---- operators -----------------------------------------------------------------------------------


class Listener(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears every collective; gives those that nobody answers a result at once."""

    def __init__(self, heard: Heard) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heard = heard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVES:
            given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
            self._heard(func._schema.name.partition("::")[2], given)
            _forget_values(_tensors((args, kwargs.values())))
            if func.namespace == "c10d":
                return _done(func, args)
        real = [each for each in _tensors((args, kwargs.values())) if not isinstance(each, FakeTensor)]
        if real or not types:
            if _is_plain(args):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            _refuse_foreign(real)
        try:
            return func(*args, **kwargs)
        except NEEDS_VALUES as error:
            raise NeedsValues(_words()) from error


def _forget_values(tensors: Iterable[torch.Tensor]) -> None:
    """Take it that nobody knows what a collective has left: torch keeps small constants in mind."""
    for each in tensors:
        if isinstance(each, FakeTensor) and each.constant is not None:
            each.fake_mode.fake_tensor_converter.invalidate_constant_aliases(each.constant)
            each.constant = None


def _done(func: Any, args: Sequence[Any]) -> Any:
    """Return what a collective returns that has ended already."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(_tensors(args[:1])))
    work = _create_work_from_future(future).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _tensors(nested: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in nested:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple) or type(each) is type({}.values()):
            yield from _tensors(each)


def _is_plain(args: Sequence[Any]) -> bool:
    """Tell whether torch computes for itself here, with values."""
    if any(isinstance(each, FakeTensor) for each in _tensors(args)):
        return False
    return _asker().startswith(PLAIN)


def _refuse_foreign(real: Sequence[torch.Tensor]) -> None:
    """Refuse parameters of a model that is not this rank's own."""
    # A subclass, such as DTensor, says nothing of what it holds.
    if any(each.requires_grad for each in real if type(each) in (torch.Tensor, torch.nn.Parameter)):
        raise ValueError(
            f"{users_line()} uses parameters that were made outside of the step function. check() runs it "
            "once for each rank, and each needs a model of its own: build it inside the step function"
        )
