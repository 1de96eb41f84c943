"""Sparse gradients: rows are gathered, the result is what one process would have got."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.hooks import Hook, noop, total
from paceline.testing import ranks

ROWS, WIDTH = 10, 3


class Bag(nn.Module):
    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words))


def words_of(rank: int) -> torch.Tensor:
    return torch.tensor([[0, 1, 1], [1, 5, 9]])[rank]


def reference(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Dense gradients of one process, as the mean over the ranks' batches."""
    model = Bag(sparse=False)
    (sum(model(batch).square().sum() for batch in batches) / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@ranks(2)
def test_a_sparse_gradient_is_the_mean_over_the_ranks_and_stays_sparse(rank: int) -> None:
    model = paceline.replicate(Bag())

    for _ in range(3):  # the plan is re-made after the first one
        model.zero_grad()
        model(words_of(rank)).square().sum().backward()

    got = model.table.weight.grad
    assert got.is_sparse
    assert got.is_coalesced()
    assert got.indices().tolist() == [[0, 1, 5, 9]]
    expected = reference([words_of(0), words_of(1)])
    torch.testing.assert_close(got.to_dense(), expected["table.weight"])
    torch.testing.assert_close(model.head.weight.grad, expected["head.weight"])


@ranks(2)
def test_a_table_that_is_known_to_be_sparse_takes_no_room_in_a_bucket(rank: int) -> None:
    model = paceline.replicate(Bag())

    plan = paceline.replica(model).plan

    assert [plan.specs[index].name for index in plan.sparse] == ["table.weight"]
    assert sum(bucket.numel for bucket in plan.buckets) == WIDTH * 2 + 2


@ranks(2)
def test_sparse_gradients_of_a_functional_embedding_are_found_when_they_come(rank: int) -> None:
    class Functional(Bag):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(F.embedding(words, self.table.weight, sparse=True))

    model = paceline.replicate(Functional(sparse=False))
    expected = reference([words_of(0), words_of(1)])["table.weight"]

    for _ in range(2):
        model.zero_grad()
        model(words_of(rank)).square().sum().backward()
        assert model.table.weight.grad.is_sparse
        torch.testing.assert_close(model.table.weight.grad.to_dense(), expected)

    assert len(paceline.replica(model).plan.sparse) == 1


@ranks(2)
def test_a_rank_without_rows_adds_nothing(rank: int) -> None:
    model = paceline.replicate(Bag())
    words = words_of(0) if rank == 0 else torch.empty(0, dtype=torch.int64)

    model(words).square().sum().backward()

    expected = reference([words_of(0), torch.empty(0, dtype=torch.int64)])
    torch.testing.assert_close(model.table.weight.grad.to_dense(), expected["table.weight"])


@ranks(2)
def test_a_table_that_one_rank_does_not_use_is_still_reduced(rank: int) -> None:
    model = paceline.replicate(Bag())
    used = model(words_of(0)).square().sum()
    loss = used if rank == 0 else model.head(torch.zeros(1, WIDTH)).square().sum()

    loss.backward()

    model_alone = Bag(sparse=False)
    (model_alone(words_of(0)).square().sum() / 2).backward()
    torch.testing.assert_close(model.table.weight.grad.to_dense(), model_alone.table.weight.grad)


@ranks(2)
def test_a_table_that_no_rank_uses_keeps_no_gradient(rank: int) -> None:
    model = paceline.replicate(Bag())

    model.head(torch.ones(1, WIDTH)).sum().backward()

    assert model.table.weight.grad is None


@ranks(2)
def test_sparse_on_one_rank_and_dense_on_the_other_are_added_up(rank: int) -> None:
    class Either(Bag):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(F.embedding(words, self.table.weight, sparse=rank == 0))

    model = paceline.replicate(Either(sparse=False))
    expected = reference([words_of(0), words_of(1)])["table.weight"]

    for _ in range(3):
        model.zero_grad()
        model(words_of(rank)).square().sum().backward()
        torch.testing.assert_close(model.table.weight.grad.to_dense(), expected)


@ranks(2)
def test_rows_of_several_local_backwards_are_reduced_together(rank: int) -> None:
    model = paceline.replicate(Bag())

    with paceline.no_sync(model):
        model(words_of(rank)).square().sum().backward()
    model(words_of(1 - rank)).square().sum().backward()

    expected = reference([words_of(0), words_of(1)])["table.weight"]
    torch.testing.assert_close(model.table.weight.grad.to_dense(), expected * 2)


@ranks(2)
def test_a_step_on_local_rows_is_refused(rank: int) -> None:
    model = paceline.replicate(Bag())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.no_sync(model):
        model(words_of(rank)).square().sum().backward()

    with pytest.raises(paceline.UnsyncedGradients, match="table.weight"):
        optimizer.step()


@ranks(2)
def test_training_with_sparse_adam_equals_one_process(rank: int) -> None:
    model = paceline.replicate(Bag())
    alone = Bag()
    optimizers = [torch.optim.SparseAdam([m.table.weight], lr=0.1) for m in (model, alone)]

    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(words_of(rank)).square().sum().backward()
        (sum(alone(words_of(r)).square().sum() for r in range(2)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()

    torch.testing.assert_close(model.table.weight, alone.table.weight)


@pytest.mark.parametrize(("hook", "factor"), [(total, 2.0), (noop, None)])
@ranks(2)
def test_rows_are_reduced_as_the_hook_reduces(rank: int, hook: Hook, factor: float | None) -> None:
    model = paceline.replicate(Bag(), hook=hook)

    model(words_of(rank)).square().sum().backward()

    every = reference([words_of(0), words_of(1)]) if factor else reference([words_of(rank)])
    expected = every["table.weight"] * (factor or 1)
    torch.testing.assert_close(model.table.weight.grad.to_dense(), expected)
