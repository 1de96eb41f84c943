"""W2: the link returns wrong data at start-up."""

import pytest
import torch.distributed as dist

import paceline
from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import EQUAL, gather
from tests.promises.scenarios import over_a_wrong_link, small_model, w2_wrong_link
from tests.promises.wrong_link import COLLECTIVES, WrongLink

# c10d's collective -> the names that the message has for what stands on it
NAMES = {"allgather": "gather_bytes", "broadcast": "broadcast", "allreduce": "total"}

each_collective = pytest.mark.parametrize("collective", COLLECTIVES)


@on_both
@each_collective
@pytest.mark.parametrize("odd_rank", [0, 1])
@ranks(2)
def test_every_rank_hears_that_the_link_is_wrong_and_not_the_model(
    rank: int, library: Library, collective: str, odd_rank: int
) -> None:
    group = WrongLink(dist.new_group(), collective, odd_rank)

    with pytest.raises(paceline.CommunicationFault) as caught:
        library.wrap(small_model(), process_group=group)

    fault = caught.value
    assert len(set(gather(str(fault)))) == 1
    assert str(fault).startswith("the link between the ranks is at fault, not the model: ")
    assert f"{NAMES[collective]} by gloo on cpu returned wrong data on rank {odd_rank}: " in str(fault)
    assert "(lo 127.0.0.1)" in str(fault)
    assert (fault.collective, fault.backend, fault.ranks) == (NAMES[collective], "gloo", (odd_rank,))
    assert list(fault.places) == [0, 1]


@on_both
@ranks(3)
def test_models_that_differ_are_not_blamed_when_the_link_is_wrong(rank: int, library: Library) -> None:
    model = small_model()
    model[2].requires_grad_(rank == 0)

    with pytest.raises(paceline.CommunicationFault):
        library.wrap(model, process_group=WrongLink(dist.new_group(), "allgather", 2))


@on_both
@ranks(2)
def test_a_right_link_trains_as_ever(library: Library) -> None:
    assert over_a_wrong_link(library, "none") == EQUAL


@on_both
@ranks(2)
def test_the_row_of_the_matrix(library: Library) -> None:
    seen = w2_wrong_link(library)

    assert seen.count("every rank raised CommunicationFault: the link between the ranks is at fault") == 3


@ranks(2, warnings="ignore")
def test_torch_blames_the_model_or_says_nothing() -> None:
    seen = w2_wrong_link(TORCH)

    assert "DDP expects same model across all ranks" in seen
    assert "allreduce: ranks differ, silent" in seen
