"""Backward hooks of modules inside compiled code, without compiled autograd.

Where Dynamo meets a module with backward hooks it puts three nodes into its graph:

    hook = graph_hook(site)                 at run time, or while AOT traces: torch's own BackwardHook, whose
    args = hook.setup_input_hook(args)      user hooks are calls of one opaque operator
    out  = hook.setup_output_hook(out)

AOT runs them under real autograd, so that what is None, what is differentiable and when a hook fires is
decided by torch itself, as in eager; what stays in the backward graph is

    grads = paceline::module_hooks(site, kind, grad_inputs, grad_outputs)

which calls the user's functions with the user's module when the gradients are there. No compiler can look
into it, and the gradients that flow on are its results, so it is neither dropped nor merged with another.

Private names of torch, seen on 2.11 and 2.13: torch._dynamo.variables.BackwardHookVariable (create,
_setup_hook), torch._dynamo.compiled_autograd.compiled_autograd_enabled, torch._dynamo.guards.GuardBuilder
(EMPTY_NN_MODULE_HOOKS_DICT, SEQUENCE_LENGTH), torch._dynamo.variables.builder.wrap_fx_proxy,
Module._get_backward_hooks, Module._get_backward_pre_hooks, torch.nn.modules.module._global_backward_hooks,
_global_backward_pre_hooks.
"""

import enum
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from paceline.compile.guarding import add_guard_on_answer, guard_on, guard_on_answer

Grads = Sequence[torch.Tensor | None]
_DICTS = ("_backward_hooks", "_backward_pre_hooks")
_EVERYWHERE = "the backward hooks of all modules"


class Kind(enum.IntEnum):
    """Which hooks are due, and which gradients flow on."""

    BEFORE = 0  # pre-hooks: grad_outputs
    AFTER = 1  # hooks: grad_inputs
    ALONE = 2  # hooks of a module none of whose inputs needs a gradient: grad_outputs, untouched


class _Held:
    """A user's hook, not kept alive by us: it may hold the module that we must not hold."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._get: Callable[[], Callable[..., Any] | None]
        try:
            self._get = weakref.WeakMethod(hook) if isinstance(hook, types.MethodType) else weakref.ref(hook)
        except TypeError:  # what has no weak references is hardly a closure
            self._get = lambda: hook

    def __call__(self) -> Callable[..., Any] | None:
        return self._get()


@dataclass(frozen=True)
class Site:
    """One call of a module in one traced graph, with the hooks that it had then."""

    module: "weakref.ref[nn.Module]"
    name: str
    after: Sequence[_Held]
    before: Sequence[_Held]


class _Sites:
    """The sites of all graphs by number. A site goes with its module."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._sites: dict[int, Site] = {}

    def add(
        self, module: nn.Module, after: Sequence[Callable[..., Any]], before: Sequence[Callable[..., Any]]
    ) -> int:
        """Keep a new site; return its number, which no other has: equal calls must not be merged."""
        number = next(self._numbers)
        gone = weakref.ref(module, lambda _: self._sites.pop(number, None))
        self._sites[number] = Site(
            gone, type(module).__name__, [_Held(hook) for hook in after], [_Held(hook) for hook in before]
        )
        return number

    def __getitem__(self, number: int) -> Site:
        try:
            return self._sites[number]
        except KeyError:
            raise RuntimeError(
                "the module whose backward hooks are due in this compiled backward was deleted after its "
                "forward; keep a reference to it until backward() has run"
            ) from None

    def __len__(self) -> int:
        return len(self._sites)


sites = _Sites()


# ---- at run time -----------------------------------------------------------------------------------


