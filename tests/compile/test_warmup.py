"""warmup(): everything is compiled before the first step, and nothing else has changed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks
from tests.compile.models import batch, check_gradients, loss_of, made, reference


class Counting:
    """A backend that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.is_broken = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("no compiler here")
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@ranks(2)
def test_everything_is_compiled_and_nothing_else_has_changed(rank: int) -> None:
    torch._dynamo.reset()
    model = made("convnet with BatchNorm")
    want = reference(model, [batch(each) for each in range(2)])
    backend = Counting()
    compiled = torch.compile(paceline.replicate(model), backend=backend, fullgraph=True)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    paceline.replica(compiled).warmup(batch(rank), forward=compiled)

    assert backend.graphs == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert paceline.replica(compiled).step == 0
    loss_of(compiled(batch(rank))).backward()
    assert backend.graphs == 1
    check_gradients(model, want)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # no gradient is taken for an unsynced one


@ranks(2)
def test_a_rank_that_cannot_compile_makes_all_raise(rank: int) -> None:
    torch._dynamo.reset()
    backend = Counting()
    backend.is_broken = rank == 1
    model = paceline.replicate(nn.Linear(2, 2))
    compiled = torch.compile(model, backend=backend)
    kind = torch._dynamo.exc.BackendCompilerFailed if rank else paceline.PeerFailed
    with pytest.raises(kind, match="no compiler here"):
        paceline.replica(model).warmup(torch.ones(1, 2), forward=compiled)

    backend.is_broken = False
    paceline.replica(model).warmup(torch.ones(1, 2), forward=compiled)
    assert backend.graphs >= 1


@ranks(2)
def test_gradients_that_are_there_are_not_lost(rank: int) -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="before the first step or after zero_grad"):
        paceline.replica(model).warmup(torch.ones(1, 2))
    assert model.weight.grad is not None


def test_outputs_without_a_gradient_need_a_loss() -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="give it a loss"):
        paceline.replica(model).warmup(torch.ones(1, 2), forward=lambda x: model(x).detach())


@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_the_handle_is_found_from_the_compiled_module(wrap: Any) -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(wrap(model), backend="eager")
    assert paceline.replica(compiled) is paceline.replica(model)


def test_a_compiled_module_is_not_replicated_twice() -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="compiled form of a Linear that is replicated already: train it as it is"
    ):
        paceline.replicate(torch.compile(model, backend="eager"))
    twice = paceline.replicate(torch.compile(nn.Linear(2, 2), backend="eager"))
    with pytest.raises(ValueError, match="this OptimizedModule is replicated already"):
        paceline.replicate(twice)


def test_a_backend_that_does_not_exist_is_named() -> None:
    model = paceline.replicate(nn.Linear(2, 2))
    with pytest.raises(torch._dynamo.exc.InvalidBackend, match="inducter"):
        torch.compile(model, backend="inducter")


@ranks(2)
def test_a_graph_break_under_fullgraph_raises_on_every_rank_and_training_goes_on(rank: int) -> None:
    torch._dynamo.reset()
    model = made("broken graph")
    want = reference(model, [batch(each) for each in range(2)])
    paceline.replicate(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        compiled(batch(rank))
    loss_of(model(batch(rank))).backward()
    check_gradients(model, want)
