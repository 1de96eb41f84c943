"""V: one rank leaves a batch out, whose next one would be averaged with the others' present one."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import paceline
from paceline.testing import ranks
from tests.promises.libraries import Library, on_both
from tests.promises.measure import gather
from tests.promises.scenarios import loss_of, small_model

LEFT_OUT = 5


def loader(batches: int = 10) -> DataLoader:
    return DataLoader(torch.randn(batches * 3, 4, generator=torch.Generator().manual_seed(1)), batch_size=3)


def train(model: torch.nn.Module, batches: Iterator[torch.Tensor], left_out: dict[int, int]) -> int:
    """Train, leaving out a batch on some ranks; return how many steps were made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    for place, batch in enumerate(batches):
        if left_out.get(dist.get_rank()) == place:
            continue
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        steps += 1
    return steps


@on_both
@pytest.mark.parametrize("who", [0, 1, 2])
@ranks(3)
def test_a_batch_that_is_left_out_raises_on_every_rank_at_that_reduction(library: Library, who: int) -> None:
    model = library.wrap(small_model())
    with pytest.raises(paceline.RanksDisagree) as caught:
        train(model, iter(loader()), {who: LEFT_OUT})
    at = ", ".join(f"rank {rank} is at batch {LEFT_OUT + (rank == who)}" for rank in range(3))
    assert f"step {LEFT_OUT}: the ranks are not at the same batch of their DataLoader: {at}" in str(
        caught.value
    )
    assert f"rank {who} has drawn 1 more than it has used" in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1
    assert all(p.grad is None for p in model.parameters())
    # Caught everywhere, training goes on.
    assert train(model, iter(loader()), {}) == 10


@on_both
@ranks(2)
def test_skip_in_its_place_is_a_step_of_weight_zero(library: Library, rank: int) -> None:
    model = library.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for place, batch in enumerate(loader()):
        optimizer.zero_grad()
        if place == LEFT_OUT and rank:
            paceline.skip(model)
        else:
            loss_of(model, batch).backward()
        optimizer.step()
    everyone = gather([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *everyone))


@ranks(2)
def test_a_batch_left_out_on_every_rank_is_nobodys_business(rank: int) -> None:
    model = paceline.replicate(small_model())
    assert train(model, iter(loader()), {0: LEFT_OUT, 1: LEFT_OUT}) == 9


def one_ahead(loader: DataLoader) -> Iterator[torch.Tensor]:
    """Draw each batch before the one in hand is used, as frameworks do."""
    batches = iter(loader)
    now = next(batches)
    for following in batches:
        yield now
        now = following
    yield now


@ranks(2)
def test_drawing_ahead_is_no_batch_left_out(rank: int) -> None:
    model = paceline.replicate(small_model())
    for _ in range(2):
        assert train(model, one_ahead(loader()), {}) == 10


@ranks(2)
def test_an_evaluation_on_one_rank_is_no_batch_left_out(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for place, batch in enumerate(loader()):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if rank == 0 and place % 4 == 3:
            with torch.no_grad():
                for x in loader(3):
                    model(x)


@ranks(2)
def test_different_numbers_of_micro_batches_are_no_batches_left_out(rank: int) -> None:
    model = paceline.replicate(small_model())
    batches = iter(loader(20))
    for step in range(6):
        count = 1 + (step + rank) % 2
        with paceline.accumulate(model, count):
            for _ in range(count):
                loss_of(model, next(batches)).backward()


@ranks(2)
def test_ranks_that_never_draw_alike_are_left_alone(rank: int) -> None:
    """Batches that are put together from different numbers of draws, from the beginning."""
    model = paceline.replicate(small_model())
    batches = iter(loader(30))
    for step in range(8):
        count = 1 + (step + rank) % 2
        loss_of(model, torch.cat([next(batches) for _ in range(count)])).backward()


@ranks(2)
def test_the_check_can_be_switched_off(rank: int) -> None:
    model = paceline.replicate(small_model(), loader_check=False)
    assert train(model, iter(loader(10 + rank)), {1: LEFT_OUT}) == 10


class Fragile(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.breaks = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            self.breaks -= 1
            raise ValueError("boom in the forward")
        return self.inner(x)


@ranks(2)
def test_a_failure_that_is_caught_everywhere_is_no_batch_left_out(rank: int) -> None:
    model = paceline.replicate(Fragile())
    seen = []
    for place, x in enumerate(loader()):
        model.breaks = int(place == 5 and rank == 1)
        try:
            loss_of(model, x).backward()
        except (ValueError, paceline.PeerFailed):
            seen.append(place)
    assert seen == [5]


@ranks(2)
def test_a_batch_that_is_tried_again_on_one_rank_after_all_have_given_it_up_is_found_out(rank: int) -> None:
    model = paceline.replicate(Fragile())
    seen = []
    for place, x in enumerate(loader()):
        model.breaks = int(place == 5 and rank == 1)
        for _ in range(2):
            try:
                loss_of(model, x).backward()
                break
            except ValueError:
                continue
            except paceline.PacelineError as error:
                seen.append(type(error).__name__)
                break
        if "RanksDisagree" in seen:
            break
    assert seen == (["PeerFailed", "RanksDisagree"], ["RanksDisagree"])[rank]


@ranks(2)
def test_drawing_ahead_beside_evaluations_of_different_lengths_is_no_batch_left_out(rank: int) -> None:
    model = paceline.replicate(small_model())
    for place, x in enumerate(one_ahead(loader())):
        if place % 3 == 2 or place == 9:
            for _ in loader(2 + rank):
                pass
        loss_of(model, x).backward()


@ranks(2)
def test_ranks_may_choose_between_loaders(rank: int) -> None:
    model = paceline.replicate(small_model())
    both = [iter(loader(40)), iter(loader(40))]
    choice = torch.Generator().manual_seed(rank)
    for _ in range(30):
        loss_of(model, next(both[int(torch.randint(2, (1,), generator=choice))])).backward()


@ranks(2)
def test_a_look_into_another_loader_does_not_switch_the_check_off(rank: int) -> None:
    model = paceline.replicate(small_model())
    with pytest.raises(paceline.RanksDisagree, match="not at the same batch"):
        for place, x in enumerate(loader(12)):
            if place == 3 and rank == 0:
                list(loader(2))
            if place == 8 and rank == 1:
                continue
            loss_of(model, x).backward()
