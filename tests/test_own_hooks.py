"""What is hung around forwards: scripting does not see it."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.testing import ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def x(rank: int = 0) -> torch.Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.script(module)


def reloaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def inside(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, Ours) else model


def hooks_of(module: nn.Module) -> list[list[Any]]:
    return [list(module._forward_pre_hooks.items()), list(module._forward_hooks.items())]


@ranks(2)
@pytest.mark.parametrize("door", [paceline.replicate, Ours], ids=["replicate", "wrapper"])
@pytest.mark.parametrize("of", [inside, copy.deepcopy, reloaded], ids=["itself", "copy", "pickle"])
def test_a_replicated_module_and_copies_of_it_are_scripted_as_if_they_were_plain(
    rank: int, door: Callable[[nn.Module], nn.Module], of: Callable[[nn.Module], nn.Module]
) -> None:
    module = of(inside(door(net())))

    script = scripted(module)

    plain = scripted(net())
    assert script.code == plain.code
    assert hooks_of(script) == hooks_of(plain) == [[], []]
    torch.testing.assert_close(script(x()), plain(x()))


@ranks(2)
def test_a_part_that_is_replicated_is_scripted_with_the_whole(rank: int) -> None:
    part = paceline.replicate(net())

    script = scripted(nn.Sequential(nn.Linear(2, 2), part))

    assert hooks_of(getattr(script, "1")) == [[], []]


@ranks(2)
def test_scripting_leaves_a_replica_as_it_was(rank: int) -> None:
    model = paceline.replicate(net())
    before = hooks_of(model)

    scripted(model)
    model(x(rank)).sum().backward()

    assert hooks_of(model) == before != [[], []]
    rows = paceline.replica(model).comm.gather(model[0].weight.grad.flatten()).wait()
    assert torch.equal(rows[0], rows[1])


@ranks(2)
def test_a_replica_stays_as_it_was_if_it_cannot_be_scripted(rank: int) -> None:
    class Odd(nn.Linear):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(*inputs)

    model = paceline.replicate(Odd(2, 2))
    before = hooks_of(model)

    with pytest.raises(torch.jit.frontend.NotSupportedError):
        scripted(model)

    assert hooks_of(model) == before != [[], []]


def twice(self: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output * 2


@ranks(2)
def test_hooks_of_a_users_own_are_scripted_as_with_a_plain_module(rank: int) -> None:
    model = net()
    model.register_forward_hook(twice)
    paceline.replicate(model)

    script = scripted(model.eval())

    torch.testing.assert_close(script(x()), 2 * scripted(net().eval())(x()))


@ranks(2)
def test_hooks_of_a_users_own_that_cannot_be_scripted_are_refused_as_with_a_plain_module(rank: int) -> None:
    model = paceline.replicate(net())
    model.register_forward_hook(lambda *_: None)

    with pytest.raises(RuntimeError, match="Expected a single top-level function"):
        scripted(model)


@ranks(2)
def test_what_computes_in_mixed_precision_is_scripted_in_full_precision(rank: int) -> None:
    model = paceline.replicate(net(), precision=paceline.Precision(param=torch.bfloat16))

    script = scripted(model)

    torch.testing.assert_close(script(x()), net()(x()))
