"""Bar 10: what a step with 1,000 parameters issues. Counts are exact, so they are tests."""

import torch
from torch import nn

from benchmarks.counts import PARAMETERS, count_ours, many, many_loss
from paceline.testing import ranks

SMALL_BUCKETS = {"bucket_mb": 0.05, "first_bucket_mb": 0.05}


@ranks(2)
def test_a_step_issues_one_copy_and_one_division_per_bucket(rank):
    counts = count_ours(many, many_loss, **SMALL_BUCKETS)

    assert counts.buckets == 5
    # Gloo cannot average, so there the division is an operator of its own; NCCL needs none.
    assert counts.kernels <= 2 * counts.buckets, counts.operators
    assert max(counts.operators.values()) <= counts.buckets, counts.operators


@ranks(2)
def test_a_step_in_one_bucket_issues_no_operator_per_parameter(rank):
    counts = count_ours(many, many_loss)

    assert counts.buckets == 1
    assert counts.kernels <= counts.buckets + 1, counts.operators


@ranks(2)
def test_a_step_starts_one_collective_per_bucket(rank):
    counts = count_ours(many, many_loss, **SMALL_BUCKETS)

    assert counts.collectives == {"allreduce_": counts.buckets}


@ranks(2)
def test_autograd_calls_us_once_per_parameter_and_once_at_the_end(rank):
    counts = count_ours(many, many_loss, **SMALL_BUCKETS)

    assert counts.calls == PARAMETERS + 1


@ranks(2)
def test_all_buffers_together_add_one_collective(rank):
    def build() -> nn.Module:
        return nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(10)))  # float and integer buffers

    def loss(model: nn.Module) -> torch.Tensor:
        return model(torch.arange(32.0).view(4, 8)).square().sum()

    counts = count_ours(build, loss)

    assert counts.collectives == {"allreduce_": counts.buckets, "broadcast_": 1}


@ranks(1)
def test_a_group_of_one_issues_no_more_than_a_copy_per_bucket_and_a_division(rank):
    counts = count_ours(many, many_loss)

    assert counts.kernels <= counts.buckets + 1, counts.operators
    assert sum(counts.collectives.values()) <= counts.buckets
