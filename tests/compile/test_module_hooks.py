"""Backward hooks of modules in compiled code: the same calls, with the same gradients, as in eager."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.compile import backward_hooks, traced
from paceline.testing import ranks

INDUCTORS_OWN = "ignore:`torch.jit.script:DeprecationWarning"
Log = list[tuple[str, bool, list[torch.Tensor | None], list[torch.Tensor | None]]]


class Mixed(nn.Module):
    """Takes and returns other things beside tensors, and gets one input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float, y: torch.Tensor, note: str | None = None) -> Any:
        return self.inner(x) * scale, self.inner(y), "note", 3


class Model(nn.Module):
    """A layer whose input needs a gradient, one that mixes, and one beside them whose input needs none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.mixed = Mixed()
        self.beside = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        a, b, _, times = self.mixed(hidden, 2.0, x.detach(), note="none")
        return (a + b * times).tanh().sum() + self.beside(x.detach()).sum(), hidden


class Recorder:
    """Records what hooks are given, with state of its own, and changes some of it."""

    def __init__(self, model: nn.Module) -> None:
        self.log: Log = []
        self.modules = dict(model.named_modules())

    def watch(self, *names: str) -> None:
        for name in names:
            self.modules[name].register_full_backward_pre_hook(partial(self._before, name))
            self.modules[name].register_full_backward_hook(partial(self._after, name))

    def _before(self, name: str, module: nn.Module, grad_output: Any) -> Any:
        self.log.append((f"before {name}", module is self.modules[name], [], list(grad_output)))
        return tuple(None if g is None else 3 * g for g in grad_output) if name == "mixed" else None

    def _after(self, name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        self.log.append((f"after {name}", module is self.modules[name], list(grad_input), list(grad_output)))
        return tuple(None if g is None else g / 2 for g in grad_input) if name == "first" else None


def made(kind: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def compiled(program: Any, backend: Any = "aot_eager") -> Any:
    traced.install()
    torch._dynamo.reset()
    return torch.compile(program, fullgraph=True, backend=backend)


def run(model: nn.Module, backend: str | None, steps: int = 2) -> tuple[Log, list[Any]]:
    """Train a little; return what the hooks saw, and the gradients."""
    recorder = Recorder(model)
    recorder.watch("first", "mixed", "beside", "")
    x = torch.arange(6.0).reshape(2, 3).div(6).requires_grad_()
    # torch.compile(model) would call the hooks of the outermost module outside of the graph.
    forward = model if backend is None else compiled(lambda x: model(x), backend)
    for step in range(steps):
        loss, hidden = forward(x)
        (loss + hidden.sum() * step).backward()
    return recorder.log, [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients")
@pytest.mark.filterwarnings(INDUCTORS_OWN)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_hooks_get_and_change_what_they_do_in_eager(backend: str) -> None:
    expected_log, expected = run(made(), None)

    log, gradients = run(made(), backend)

    assert [entry[:2] for entry in log] == [entry[:2] for entry in expected_log]
    assert all(is_the_module for _, is_the_module, _, _ in log)
    for (name, _, *got), (_, _, *want) in zip(log, expected_log, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(gradients, expected)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients")
@ranks(2)
def test_a_replicated_model_with_hooks_has_eagers_gradients(rank: int) -> None:
    def train(backend: str | None) -> tuple[list[str], list[Any]]:
        model = paceline.replicate(made())
        log, gradients = run(model, backend, steps=1)
        return [entry[0] for entry in log], gradients[1:]

    expected = train(None)
    got = train("aot_eager")

    assert got[0] == expected[0]
    torch.testing.assert_close(got[1], expected[1])


def test_one_graph_serves_all_steps() -> None:
    model = nn.Linear(3, 3)
    calls = []
    model.register_full_backward_hook(lambda *_: calls.append(1))
    counter = CompileCounterWithBackend("aot_eager")
    forward = compiled(model, counter)

    for _ in range(4):
        forward(torch.ones(2, 3, requires_grad=True)).sum().backward()

    assert (counter.frame_count, len(calls)) == (1, 4)


def test_a_module_used_twice_with_equal_gradients_calls_its_hooks_twice() -> None:
    model, calls = nn.Linear(3, 3), []
    model.register_full_backward_hook(lambda *_: calls.append(1))

    compiled(lambda x: model(x).sum() + model(x).sum())(torch.ones(2, 3, requires_grad=True)).backward()

    assert len(calls) == 2


def test_two_backwards_through_one_forward_call_them_twice() -> None:
    model, calls = nn.Linear(3, 3), []
    model.register_full_backward_hook(lambda *_: calls.append(1))

    loss = compiled(model)(torch.ones(2, 3, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()

    assert len(calls) == 2


def test_without_gradients_no_hook_is_called() -> None:
    model, calls = nn.Linear(3, 3), []
    model.register_full_backward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        out = compiled(model)(torch.ones(2, 3))

    assert not out.requires_grad
    assert calls == []


def test_inside_activation_checkpointing_they_are_called_once() -> None:
    model, calls = nn.Linear(3, 3), []
    model.register_full_backward_hook(lambda *_: calls.append(1))

    def loss(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: model(x).tanh().sum(), x, use_reentrant=False)

    compiled(loss)(torch.ones(2, 3, requires_grad=True)).backward()

    assert len(calls) == 1


def added(calls: list[int], number: int) -> Any:
    return lambda *_: calls.append(number)


def test_hooks_that_come_and_go_are_noticed_even_with_the_same_code() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), []
    counter = CompileCounterWithBackend("aot_eager")
    forward = compiled(model, counter)

    def step() -> list[int]:
        calls.clear()
        forward(torch.ones(2, 3, requires_grad=True)).sum().backward()
        return calls

    assert step() == []
    first = model[0].register_full_backward_hook(added(calls, 1))
    assert step() == [1]
    first.remove()
    second = model[0].register_full_backward_hook(added(calls, 2))
    third = model[0].register_full_backward_pre_hook(added(calls, 3))
    assert step() == [3, 2]
    second.remove()
    third.remove()
    assert step() == []
    assert counter.frame_count == 3


def test_hooks_of_all_modules_are_called_and_noticed() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), []
    forward = compiled(lambda x: model(x))
    x = torch.ones(2, 3, requires_grad=True)
    forward(x).sum().backward()

    handle = nn.modules.module.register_module_full_backward_hook(lambda m, *_: calls.append(type(m)))
    try:
        forward(x).sum().backward()
    finally:
        handle.remove()
    forward(x).sum().backward()

    assert calls == [nn.Tanh, nn.Linear, nn.Sequential]


def test_a_hook_removed_between_forward_and_backward_is_still_called() -> None:
    model, calls = nn.Linear(3, 3), []
    hook = added(calls, 1)
    handle = model.register_full_backward_hook(hook)

    loss = compiled(model)(torch.ones(2, 3, requires_grad=True)).sum()
    handle.remove()
    loss.backward()

    assert calls == [1]


@pytest.mark.filterwarnings(INDUCTORS_OWN)
def test_gradients_that_a_hook_keeps_are_not_written_to_later() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model:
        layer.register_full_backward_hook(lambda _m, gi, _go: kept.append((gi[0], gi[0].clone())))

    compiled(model, "inductor")(torch.ones(8, 64, requires_grad=True)).sum().backward()

    assert len(kept) == 3
    assert all(torch.equal(*pair) for pair in kept)


def test_a_gradient_changed_in_place_is_the_one_that_flows_on() -> None:
    def gradient(backend: str | None) -> Any:
        model = made(partial(nn.Linear, 3, 3))
        model.register_full_backward_hook(lambda _m, gi, _go: gi[0].mul_(2).data_ptr() * 0 or None)
        x = torch.ones(1, 3, requires_grad=True)
        (compiled(model, backend) if backend else model)(x).sum().backward()
        return x.grad

    torch.testing.assert_close(gradient("aot_eager"), gradient(None))


def _hold(held: nn.Module, *_: Any) -> None:
    """Hold a module, as many hooks do."""


def test_modules_are_not_kept_alive() -> None:
    model = nn.Linear(3, 3)
    model.register_full_backward_hook(partial(_hold, model))
    gc.collect()
    sites = len(backward_hooks.sites)
    compiled(model)(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert len(backward_hooks.sites) == sites + 1

    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()

    assert gone() is None
    assert len(backward_hooks.sites) == sites


def test_a_module_that_is_gone_before_its_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="was deleted after its forward; keep a reference"):
        backward_hooks.sites[-1]


def test_what_a_hook_may_not_return_is_an_error() -> None:
    def step(result: Any, needs_grad: bool = True) -> None:
        model = nn.Linear(3, 3)
        model.register_full_backward_hook(lambda *_: result)
        compiled(model)(torch.ones(1, 3, requires_grad=needs_grad)).sum().backward()

    with pytest.raises(
        RuntimeError, match="hook of a module returned 2 values for grad_input, but there are 1"
    ):
        step((None, None))
    with pytest.raises(
        RuntimeError, match=r"of a Linear returned a gradient of shape \(7,\) in place of \(1, 3\)"
    ):
        step((torch.ones(7),))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        with pytest.raises(RuntimeError, match="none of its module's inputs needs one; return None"):
            step((torch.ones(1, 3),), needs_grad=False)


def test_an_exception_of_a_hook_reaches_the_caller_of_backward() -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("from the hook")

    model = nn.Linear(3, 3)
    model.register_full_backward_hook(fail)
    loss = compiled(model)(torch.ones(1, 3, requires_grad=True)).sum()

    with pytest.raises(ZeroDivisionError, match="from the hook"):
        loss.backward()


def test_eager_keeps_torchs_own_class() -> None:
    before = torch.utils.hooks.BackwardHook, nn.modules.module.BackwardHook

    traced.install()
    traced.install()

    assert (torch.utils.hooks.BackwardHook, nn.modules.module.BackwardHook) == before


def test_registering_inside_traced_code_is_refused() -> None:
    model = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        model.register_full_backward_hook(lambda *_: None)
        return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(step)(torch.ones(1, 3))
