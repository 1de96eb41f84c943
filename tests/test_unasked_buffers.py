"""What BatchNorm writes in every forward goes out behind the last bucket, before the ranks ask each other."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import buffers
from paceline.buffers import Turn
from paceline.frames import Kind, Opening
from paceline.meeting import Meeting
from paceline.testing import ranks


def model_with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def figures(model: nn.Module) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size()
    mine = [buffer.tolist() for buffer in model.buffers()]
    dist.all_gather_object(rows, mine)
    return rows


class Story:
    """What happens around the end of a backward, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._note(monkeypatch, buffers, "start_broadcast", "buffers go out")
        self._note(monkeypatch, Meeting, "hear", "the others are heard")
        self._note(monkeypatch, Turn, "take", "buffers are written")
        self._note(monkeypatch, Turn, "drop", "buffers are dropped")

    def _note(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            self.events.append(event)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)


@ranks(2)
def test_figures_of_batch_norm_are_on_their_way_before_the_ranks_hear_each_other(rank: int) -> None:
    model = paceline.replicate(model_with_batch_norm())
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        model(batch(rank)).sum().backward()

    assert story.events == ["buffers go out", "the others are heard", "buffers are written"]
    alone = model_with_batch_norm()
    alone(batch(0))
    assert figures(model) == [[buffer.tolist() for buffer in alone.buffers()]] * 2


@ranks(2)
def test_where_one_rank_does_not_train_its_batch_norm_the_ranks_ask_each_other(rank: int) -> None:
    model = paceline.replicate(model_with_batch_norm())
    if rank == 1:
        model[1].eval()
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        model(batch(rank)).sum().backward()

    assert story.events == ["the others are heard", "buffers go out", "buffers are written"]
    assert figures(model)[0] == figures(model)[1]


@ranks(2)
def test_other_buffers_are_asked_about_beside_them(rank: int) -> None:
    model = model_with_batch_norm()
    model.register_buffer("seen", torch.zeros(1))
    paceline.replicate(model)
    for step in range(3):
        if step == 1:
            model.seen += rank + 1
        with pytest.MonkeyPatch.context() as patch:
            story = Story(patch)
            model(batch(rank, step)).sum().backward()
        asked = ["buffers go out"] if step == 1 else []
        assert story.events[:2] == ["buffers go out", "the others are heard"]
        assert story.events.count("buffers go out") == 1 + len(asked)
        assert figures(model)[0] == figures(model)[1]
    assert model.seen.item() == 1


@ranks(3)
def test_a_rank_that_fails_sends_its_share_and_nobody_takes_it(rank: int) -> None:
    model = paceline.replicate(model_with_batch_norm())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("no luck")

    for step in range(4):
        output = model(batch(rank, step))
        before = [buffer.clone() for buffer in model.buffers()]
        if step == 1 and rank == 1:
            model[0].weight.register_hook(fail)  # the last but one to come: this backward has been opened
        if step == 1:
            with (
                pytest.MonkeyPatch.context() as patch,
                pytest.raises(ValueError if rank == 1 else paceline.PeerFailed, match="no luck"),
            ):
                story = Story(patch)
                output.sum().backward()
            assert "buffers are dropped" in story.events
            assert "buffers are written" not in story.events
            assert all(map(torch.equal, model.buffers(), before))
            model[0].weight._backward_hooks.clear() if rank == 1 else None
        else:
            output.sum().backward()
            optimizer.step()
        optimizer.zero_grad()

    rows = figures(model)
    assert rows[0] == rows[1] == rows[2]


@ranks(2)
def test_a_hook_that_may_fail_on_one_rank_has_the_ranks_ask_first(rank: int) -> None:
    def by_itself(bucket: Any, comm: Any) -> Any:
        return comm.average(bucket.flat)

    model = paceline.replicate(model_with_batch_norm(), hook=by_itself)
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        model(batch(rank)).sum().backward()

    assert story.events == ["the others are heard", "buffers go out", "buffers are written"]


@ranks(2)
def test_a_rank_that_leaves_its_batch_out_makes_the_ranks_ask(rank: int) -> None:
    model = paceline.replicate(model_with_batch_norm())
    for step in range(3):
        if rank == 1 and step == 1:
            paceline.skip(model)
        else:
            model(batch(rank, step)).sum().backward()
        model.zero_grad()
        assert figures(model)[0] == figures(model)[1]


def test_what_an_opening_says_of_buffers_survives_packing() -> None:
    for foretold in (b"", b"12345678"):
        opening = Opening(3, b"abcdefgh", 5, Kind.BACKWARD, None, 2, (b"x",), buffers=foretold)
        assert Opening.unpack(opening.pack()) == opening
