"""Weights: the gradient of the batch that all ranks have together, however it is spread."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.frames import Kind, Opening
from paceline.hooks import FromTorch, in_dtype, powersgd, quantized
from paceline.testing import ranks
from paceline.weights import Ledger, read_weight, share_of
from tests.promises.libraries import Library, on_both
from tests.promises.measure import EQUAL, batch, gather, reference, verdict
from tests.promises.scenarios import loss_of, small_model

ROWS = [[5], [1]]  # of each rank's micro-batches


def cut(rows: list[list[int]]) -> list[list[torch.Tensor]]:
    """Cut one batch into the micro-batches of each rank."""
    flat = [count for rank in rows for count in rank]
    pieces = iter(batch(sum(flat)).split(flat))
    return [[next(pieces) for _ in rank] for rank in rows]


def mine(rows: list[list[int]]) -> list[torch.Tensor]:
    return cut(rows)[dist.get_rank()]


def expected_of(model: nn.Module, rows: list[list[int]]) -> dict[str, torch.Tensor | None]:
    whole = torch.cat([piece for rank in cut(rows) for piece in rank])
    return reference(model, lambda m: loss_of(m, whole).backward())


def run_weighted(model: nn.Module, pieces: list[torch.Tensor]) -> None:
    handle = paceline.replica(model)
    with handle.accumulate(max(1, len(pieces))):
        for piece in pieces:
            with handle.weight(len(piece)):
                loss_of(model, piece).backward()


@on_both
@ranks(2)
def test_weights_give_the_gradient_of_the_concatenated_batch(library: Library) -> None:
    model = small_model()
    expected = expected_of(model, ROWS)
    wrapped = library.wrap(model, bucket_cap_mb=1e-4)
    for _ in range(3):
        wrapped.zero_grad()
        run_weighted(wrapped, mine(ROWS))
        assert verdict(wrapped, expected) == EQUAL


@pytest.mark.parametrize(
    "rows", [[[3, 1], [2, 6]], [[1, 2, 3], [4]], [[2, 2], []], [[1], [1, 1, 1, 1]]], ids=str
)
@ranks(2)
def test_weights_with_accumulation_and_unequal_numbers_of_micro_batches(rows: list[list[int]]) -> None:
    model = paceline.replicate(small_model(), bucket_mb=1e-4)
    expected = expected_of(small_model(), rows)
    for _ in range(3):
        model.zero_grad()
        run_weighted(model, mine(rows))
        assert verdict(model, expected) == EQUAL


@ranks(2)
def test_weights_inside_no_sync(rank: int) -> None:
    rows = [[4, 1], [2, 3]]
    model = paceline.replicate(small_model())
    first, last = mine(rows)
    with paceline.no_sync(model), paceline.weight(model, len(first)):
        loss_of(model, first).backward()
    with paceline.weight(model, len(last)):
        loss_of(model, last).backward()
    assert verdict(model, expected_of(small_model(), rows)) == EQUAL


@ranks(3)
def test_a_weight_of_zero_leaves_a_rank_out_even_if_its_gradient_is_nan(rank: int) -> None:
    rows = [[5], [0], [2]]
    model = paceline.replicate(small_model(), bucket_mb=1e-4)
    for _ in range(2):
        model.zero_grad()
        run_weighted(model, mine(rows))  # the mean over no rows is NaN
        assert verdict(model, expected_of(small_model(), rows)) == EQUAL


@pytest.mark.parametrize("rows", [[[0, 3], [2, 1]], [[3, 0], [2, 1]], [[0, 0], [2, 0]]], ids=str)
@ranks(2)
def test_a_micro_batch_of_weight_zero_adds_nothing_to_what_was_accumulated(rows: list[list[int]]) -> None:
    model = paceline.replicate(small_model(), bucket_mb=1e-4)
    run_weighted(model, mine(rows))
    assert verdict(model, expected_of(small_model(), rows)) == EQUAL


@ranks(2)
def test_if_all_weights_are_zero_there_is_no_gradient_and_training_goes_on(rank: int) -> None:
    model = paceline.replicate(small_model())
    with paceline.weight(model, 0):
        loss_of(model, batch(2)).backward()
    assert all(p.grad is None for p in model.parameters())
    run_weighted(model, mine(ROWS))
    assert verdict(model, expected_of(small_model(), ROWS)) == EQUAL


HOOKS = {
    "bf16": lambda: in_dtype(torch.bfloat16),
    "float64": lambda: in_dtype(torch.float64),
    "quantized": lambda: quantized(bits=8),
    "powersgd": lambda: powersgd(rank=8, min_compression=1.0),
    "torch": lambda: FromTorch(None, default_hooks.allreduce_hook),
}
TOLERANCE = {"bf16": 2e-2, "quantized": 2e-2, "powersgd": 1e-4}


@pytest.mark.parametrize("name", HOOKS)
@ranks(2, warnings="ignore")
def test_weights_go_through_every_hook(name: str) -> None:
    rows = [[5, 2], [1]]
    model = paceline.replicate(small_model(), hook=HOOKS[name](), bucket_mb=1e-4)
    run_weighted(model, mine(rows))
    for parameter, expected in zip(
        model.parameters(), expected_of(small_model(), rows).values(), strict=True
    ):
        scale = float(expected.abs().max())
        assert torch.allclose(parameter.grad, expected, atol=scale * TOLERANCE.get(name, 1e-6), rtol=0)
    assert all(_same(everyone, model) for everyone in gather([p.grad for p in model.parameters()]))


def _same(gradients: list[torch.Tensor], model: nn.Module) -> bool:
    return all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


@ranks(2)
def test_weights_with_mixed_precision(rank: int) -> None:
    rows = [[5, 2], [1]]
    precision = paceline.Precision(param=torch.bfloat16, reduce=torch.float32)
    model = paceline.replicate(small_model(), precision=precision)
    run_weighted(model, mine(rows))
    for parameter, expected in zip(
        model.parameters(), expected_of(small_model(), rows).values(), strict=True
    ):
        assert torch.allclose(parameter.grad, expected, atol=float(expected.abs().max()) * 3e-2, rtol=0)


@ranks(4)
def test_weights_over_one_dimension_of_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = paceline.replicate(small_model(), mesh=mesh["dp"])
    with paceline.weight(model, len(cut(ROWS)[rank // 2][0])):
        loss_of(model, cut(ROWS)[rank // 2][0]).backward()
    assert verdict(model, expected_of(small_model(), ROWS)) == EQUAL


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(12, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words))


@ranks(2)
def test_weights_with_sparse_gradients(rank: int) -> None:
    words = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([3])]
    model = paceline.replicate(Words())
    alone = Words()
    loss_of(alone, torch.cat(words)).backward()
    for _ in range(2):
        model.zero_grad()
        with paceline.weight(model, len(words[rank])):
            loss_of(model, words[rank]).backward()
        assert torch.allclose(
            model.table.weight.grad.to_dense(), alone.table.weight.grad.to_dense(), atol=1e-6
        )
        assert torch.allclose(model.head.weight.grad, alone.head.weight.grad, atol=1e-6)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True).tanh()
        return checkpoint(self.layer, x, use_reentrant=True)


@ranks(2)
def test_weights_with_gradients_that_come_late(rank: int) -> None:
    model = paceline.replicate(Checkpointed(), bucket_mb=1e-6)
    run_weighted(model, mine([[5, 1], [1]]))
    assert verdict(model, expected_of(Checkpointed(), [[5, 1], [1]])) == EQUAL


@ranks(2)
def test_a_weighted_backward_adds_to_gradients_that_are_agreed_on(rank: int) -> None:
    model = paceline.replicate(small_model())
    for _ in range(2):
        run_weighted(model, mine(ROWS))
    twice = {name: 2 * g for name, g in expected_of(small_model(), ROWS).items() if g is not None}
    assert verdict(model, twice) == EQUAL


@ranks(2)
def test_several_weighted_backwards_on_top_of_agreed_gradients_are_refused(rank: int) -> None:
    model = paceline.replicate(small_model())
    run_weighted(model, mine(ROWS))
    with pytest.raises(ValueError, match="on top of gradients that are reduced already"):
        run_weighted(model, mine([[2, 1], [1, 1]]))


@ranks(2)
def test_zeros_left_by_zero_grad_are_no_gradients(rank: int) -> None:
    rows = [[2, 1], [1, 1]]
    model = paceline.replicate(small_model())
    for _ in range(2):
        run_weighted(model, mine(rows))
        assert verdict(model, expected_of(small_model(), rows)) == EQUAL
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_what_zero_grad_drops_before_the_reduction_does_not_count(set_to_none: bool) -> None:
    model = paceline.replicate(small_model())
    with paceline.no_sync(model), paceline.weight(model, 100):
        loss_of(model, batch(3)).backward()
    model.zero_grad(set_to_none=set_to_none)
    run_weighted(model, mine(ROWS))
    assert verdict(model, expected_of(small_model(), ROWS)) == EQUAL


@ranks(2)
def test_a_tensor_of_one_element_is_a_weight(rank: int) -> None:
    model = paceline.replicate(small_model())
    (piece,) = mine(ROWS)
    with paceline.weight(model, torch.tensor(len(piece))):
        loss_of(model, piece).backward()
    assert verdict(model, expected_of(small_model(), ROWS)) == EQUAL


def test_a_process_alone_gets_the_same_as_many() -> None:
    rows = [[5, 1, 2]]
    model = paceline.replicate(small_model())
    whole = torch.cat(cut(rows)[0])
    expected = reference(small_model(), lambda m: loss_of(m, whole).backward())
    handle = paceline.replica(model)
    with handle.accumulate(3):
        for piece in cut(rows)[0]:
            with handle.weight(len(piece)):
                loss_of(model, piece).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-6)
    handle.skip()
    handle.detach()


# ---- leaving batches out -----------------------------------------------------------------------------------


@on_both
@ranks(3)
def test_skip_is_a_step_of_weight_zero_everywhere(library: Library, rank: int) -> None:
    model = small_model()
    wrapped = library.wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    pieces = batch(9).chunk(3)
    for step in range(4):
        optimizer.zero_grad()
        left_out = step % 3
        rest = torch.cat([piece for r, piece in enumerate(pieces) if r != left_out])
        expected = reference(model, lambda m, rest=rest: loss_of(m, rest).backward())
        if rank == left_out:
            paceline.skip(wrapped)
        else:
            loss_of(wrapped, pieces[rank]).backward()
        assert verdict(wrapped, expected) == EQUAL
        optimizer.step()


@ranks(2)
def test_skip_goes_with_weights_and_with_accumulation(rank: int) -> None:
    model = paceline.replicate(small_model())
    handle = paceline.replica(model)
    rows = [[2, 3], [4]]
    with handle.accumulate(2):
        for piece in mine(rows):
            with handle.weight(len(piece)):
                loss_of(model, piece).backward()
        if rank == 1:
            handle.skip()
    assert verdict(model, expected_of(small_model(), rows)) == EQUAL


@ranks(2)
def test_if_all_skip_there_is_no_gradient(rank: int) -> None:
    model = paceline.replicate(small_model())
    paceline.skip(model)
    assert all(p.grad is None for p in model.parameters())
    assert paceline.replica(model).step == 1


@ranks(2)
def test_who_skips_has_not_left_a_parameter_unused(rank: int) -> None:
    model = paceline.replicate(small_model(), unused="error")
    if rank:
        paceline.skip(model)
    else:
        loss_of(model, batch(2)).backward()


@ranks(2)
def test_a_rank_that_skips_and_does_not_step_is_found_out(rank: int) -> None:
    model = paceline.replicate(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank:
        paceline.skip(model)
    else:
        loss_of(model, batch(2)).backward()
        optimizer.step()
    with pytest.raises(paceline.RanksDisagree) as caught:
        loss_of(model, batch(2)).backward()
    assert "rank 0 has made 1, rank 1 has made 0" in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1


# ---- bad input: the same on every rank ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (-1, "ValueError: a weight has to be a finite number that is not negative, got -1"),
        (float("nan"), "ValueError: a weight has to be a finite number that is not negative, got nan"),
        (float("inf"), "ValueError: a weight has to be a finite number that is not negative, got inf"),
        ("5", "TypeError: a weight has to be a number, got str"),
        (None, "TypeError: a weight has to be a number, got NoneType"),
        (True, "TypeError: a weight has to be a number, got bool"),
    ],
    ids=str,
)
@ranks(2)
def test_a_bad_weight_is_refused_on_every_rank(given: object, words: str, rank: int) -> None:
    model = paceline.replicate(small_model())
    kinds = (ValueError, TypeError) if rank else paceline.PeerFailed
    with pytest.raises(kinds) as caught:
        with paceline.weight(model, given if rank else 3):
            loss_of(model, batch(2)).backward()
    assert words.split(": ", 1)[1] in str(caught.value)
    if not rank:
        assert (caught.value.rank, caught.value.text) == (1, words)
    run_weighted(model, mine(ROWS))
    assert verdict(model, expected_of(small_model(), ROWS)) == EQUAL


@ranks(3)
def test_weights_on_some_ranks_only_are_refused_on_every_rank(rank: int) -> None:
    model = paceline.replicate(small_model())
    with pytest.raises(paceline.RanksDisagree) as caught:
        with paceline.weight(model, 5) if rank == 1 else contextlib.nullcontext():
            loss_of(model, batch(2)).backward()
    assert "only some ranks have given a weight: rank 1 has 5, ranks 0, 2 none" in str(caught.value)
    assert len(set(gather(str(caught.value)))) == 1
    model.zero_grad()
    loss_of(model, batch(2)).backward()


@ranks(2)
def test_weights_on_some_backwards_of_a_step_only_are_refused(rank: int) -> None:
    model = paceline.replicate(small_model())
    with pytest.raises(ValueError if rank else paceline.PeerFailed, match="some backwards of this step"):
        if rank:
            with paceline.no_sync(model):
                loss_of(model, batch(2)).backward()
        with paceline.weight(model, 2):
            loss_of(model, batch(2)).backward()


@ranks(2)
def test_a_sum_takes_no_weights(rank: int) -> None:
    model = paceline.replicate(small_model(), reduce="sum")
    with pytest.raises(ValueError, match=r"weight\(\) needs a mean over the ranks"):
        run_weighted(model, mine(ROWS))


@ranks(2)
def test_reduce_sum_adds_up(rank: int) -> None:
    model = paceline.replicate(small_model(), reduce="sum")
    (piece,) = mine(ROWS)
    (loss_of(model, piece) * len(piece) / 6).backward()
    assert verdict(model, expected_of(small_model(), ROWS)) == EQUAL


def test_reduce_is_read() -> None:
    with pytest.raises(ValueError, match='reduce has to be "mean" or "sum"'):
        paceline.replicate(small_model(), reduce="avg")
    with pytest.raises(ValueError, match="not both"):
        paceline.replicate(small_model(), reduce="sum", hook=in_dtype(torch.bfloat16))


@ranks(2)
def test_skip_inside_a_backward_is_refused_on_every_rank(rank: int) -> None:
    model = paceline.replicate(small_model())
    loss = loss_of(model, batch(2))
    if rank:
        loss.register_hook(lambda _: paceline.skip(model))
    with pytest.raises(RuntimeError if rank else paceline.PeerFailed, match=r"skip\(\) inside a backward"):
        loss.backward()


@ranks(2)
def test_a_weight_is_nobody_elses(rank: int) -> None:
    """Another model in the same backward, a parameter that is left out, an input: they are not scaled."""
    model = paceline.replicate(small_model(), left_out=["2.bias"])
    other, x = small_model(2), batch(2).requires_grad_()
    want_other = reference(other, lambda m: [loss_of(m, batch(2)).backward() for _ in range(2)])
    alone = small_model()
    for _ in range(2):
        loss_of(alone, x).backward()
    want_x, x.grad = x.grad, None
    for sync, weight in ((False, 2), (True, 5)):
        with paceline.no_sync(model, not sync), paceline.weight(model, weight):
            (loss_of(model, x) + loss_of(other, batch(2))).backward()
    assert torch.allclose(x.grad, want_x)
    assert torch.allclose(model[2].bias.grad, alone[2].bias.grad)
    for name, parameter in other.named_parameters():
        assert torch.allclose(parameter.grad, want_other[name])


@ranks(2)
def test_a_weight_around_the_backward_of_another_model_does_no_harm(rank: int) -> None:
    one, two = (paceline.replicate(small_model(seed)) for seed in (1, 2))
    expected = reference(small_model(2), lambda m: loss_of(m, batch(4)).backward())
    for weight in (2, 4):
        with paceline.no_sync(one, weight == 2), paceline.weight(one, weight):
            loss_of(one, batch(2)).backward()
            two.zero_grad()
            loss_of(two, batch(4)).backward()
    assert verdict(two, expected) == EQUAL


# ---- the arithmetic ----------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.lists(st.integers(0, 50), max_size=4), min_size=1, max_size=4)


@given(WEIGHTS)
def test_the_shares_of_all_ranks_give_the_weighted_mean(weights: list[list[int]]) -> None:
    sums, openings, units = [], [], []
    for rank, batches in enumerate(weights):
        ledger = Ledger()
        total = 0.0
        for place, weight in enumerate(batches):
            ledger.now = weight
            total = total * ledger.take_unit() + (_gradient(rank, place) if weight else 0.0)
            ledger.add()
        sums.append(total)
        units.append(ledger.unit)
        kind = Kind.BACKWARD if batches else Kind.EMPTY
        openings.append(Opening(0, b"12345678", kind=kind, weight=ledger.total))
    everything = sum(map(sum, weights))
    if not any(weights) or not everything:
        return
    shares = [share_of(rank, openings, unit) for rank, unit in enumerate(units)]
    got = sum(share.factor * value for share, value in zip(shares, sums, strict=True)) / len(weights)
    pairs = [(w, _gradient(r, i)) for r, ws in enumerate(weights) for i, w in enumerate(ws)]
    assert got == pytest.approx(sum(w * g for w, g in pairs) / everything)


def _gradient(rank: int, place: int) -> float:
    return 1.0 + rank * 7 + place * 3


@given(st.lists(st.sampled_from([Kind.BACKWARD, Kind.SKIPPED, Kind.JOINED]), min_size=1, max_size=5))
def test_who_skips_or_has_joined_counts_for_nothing(kinds: list[Kind]) -> None:
    openings = [Opening(0, b"12345678", kind=kind) for kind in kinds]
    shares = [share_of(rank, openings, None) for rank in range(len(kinds))]
    present = [rank for rank, kind in enumerate(kinds) if kind is Kind.BACKWARD]
    assert all(list(share.counted) == present for share in shares)
    if present:
        assert sum(share.factor for share in shares) / len(kinds) == pytest.approx(1)


def test_weights_are_read_as_numbers() -> None:
    assert read_weight(3) == read_weight(3.0) == read_weight(torch.tensor(3)) == 3.0


def test_copies_do_not_inherit_a_weight() -> None:
    model = paceline.replicate(small_model())
    with paceline.weight(model, 3):
        copied = copy.deepcopy(model)
    loss_of(copied, batch(2)).backward()
    paceline.replica(model).detach()
