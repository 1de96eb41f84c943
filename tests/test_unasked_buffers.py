"""What BatchNorm writes in every forward goes out behind the last bucket, before the ranks ask each other."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import buffers
from paceline.backward import SyncedBackward
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
        self._note(monkeypatch, Turn, "_start", "buffers go out")
        self._note(monkeypatch, Meeting, "hear", "the others are heard")
        self._note(monkeypatch, Turn, "take", "buffers are written")
        self._note(monkeypatch, Turn, "drop", "buffers are dropped")

    def _note(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, event: str) -> None:
        real = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if name != "take" or args[0].has_begun:  # else there is nothing to write
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
        with pytest.MonkeyPatch.context() as patch:
            story = Story(patch)
            if rank == 1 and step == 1:
                paceline.skip(model)
            else:
                model(batch(rank, step)).sum().backward()
        assert story.events[0] == ("the others are heard" if step == 1 else "buffers go out")
        model.zero_grad()
        assert figures(model)[0] == figures(model)[1]


# ---- several replicas in one backward ---------------------------------------------------------------


class Two(nn.Module):
    """Two layers, the second of which is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.first(x) + (self.second(x) if both else 0)


def train_two(rank: int, *, fails: bool) -> None:
    """Run backwards through two replicas, of which the one that closes first has a BatchNorm."""
    head, body = paceline.replicate(model_with_batch_norm()), paceline.replicate(Two())
    for step in range(5):
        loss = head(body(batch(rank, step), both=fails or rank == 0 or step % 2 == 0)).sum()
        if fails and step == 2:
            handle = body.first.weight.register_hook(fail) if rank == 1 else None
            with pytest.raises(ValueError if rank == 1 else paceline.PeerFailed, match="no luck"):
                loss.backward()
            handle.remove() if handle else None
        else:
            loss.backward()
            assert figures(head)[0] == figures(head)[1]
        for parameter in (*head.parameters(), *body.parameters()):
            if parameter.grad is not None:
                rows = [torch.empty_like(parameter) for _ in range(2)]
                dist.all_gather(rows, parameter.grad)
                assert torch.equal(*rows)
        head.zero_grad()
        body.zero_grad()


def fail(_gradient: torch.Tensor) -> None:
    raise ValueError("no luck")


@ranks(2)
def test_replicas_that_one_backward_reaches_send_alike_though_one_rank_misses_a_parameter(rank: int) -> None:
    train_two(rank, fails=False)


@ranks(2)
def test_replicas_that_one_backward_reaches_send_alike_though_one_rank_fails_between_them(rank: int) -> None:
    train_two(rank, fails=True)


# ---- what happens between the opening and the end ---------------------------------------------------


