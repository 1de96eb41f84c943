"""Gradients laid behind each other: crowds of tensors, which on a GPU are copied by one kernel."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import paceline
from paceline import shelf
from paceline.plan import Caps, Spec, plan_buckets
from paceline.shelf import CAT_TENSORS, Shelf
from paceline.testing import ranks

MANY = CAT_TENSORS + 1


def shelf_of(count: int, *, device: str = "cuda", last: tuple[int, ...] = (4,)) -> Shelf:
    """Lay parameters over a bucket of a device. They are on the CPU: the shelf only looks at their shapes."""
    parameters = [torch.randn(shape) for shape in [*[(2, 3)] * (count - 1), last]]
    specs = [
        Spec(f"p{i}", tuple(p.shape), p.dtype, torch.device(device, 0), p.stride())
        for i, p in enumerate(parameters)
    ]
    plan = plan_buckets(specs, Caps.of_mib([1]), order=range(count))
    return Shelf(plan, plan.buckets[0], parameters)


@contextmanager
def capturing(now: bool) -> Iterator[mock.Mock]:
    """Say whether a graph is recorded, which a build without CUDA cannot; watch the copies of crowds."""
    with (
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=now),
        mock.patch.object(shelf, "flatten_crowd", side_effect=shelf.flatten_crowd) as copies,
    ):
        yield copies


def test_a_crowd_is_copied_as_it_would_be_one_by_one() -> None:
    crowd = shelf_of(MANY)

    with capturing(False) as copies:
        flat = crowd.flatten(list(crowd.parameters))

    assert copies.call_count == 1
    assert torch.equal(flat, torch.cat([parameter.flatten() for parameter in crowd.parameters]))


def test_while_a_graph_is_recorded_nothing_is_read_from_memory_that_is_gone_when_it_runs() -> None:
    crowd = shelf_of(MANY)

    with capturing(True) as copies:
        flat = crowd.flatten(list(crowd.parameters))

    assert copies.call_count == 0
    assert flat.numel() == crowd.bucket.numel


@pytest.mark.parametrize(
    "few",
    [
        shelf_of(CAT_TENSORS),
        shelf_of(MANY, device="cpu"),
        shelf_of(MANY, last=()),
        shelf_of(MANY, last=(0,)),
    ],
    ids=["few", "on a CPU", "a single number", "an empty one"],
)
def test_what_one_kernel_cannot_copy_is_copied_by_cat(few: Shelf) -> None:
    with capturing(False) as copies:
        flat = few.flatten(list(few.parameters))

    assert copies.call_count == 0
    assert torch.equal(flat, torch.cat([parameter.flatten() for parameter in few.parameters]))


def test_a_gradient_of_another_dtype_in_a_crowd_is_named() -> None:
    crowd = shelf_of(MANY)
    gradients = list(crowd.parameters)
    gradients[7] = gradients[7].double()

    with capturing(False), pytest.raises(TypeError, match="p7 has a torch.float64 gradient"):
        crowd.flatten(gradients)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(2 + i % 3, 2) for i in range(MANY))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return x.sum() * sum(scale.sin().sum() for scale in self.scales[:used])


@ranks(2)
def test_a_crowd_trains_as_one_process_does(rank: int) -> None:
    torch.manual_seed(0)
    model = Scales()
    alone = copy.deepcopy(model)
    paceline.replicate(model)

    with capturing(False) as copies:
        for step in range(5):
            for each in paceline.replica(model).reducer._planner.layout.shelves:
                each._is_crowded = True
            used = MANY - step % 2
            for m, x in ((model, torch.ones(3) * (rank + 1) * 2), (alone, torch.ones(3) * 3)):
                m.zero_grad()
                m(x, used).backward()
            for mine, reference in zip(model.parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (reference.grad is None)
                if reference.grad is not None:
                    torch.testing.assert_close(mine.grad, reference.grad)

    assert copies.call_count >= 2
