"""A: a step whose loss misses a parameter."""

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import DIFFER, EQUAL, batch, gather, share, verdict
from tests.promises.scenarios import Branches, a_unused_parameter, branching_loss, branching_reference


def only_on(*users: int):
    """Make a route on which all ranks take branch 1, and only some take branch 0."""
    return lambda rank: (0, 1) if rank in users else (1,)


@on_both
@ranks(2)
def test_a_loss_that_misses_a_parameter_gives_the_gradients_of_the_reference(library: Library) -> None:
    assert a_unused_parameter(library) == EQUAL


@on_both
@ranks(4)
def test_ranks_that_used_different_parameters_agree(rank: int, library: Library) -> None:
    model = Branches()
    routes = [only_on(2), only_on(), lambda rank: (rank % 2,), lambda rank: () if rank < 3 else (0,)]
    wrapped = library.wrap(model, bucket_cap_mb=1e-6)

    for step, route in enumerate(routes):
        expected = branching_reference(model, route, step)
        wrapped.zero_grad()
        branching_loss(wrapped, rank, route, step).backward()

        assert verdict(wrapped, expected) == EQUAL


@on_both
@ranks(2)
def test_a_parameter_that_no_rank_used_keeps_no_gradient_and_does_not_move(
    rank: int, library: Library
) -> None:
    model = Branches()
    wrapped = library.wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, weight_decay=0.5)
    before = model.never.weight.clone()

    branching_loss(wrapped, rank, only_on(0)).backward()
    optimizer.step()

    assert model.never.weight.grad is None
    assert model.branches[0].weight.grad is not None
    assert torch.equal(model.never.weight, before)


@ranks(3)
def test_unused_error_raises_in_that_very_backward_with_one_text_on_every_rank(rank: int) -> None:
    model = paceline.replicate(Branches(), unused="error")

    with pytest.raises(paceline.UnusedParameters) as caught:
        branching_loss(model, rank, only_on(0, 2)).backward()

    assert caught.value.missing == {
        "branches.0.weight": (1,),
        "branches.0.bias": (1,),
        "never.weight": (0, 1, 2),
        "never.bias": (0, 1, 2),
    }
    assert "branches.0.weight (rank 1)" in str(caught.value)
    assert "never.weight (ranks 0, 1, 2)" in str(caught.value)
    assert "freeze them" in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1


@ranks(2)
def test_after_unused_error_no_optimizer_moves_and_the_next_step_works(rank: int) -> None:
    model = Branches()
    del model.never
    paceline.replicate(model, unused="error")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(paceline.UnusedParameters):
        branching_loss(model, rank, only_on(0)).backward()

    optimizer.step()

    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    expected = branching_reference(model, only_on(0, 1))
    branching_loss(model, rank, only_on(0, 1)).backward()
    assert verdict(model, expected) == EQUAL


@ranks(2)
def test_unused_error_says_nothing_when_every_rank_uses_everything() -> None:
    model = paceline.replicate(torch.nn.Linear(4, 4), unused="error")

    for _ in range(2):
        model(share(batch())).sum().backward()

    assert dist.get_world_size() == 2
    assert paceline.replica(model).step == 2


@ranks(2, warnings="ignore")
def test_torchs_ranks_differ_and_it_says_so_one_forward_later() -> None:
    assert a_unused_parameter(TORCH).startswith(f"step 1: {DIFFER}; step 2: every rank raised RuntimeError")