def call_hooks(number: int, kind: Kind, grad_inputs: Grads, grad_outputs: Grads) -> list[torch.Tensor]:
    """Call the user's hooks of a site; return new tensors for the gradients that flow on.

    What the hooks are given they may keep: it is memory of their own, which the compiled code never reuses.
    """
    site = sites[number]
    module = site.module()
    flowing = grad_inputs if kind is Kind.AFTER else grad_outputs
    ours: Any = tuple(_copied(grad_inputs))
    theirs: Any = tuple(_copied(grad_outputs))
    if kind is Kind.BEFORE:
        for hook in _alive(site.before):
            theirs = _checked(hook(module, theirs), theirs, "pre hook", "grad_output")
    else:
        for hook in _alive(site.after):
            result = hook(module, ours, theirs)
            if kind is Kind.ALONE:
                _refuse_gradients(result)
            else:
                ours = _checked(result, ours, "hook", "grad_input")
    found = ours if kind is Kind.AFTER else theirs
    if kind is Kind.ALONE:
        found = grad_outputs
    return [_like(old, new, site.name) for old, new in zip(flowing, found, strict=True) if old is not None]


def _alive(held: Sequence[_Held]) -> list[Callable[..., Any]]:
    return [hook for each in held if (hook := each()) is not None]


def _copied(grads: Grads) -> list[torch.Tensor | None]:
    return [None if grad is None else grad.clone() for grad in grads]


def _checked(result: Any, before: Any, what: str, name: str) -> Any:
    if result is None:
        return before
    result = result if isinstance(result, tuple | list) else (result,)
    if len(result) != len(before):
        raise RuntimeError(
            f"a backward {what} of a module returned {len(result)} values for {name}, but there are "
            f"{len(before)}; return None, or a tuple with one entry for each"
        )
    return result


def _refuse_gradients(result: Any) -> None:
    if result is not None and not (isinstance(result, tuple) and all(each is None for each in result)):
        raise RuntimeError(
            "a backward hook returned gradients, but none of its module's inputs needs one; return None"
        )


def _like(old: torch.Tensor, new: torch.Tensor | None, name: str) -> torch.Tensor:
    """Return a new tensor with the layout that the compiled code was promised."""
    if new is None:  # "no gradient", which a compiled graph cannot leave out
        return torch.zeros_like(old)
    if new.shape != old.shape:
        raise RuntimeError(
            f"a backward hook of a {name} returned a gradient of shape {tuple(new.shape)} in place of "
            f"{tuple(old.shape)}; return one of the same shape"
        )
    return torch.empty_like(old).copy_(new)


@cache
def operator() -> Any:
    """Define the operator, once in a process."""

    def run(site: int, kind: int, grad_inputs: Grads, grad_outputs: Grads) -> list[torch.Tensor]:
        return call_hooks(site, Kind(kind), grad_inputs, grad_outputs)

    schema = "(int site, int kind, Tensor?[] grad_inputs, Tensor?[] grad_outputs) -> Tensor[]"
    defined = torch.library.custom_op("paceline::module_hooks", run, mutates_args=(), schema=schema)
    defined.register_fake(
        lambda site, kind, grad_inputs, grad_outputs: [
            torch.empty_like(grad)
            for grad in (grad_inputs if kind == Kind.AFTER else grad_outputs)
            if grad is not None
        ]
    )
    return defined


class GraphHook(BackwardHook):
    """What stands for a module's hooks where autograd is traced: each hook is a call of the operator."""

    def __init__(self, number: int) -> None:
        site = sites[number]
        self._number = number
        super().__init__(None, (self._after,) if site.after else (), (self._before,) if site.before else ())

    def setup_output_hook(self, args: Any) -> Any:
        """Set up what is done with the gradients of the outputs."""
        if self.input_tensors_index is None and self.user_hooks:
            # Nothing comes out of these hooks that somebody needs, so they go along with what does.
            self.user_hooks, self.user_pre_hooks = (), (*self.user_pre_hooks, self._alone)
        return super().setup_output_hook(args)  # type: ignore[no-untyped-call]

    def _before(self, _: None, grad_outputs: Grads) -> Grads:
        return self._call(Kind.BEFORE, (), grad_outputs, grad_outputs)

    def _after(self, _: None, grad_inputs: Grads, grad_outputs: Grads) -> Grads:
        return self._call(Kind.AFTER, grad_inputs, grad_outputs, grad_inputs)

    def _alone(self, _: None, grad_outputs: Grads) -> Grads:
        return self._call(Kind.ALONE, (None,) * self.n_inputs, grad_outputs, grad_outputs)

    def _call(self, kind: Kind, grad_inputs: Grads, grad_outputs: Grads, flowing: Grads) -> Grads:
        results = iter(operator()(self._number, int(kind), list(grad_inputs), list(grad_outputs)))
        return tuple(None if grad is None else next(results) for grad in flowing)


