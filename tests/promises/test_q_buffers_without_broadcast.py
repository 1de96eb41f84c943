"""Q: buffers with broadcasting off."""

import torch
import torch.distributed as dist

from paceline.testing import ranks
from tests.promises.libraries import TORCH, Library, on_both
from tests.promises.measure import gather
from tests.promises.scenarios import Buffered, differing_buffers, q_buffers_without_broadcast


@on_both
@ranks(2)
def test_buffers_are_equal_after_construction_with_broadcasting_off(library: Library) -> None:
    assert q_buffers_without_broadcast(library) == "equal after construction"


@on_both
@ranks(3)
def test_buffers_are_those_of_rank_0_bit_for_bit(library: Library) -> None:
    model = Buffered(dist.get_rank())
    library.wrap(model, broadcast_buffers=False)

    for name, buffer in Buffered(0).named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
        assert dict(model.named_buffers())[name].dtype == buffer.dtype


@on_both
@ranks(2)
def test_buffers_go_their_own_way_afterwards_with_broadcasting_off(rank: int, library: Library) -> None:
    wrapped = library.wrap(Buffered(rank), broadcast_buffers=False)

    for _ in range(2):
        wrapped(torch.randn(8, 4) * (rank + 1)).sum().backward()

    assert differing_buffers(wrapped) == ["1.running_mean", "1.running_var"]
    weights = gather([p.grad for p in wrapped.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@ranks(2, warnings="ignore")
def test_torchs_buffers_differ_after_construction() -> None:
    assert q_buffers_without_broadcast(TORCH).startswith("differ after construction: ")
