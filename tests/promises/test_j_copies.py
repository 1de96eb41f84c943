"""J: deepcopy and pickle with a non-default group."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.testing import ranks
from tests.promises.libraries import DROP_IN, REPLICATE, TORCH
from tests.promises.measure import EQUAL, batch, reference, share, verdict
from tests.promises.scenarios import COPIES, copied, loss_of, small_model

on_every_copy = pytest.mark.parametrize("way", COPIES)


def replicated_over_its_own_group() -> nn.Module:
    return REPLICATE.wrap(small_model(), process_group=dist.new_group([0, 1]))


@on_every_copy
@ranks(2)
def test_a_copy_of_a_replicated_module_is_plain_and_trains_alone(way: str) -> None:
    assert copied(REPLICATE, COPIES[way]) == "the copy is a plain module"


@on_every_copy
@ranks(2)
def test_a_copy_of_the_wrapper_attaches_itself_again(way: str) -> None:
    assert copied(DROP_IN, COPIES[way]) == "the copy is a replica again"


@on_every_copy
@ranks(2)
def test_a_copy_waits_for_no_one_and_steps_on_its_own(rank: int, way: str) -> None:
    twin = COPIES[way](replicated_over_its_own_group())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    before = twin[0].weight.detach().clone()

    if rank == 1:  # on one rank only: a reduction would wait for ever
        loss_of(twin, batch()).backward()
        optimizer.step()

    assert torch.equal(twin[0].weight, before) is (rank == 0)


@on_every_copy
@ranks(2)
def test_a_copy_has_the_class_keys_and_values_of_the_bare_model_and_no_handle(way: str) -> None:
    bare, model = small_model(), replicated_over_its_own_group()
    twin = COPIES[way](model)

    assert type(twin) is type(bare)
    assert twin.__dict__.keys() == bare.__dict__.keys()
    for name, value in bare.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
    for parameter in twin.parameters():
        assert not parameter.__dict__
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    with pytest.raises(ValueError, match="Sequential is not replicated"):
        paceline.replica(twin)


@on_every_copy
@ranks(2)
def test_the_original_stays_a_replica_and_the_copy_may_become_one(way: str) -> None:
    model = replicated_over_its_own_group()
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    twin = paceline.replicate(COPIES[way](model))

    for m in (model, twin):
        loss_of(m, share(batch())).backward()
        assert verdict(m, expected) == EQUAL


@ranks(2)
def test_a_copy_of_the_wrapper_is_reduced_by_any_path() -> None:
    model = small_model()
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    twin = copy.deepcopy(DROP_IN.wrap(model))

    loss_of(twin.module, share(batch())).backward()

    assert verdict(twin, expected) == EQUAL


LOADER = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "paceline":
            raise ImportError("paceline is not installed here")

sys.meta_path.insert(0, Block())
import torch

model = torch.load(sys.argv[1], weights_only=False)
model(torch.ones(2, 4)).sum().backward()
print(type(model).__name__, *model.state_dict())
print(model[0].weight.grad is not None, "paceline" in sys.modules)
"""


@ranks(2)
def test_a_saved_replica_loads_where_paceline_is_not_installed(rank: int, tmp_path: Path) -> None:
    model = replicated_over_its_own_group()
    if rank == 0:
        torch.save(model, tmp_path / "model.pt")
        load = [sys.executable, "-c", LOADER, str(tmp_path / "model.pt")]
        done = subprocess.run(load, capture_output=True, text=True, timeout=50, check=False)

        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [
            "Sequential",
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
            "True",
            "False",
        ]


@on_every_copy
@ranks(2, warnings="ignore")
def test_torch_refuses(way: str) -> None:
    assert copied(TORCH, COPIES[way]).startswith("refused: every rank raised RuntimeError")