def graph_hook(number: int) -> GraphHook:
    """Make the object that a graph works with. Called by compiled graphs."""
    return GraphHook(number)


# ---- while Dynamo traces ----------------------------------------------------------------------------


def _real_module(tx: Any, module: Any) -> nn.Module:
    value = getattr(module, "value", None)
    real = tx.output.get_submodule(module.module_key) if value is None else value
    assert isinstance(real, nn.Module)
    return real


def _new_site(tx: Any, module: Any) -> int:
    """Make the site of a call that is being traced, valid for as long as the hooks are the same."""
    real: Any = _real_module(tx, module)
    after, _ = real._get_backward_hooks()
    if module.source is not None:
        guard_on(module.source, _keys_of, real, "the backward hooks")
    guard_on_answer(_global_keys, _global_keys(), _EVERYWHERE)
    return sites.add(real, after, real._get_backward_pre_hooks())


def _keys_of(module: nn.Module) -> list[tuple[int, ...]]:
    """Return what no two hooks share, in the order of the calls."""
    return [tuple(getattr(module, name)) for name in _DICTS]


def _global_keys() -> list[tuple[int, ...]]:
    return [tuple(getattr(nn.modules.module, f"_global{name}")) for name in _DICTS]


@cache
def _traced_kind() -> Any:
    """Return the class of what stands for a BackwardHook while Dynamo traces."""
    from torch._dynamo import variables
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import TupleVariable

    none: Any = ConstantVariable.create(None)

    class TracedHook(variables.BackwardHookVariable):
        @classmethod
        def make(cls, tx: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> Any:
            number = _new_site(tx, module)
            proxy = tx.output.create_proxy("call_function", graph_hook, (number,), {})
            proxy.node.meta["example_value"] = BackwardHook(None, (), ())
            return cls(proxy, module, user_hooks, user_pre_hooks)

        def _setup_hook(self, tx: Any, hook_method_name: str, args: Any) -> Any:
            """Send the tensors through the graph; what is none stays as it is."""
            if args.is_tensor():
                return self._send(tx, hook_method_name, args)
            if not isinstance(args, TupleVariable):
                return args
            masked = TupleVariable([each if each.is_tensor() else none for each in args.items])
            sent = self._send(tx, hook_method_name, masked).items
            merged = [new if old.is_tensor() else old for old, new in zip(args.items, sent, strict=True)]
            return args.clone(items=merged, source=None)

        def _send(self, tx: Any, hook_method_name: str, args: Any) -> Any:
            arguments = (self.as_proxy(), args.as_proxy())
            return wrap_fx_proxy(tx, tx.output.create_proxy("call_method", hook_method_name, arguments, {}))

    return TracedHook


@cache
def install() -> None:
    """Let Dynamo trace modules with backward hooks, for as long as the process lives. Eager never sees it."""
    from torch._dynamo import compiled_autograd, variables
    from torch._dynamo.guards import GuardBuilder

    operator()
    kind: Any = variables.BackwardHookVariable
    theirs = kind.create
    traced = _traced_kind()

    def create(tx: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> Any:
        # Whoever has switched on compiled autograd gets torch's own way.
        if compiled_autograd.compiled_autograd_enabled:
            return theirs(tx, module, user_hooks, user_pre_hooks)
        return traced.make(tx, module, user_hooks, user_pre_hooks)

    kind.create = staticmethod(create)
    builder: Any = GuardBuilder
    skip_or_check = builder.EMPTY_NN_MODULE_HOOKS_DICT

    def check_no_backward_hooks(self: Any, guard: Any) -> None:
        if str(guard.name).endswith(_DICTS):
            self.SEQUENCE_LENGTH(guard)
            add_guard_on_answer(self, guard, _global_keys, _EVERYWHERE)
        else:
            skip_or_check(self, guard)

    check_no_backward_hooks.__name__ = skip_or_check.__name__
    builder.EMPTY_NN_MODULE_HOOKS_DICT = check_no_backward_hooks
