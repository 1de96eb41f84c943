"""B3: ``optimizer.step()`` on gradients made inside ``no_sync``."""

import pytest
import torch
from torch import nn

import paceline
from paceline.testing import ranks
from tests.promises.libraries import REPLICATE, TORCH, Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, share, verdict
from tests.promises.scenarios import b3_step_on_local_gradients, loss_of, small_model


@on_both
@ranks(2)
def test_a_step_on_gradients_from_no_sync_raises_and_moves_nothing(library: Library) -> None:
    seen = b3_step_on_local_gradients(library)

    assert seen.startswith("every rank raised UnsyncedGradients: ")
    assert seen.endswith("; the weights still agree")


@on_both
@ranks(2)
def test_the_message_names_the_parameters_the_cause_and_the_way_out(library: Library) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("body", "head", "aside")})
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with library.no_sync(wrapped):
        model["head"](model["body"](share(batch()))).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match=r"step 0: optimizer\.step\(\)") as caught:
        optimizer.step()

    assert caught.value.parameters == ("body.weight", "body.bias", "head.weight", "head.bias")
    for words in ("body.weight", "head.bias", "no_sync()", "run one backward outside", "zero_grad()"):
        assert words in str(caught.value)
    assert "aside" not in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1


@ranks(2)
def test_a_long_list_of_parameters_is_cut_in_the_message_and_whole_on_the_exception() -> None:
    model = paceline.replicate(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.no_sync(model):
        model(share(batch())).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match=r"2\.weight and 3 more") as caught:
        optimizer.step()

    assert len(caught.value.parameters) == 8


@on_both
@ranks(2)
def test_one_backward_outside_makes_the_step_legal(library: Library) -> None:
    model = small_model()

    def two_backwards(m: nn.Module) -> None:
        loss_of(m, batch()).backward()
        loss_of(m, batch() + 1).backward()

    expected = reference(model, two_backwards)
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with library.no_sync(wrapped):
        loss_of(wrapped, share(batch())).backward()
    with pytest.raises(paceline.UnsyncedGradients):
        optimizer.step()

    loss_of(wrapped, share(batch()) + 1).backward()
    optimizer.step()

    assert verdict(wrapped, expected) == EQUAL


@on_both
@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_gradients_that_were_dropped_do_not_stop_a_step(library: Library, set_to_none: bool) -> None:
    wrapped = library.wrap(small_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with library.no_sync(wrapped):
        loss_of(wrapped, share(batch())).backward()
    before = [p.detach().clone() for p in wrapped.parameters()]

    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()

    assert all(torch.equal(p, b) for p, b in zip(wrapped.parameters(), before, strict=True))


@on_both
@ranks(2)
def test_part_of_the_gradients_local_is_refused_too(library: Library) -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    model[0](share(batch())).sum().backward()
    with library.no_sync(wrapped):
        model[1](share(batch())).sum().backward()

    with pytest.raises(paceline.UnsyncedGradients) as caught:
        optimizer.step()

    assert caught.value.parameters == ("1.weight", "1.bias")


@ranks(2)
def test_an_unfinished_accumulation_is_refused_before_the_block_ends() -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with paceline.accumulate(model, micro_batches=2):
        loss_of(model, share(batch())).backward()
        with pytest.raises(paceline.UnsyncedGradients, match=r"accumulate\(\)"):
            optimizer.step()


@on_both
@ranks(2)
def test_local_gradients_of_a_parameter_that_is_frozen_again_are_refused(library: Library) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    for _ in range(2):
        loss_of(wrapped, share(batch())).backward()
    wrapped.zero_grad()
    model[0].requires_grad_(True)
    with library.no_sync(wrapped):
        loss_of(wrapped, share(batch())).backward()
    model[0].requires_grad_(False)
    loss_of(wrapped, share(batch())).backward()

    with pytest.raises(paceline.UnsyncedGradients, match=r"0\.weight, 0\.bias"):
        optimizer.step()


@ranks(2)
def test_guard_false_takes_the_gate_away() -> None:
    model = REPLICATE.wrap(small_model(), guard=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.no_sync(model):
        loss_of(model, share(batch())).backward()

    optimizer.step()

    weights = gather(model[0].weight.detach())
    assert not torch.equal(weights[0], weights[1])


@ranks(2)
def test_torch_steps_and_its_ranks_drift_apart() -> None:
    assert b3_step_on_local_gradients(TORCH) == "stepped: the weights of the ranks differ, silent"
