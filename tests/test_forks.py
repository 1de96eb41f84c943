"""A child of a rank's process, such as a worker that loads data, is no rank: its backwards stay its own."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks


def said_by_child(act: Callable[[], str]) -> str:
    """Return what a forked child has to say."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, act().encode())
        except BaseException as error:
            os.write(theirs, repr(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@ranks(2)
def test_a_fork_may_compute_gradients_and_the_rank_trains_on(rank: int) -> None:
    model = paceline.replicate(built())
    x = torch.randn(4, 4)
    model(x).square().sum().backward()  # what the child does is not the first one

    def saliency() -> str:
        image = x.clone().requires_grad_()
        model(image).square().sum().backward()
        return str(image.grad is not None)

    def stepping() -> str:
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return "stepped"

    assert said_by_child(saliency) == "True"
    assert "This process is a fork of a rank" in said_by_child(stepping)
    model(x).square().sum().backward()
    assert paceline.replica(model).step == 2


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@ranks(2)
def test_a_fork_accumulates_without_the_others(rank: int) -> None:
    model = paceline.replicate(nn.Linear(4, 2))

    def accumulating() -> str:
        with paceline.accumulate(model, 3):
            model(torch.ones(1, 4)).sum().backward()
        return str(model.bias.grad.tolist())

    assert said_by_child(accumulating) == "[1.0, 1.0]"
    model(torch.ones(1, 4)).sum().backward()