class Replacing(nn.Module):
    """Keeps running figures, as new tensors each time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("var", torch.ones(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.var = 0.9 * self.var + 0.1 * x.var(0)
        return (x - self.mean) / self.var.sqrt()


@ranks(2)
def test_figures_that_backward_replaces_while_it_computes_a_forward_again_are_equal(rank: int) -> None:
    torch.manual_seed(0)
    first, norm, last = nn.Linear(4, 3), Replacing(3), nn.Linear(3, 2)
    model = paceline.replicate(nn.ModuleList([first, norm, last]))
    for step in range(3):
        hidden = checkpoint(lambda x: norm(first(x)), batch(rank, step), use_reentrant=False)
        last(hidden).sum().backward()
        model.zero_grad()
        assert figures(model)[0] == figures(model)[1]


@ranks(2)
def test_a_rank_that_leaves_training_mode_in_the_middle_of_backward_still_sends_its_share(rank: int) -> None:
    model = model_with_batch_norm()
    model.register_buffer("seen", torch.zeros(1))
    paceline.replicate(model)
    for step in range(3):
        loss = model(batch(rank, step)).sum()
        if step == 1 and rank == 0:
            model[0].weight.register_hook(lambda _: model.eval() and None)
        loss.backward()
        model[0].weight._backward_hooks = None
        model.zero_grad()
        model.train()
        assert figures(model)[0] == figures(model)[1]


@ranks(2)
def test_a_batch_norm_that_begins_to_train_in_the_middle_of_backward_is_asked_about(rank: int) -> None:
    model = paceline.replicate(
        nn.Sequential(model_with_batch_norm(), nn.Linear(2, 4), model_with_batch_norm())
    )
    for step in range(3):
        loss = model(batch(rank, step)).sum()
        if step == 1:
            model[0].eval()
            model[0][0].weight.register_hook(lambda _: model[0].train() and None)
        loss.backward()
        model[0][0].weight._backward_hooks = None
        model.zero_grad()
        assert figures(model)[0] == figures(model)[1]


@ranks(2)
def test_buffers_written_between_two_hooks_of_the_end_are_sent_again(rank: int) -> None:
    model = paceline.replicate(model_with_batch_norm())
    with pytest.MonkeyPatch.context() as patch:
        real = SyncedBackward.finish

        def write_first(self: SyncedBackward, **kwargs: Any) -> Any:
            model[1].running_mean += rank + 1  # behind the send, before the closing frame
            return real(self, **kwargs)

        patch.setattr(SyncedBackward, "finish", write_first)
        story = Story(patch)
        model(batch(rank)).sum().backward()

    assert story.events.count("buffers go out") == 2
    assert figures(model)[0] == figures(model)[1]


@ranks(2)
def test_a_rank_that_can_send_only_a_part_of_its_buffers_ends_it_for_all(rank: int) -> None:
    model = paceline.replicate(model_with_batch_norm(), timeout_seconds=20)
    model(batch(rank)).sum().backward()
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "CHUNK_NBYTES", 16)
        real, begun = buffers.Transfer.__init__, []

        def run_out(self: Any, *args: Any) -> None:
            begun.append(self)
            if rank == 1 and len(begun) == 2:
                raise MemoryError("no luck")
            real(self, *args)

        patch.setattr(buffers.Transfer, "__init__", run_out)
        with pytest.raises(MemoryError if rank == 1 else paceline.PeerFailed, match="no luck"):
            model(batch(rank, 1)).sum().backward()
    assert len(begun) == (2 if rank == 1 else 3)  # nothing was sent twice


def test_what_an_opening_says_of_buffers_survives_packing() -> None:
    for foretold in (b"", b"12345678"):
        opening = Opening(3, b"abcdefgh", 5, Kind.BACKWARD, None, 2, (b"x",), buffers=foretold)
        assert Opening.unpack(opening.pack()) == opening


@ranks(2)
@pytest.mark.parametrize("odd", [0, 1])
def test_a_buffer_that_gets_another_shape_in_the_middle_of_backward_is_named_on_all(
    rank: int, odd: int
) -> None:
    model = paceline.replicate(model_with_batch_norm())
    for step in range(3):
        loss = model(batch(rank, step)).sum()
        if step != 1:
            loss.backward()
            assert figures(model)[0] == figures(model)[1]
            continue
        mean = model[1].running_mean.clone()
        if rank == odd:
            model[0].weight.register_hook(lambda _: setattr(model[1].running_mean, "data", torch.zeros(5)))
        with pytest.raises(paceline.RanksDisagree, match="different buffers: 1.running_mean"):
            loss.backward()
        model[0].weight._backward_hooks = None
        model[1].running_mean.data = mean
        model.zero_grad()


@ranks(2)
def test_a_buffer_that_no_longer_shares_memory_in_the_middle_of_backward_is_asked_about(rank: int) -> None:
    model = nn.Sequential(model_with_batch_norm(), nn.Linear(2, 4), model_with_batch_norm())
    first, second = model[0][1], model[2][1]
    second.running_mean = first.running_mean
    paceline.replicate(model)
    for step in range(3):
        loss = model(batch(rank, step)).sum()
        if step == 1:

            def part(_gradient: torch.Tensor) -> None:
                second.running_mean = second.running_mean + 1

            model[0][0].weight.register_hook(part)
        loss.backward()
        model[0][0].weight._backward_hooks = None
        model.zero_grad()
        assert figures(model)[0] == figures(model)[1]
