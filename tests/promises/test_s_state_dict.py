"""S: ``state_dict`` keys and class."""

import torch

import paceline
from paceline.testing import ranks
from tests.promises.libraries import DROP_IN, REPLICATE, TORCH
from tests.promises.measure import batch, share
from tests.promises.scenarios import loss_of, s_state_dict, small_model


@ranks(2)
def test_replicate_keeps_the_bare_models_keys_and_class() -> None:
    assert s_state_dict(REPLICATE) == "the bare model's keys, class Sequential"


@ranks(2)
def test_replicate_returns_the_same_object_with_nothing_added_to_it() -> None:
    model = small_model()
    parameters, parts = list(model.parameters()), list(model.modules())
    attributes = [dict(part.__dict__) for part in parts]

    assert paceline.replicate(model) is model
    loss_of(model, share(batch())).backward()

    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.modules(), parts, strict=True))
    assert [part.__dict__.keys() for part in parts] == [before.keys() for before in attributes]
    assert all(not p.__dict__ for p in parameters)


@ranks(2)
def test_the_drop_in_class_keeps_torchs_prefix_and_name() -> None:
    assert s_state_dict(DROP_IN) == s_state_dict(TORCH)


@ranks(2)
def test_checkpoints_move_between_a_replica_and_a_bare_model(rank: int) -> None:
    trained, fresh = small_model(), small_model(seed=5)
    paceline.replicate(fresh)

    fresh.load_state_dict(trained.state_dict())
    trained.load_state_dict(fresh.state_dict())

    assert torch.equal(fresh[0].weight, trained[0].weight)


@ranks(2)
def test_checkpoints_move_between_torchs_class_and_ours() -> None:
    theirs, ours = TORCH.wrap(small_model()), DROP_IN.wrap(small_model(seed=5))

    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())

    assert torch.equal(ours.module[0].weight, theirs.module[0].weight)
