"""in_dtype: what travels has another dtype, what comes back has the gradients' own."""

import pytest
import torch
from torch import nn

import paceline
from paceline.comm import comm_over
from paceline.hooks import (
    Hook,
    StatefulHook,
    average,
    in_dtype,
    is_sure,
    local_sgd,
    may_join,
    name_of,
    noop,
    powersgd,
    quantized,
    total,
    way_of,
)
from paceline.testing import ranks
from tests.hooks.world import World, assert_equal, bucket_of, drawn, mean_of, reduce

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_mean_comes_back_in_the_dtype_of_the_gradients(dtype: torch.dtype, of: torch.dtype) -> None:
    gradients = [drawn(rank, of, a=(4, 5), b=(7,)) for rank in range(2)]
    world = World(2)

    results = reduce([in_dtype(dtype, average)] * 2, gradients, world=world)

    assert_equal(*results)
    assert [call.sent.dtype for call in world.calls[0]] == [dtype]
    tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(of).eps)
    for name, expected in mean_of(gradients).items():
        assert results[0][name].dtype is of
        torch.testing.assert_close(results[0][name].double(), expected, atol=tolerance, rtol=0)


def test_what_travels_is_rounded_once() -> None:
    gradients = [drawn(rank, a=(1000,)) for rank in range(3)]
    expected = sum((g["a"] * (1 / 3)).bfloat16() for g in gradients)

    results = reduce([in_dtype(torch.bfloat16)] * 3, gradients)

    torch.testing.assert_close(results[0]["a"].bfloat16(), expected, atol=0, rtol=0)


def test_sums_of_16_bit_gradients_can_be_taken_in_32() -> None:
    gradients = [{"a": torch.tensor([value], dtype=torch.bfloat16)} for value in (256.0, 1.0, 1.0)]

    plain = reduce([total] * 3, gradients)
    wide = reduce([in_dtype(torch.float32, total)] * 3, gradients)

    assert (plain[0]["a"].item(), wide[0]["a"].item()) == (256, 258)


def test_a_sum_that_a_small_dtype_cannot_hold_is_divided_before() -> None:
    gradients = [{"a": torch.tensor([60000.0])}] * 4

    assert reduce([in_dtype(torch.float16)] * 4, gradients)[0]["a"].item() == 60000


def test_gradients_that_have_the_dtype_already_are_not_copied() -> None:
    seen = []

    def inner(bucket, comm):
        seen.append(bucket)
        return average(bucket, comm)

    bucket = bucket_of(drawn(0, a=(3,)))
    in_dtype(torch.float32, inner)(bucket, World(1).comms[0])

    assert seen == [bucket]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_complex_gradients_travel_as_pairs(dtype: torch.dtype) -> None:
    gradients = [{"a": torch.randn(3, 4, dtype=torch.complex64)} for _ in range(2)]
    expected = (gradients[0]["a"] + gradients[1]["a"]) / 2
    world = World(2)

    results = reduce([in_dtype(dtype)] * 2, gradients, world=world)

    assert_equal(*results)
    assert [(call.sent.dtype, call.sent.numel()) for call in world.calls[0]] == [(dtype, 24)]
    torch.testing.assert_close(results[0]["a"], expected, atol=0.02, rtol=0)


def test_a_hook_that_looks_at_complex_gradients_is_refused() -> None:
    gradients = [{"a": torch.randn(32, 32, dtype=torch.complex64)}] * 2

    with pytest.raises(TypeError, match=r"powersgd\(.*\) looks at gradients one by one"):
        reduce([in_dtype(torch.bfloat16, powersgd(start_step=0)) for _ in range(2)], gradients)


def test_it_nests() -> None:
    gradients = [drawn(rank, torch.float64, a=(50,)) for rank in range(2)]
    world = World(2)
    hook = in_dtype(torch.float32, in_dtype(torch.bfloat16, total))

    results = reduce([hook] * 2, gradients, world=world)

    expected = sum(g["a"].float().bfloat16() for g in gradients)
    assert world.calls[0][0].sent.dtype is torch.bfloat16
    assert torch.equal(results[0]["a"], expected.double())


def test_its_name_says_what_it_does() -> None:
    assert name_of(in_dtype(torch.bfloat16)) == "in_dtype(torch.bfloat16, average)"
    assert name_of(in_dtype(torch.float16, powersgd(rank=3))).startswith(
        "in_dtype(torch.float16, powersgd(rank=3, start_step=10, "
    )


def test_it_is_as_sure_as_the_hook_inside() -> None:
    def unsure(bucket, comm):
        return average(bucket, comm)

    assert is_sure(in_dtype(torch.bfloat16, noop))
    assert is_sure(in_dtype(torch.bfloat16, quantized()))
    assert not is_sure(in_dtype(torch.bfloat16, unsure))


@pytest.mark.parametrize("inner", [average, total, noop], ids=lambda inner: inner.__name__)
def test_gradients_that_are_in_no_bucket_go_the_way_of_the_hook_inside(inner: Hook) -> None:
    assert way_of(in_dtype(torch.bfloat16, in_dtype(torch.float32, inner))) == way_of(inner)


def test_the_hook_inside_may_change_its_way_from_step_to_step() -> None:
    hook = in_dtype(torch.bfloat16, local_sgd(start_step=2))

    ways = [(hook.begin(), way_of(hook))[1] for _ in range(4)]

    assert ways == ["mean", "mean", "own", "own"]


def test_whether_ranks_may_run_out_of_batches_is_the_hook_insides_affair() -> None:
    assert may_join(in_dtype(torch.bfloat16, average))
    assert may_join(in_dtype(torch.bfloat16, quantized()))
    assert not may_join(in_dtype(torch.bfloat16, local_sgd()))


@ranks(2)
def test_join_is_refused_around_a_hook_that_needs_every_rank(rank: int) -> None:
    model = paceline.DistributedDataParallel(nn.Linear(4, 2))
    paceline.replica(model.module).set_hook(in_dtype(torch.bfloat16, local_sgd()))

    with pytest.raises(
        ValueError, match=r"in_dtype\(torch.bfloat16, local_sgd\(.* cannot be used inside join"
    ):
        with model.join():
            raise AssertionError


@ranks(2)
@pytest.mark.parametrize("how", ["set_hook", "average_now"])
def test_weights_that_the_hook_inside_lets_differ_are_made_equal(rank: int, how: str) -> None:
    model = paceline.replicate(nn.Linear(4, 2), hook=in_dtype(torch.bfloat16, local_sgd(every=100)))
    model(torch.full((3, 4), rank + 1.0)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    comm, handle = comm_over(None), paceline.replica(model)
    before = comm.gather(model.weight.detach().clone()).wait()
    assert not torch.equal(before[0], before[1])

    if how == "set_hook":
        handle.set_hook(average)
    else:
        handle.hook.average_now()

    after = comm.gather(model.weight.detach().clone()).wait()
    assert torch.equal(after[0], after[1])
    torch.testing.assert_close(after[0], before.mean(dim=0))


@ranks(2)
def test_sparse_gradients_are_added_up_beside_a_sum(rank: int) -> None:
    torch.manual_seed(0)
    model = paceline.replicate(nn.Embedding(4, 2, sparse=True), hook=in_dtype(torch.bfloat16, total))

    model(torch.tensor([rank, 2])).sum().backward()

    assert model.weight.grad.to_dense()[:, 0].tolist() == [1, 1, 2, 0]


def test_the_memory_of_the_hook_inside_is_its_own() -> None:
    def step(hook, seed):
        return reduce([hook], [drawn(seed, a=(64, 64))])[0]["a"]

    hook = in_dtype(torch.bfloat16, quantized(bits=4))
    step(hook, 0)
    resumed = in_dtype(torch.bfloat16, quantized(bits=4))
    resumed.load_state_dict(hook.state_dict())
    fresh = in_dtype(torch.bfloat16, quantized(bits=4))

    assert isinstance(hook, StatefulHook)
    assert not isinstance(in_dtype(torch.bfloat16, average), StatefulHook)
    expected = step(hook, 1)
    assert torch.equal(step(resumed, 1), expected)
    assert not torch.equal(step(fresh, 1), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("bfloat16",), TypeError, "in_dtype() takes a torch.dtype, got str"),
        ((torch.int8,), ValueError, "not as torch.int8"),
        ((torch.complex64,), ValueError, "not as torch.complex64"),
        ((torch.float8_e4m3fn,), ValueError, "not as torch.float8_e4m3fn"),
        (
            (torch.bfloat16, 3),
            TypeError,
            "in_dtype() takes another hook inside, a function of (bucket, comm), got int",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[object, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        in_dtype(*arguments)

    assert text in str(caught.value)


@ranks(2)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gloo_takes_every_dtype(rank: int, dtype: torch.dtype) -> None:
    gradients = [drawn(r, a=(300,), b=(20, 3)) for r in range(2)]
    comm = comm_over(None)
    bucket = bucket_of(gradients[rank])

    result = in_dtype(dtype)(bucket, comm).wait()

    assert result is bucket.flat
    for name, view in zip(bucket.names, bucket.gradients(), strict=True):
        expected = mean_of(gradients)[name].float()
        torch.testing.assert_close(view, expected, atol=4 * torch.finfo(dtype).eps + 1e-6, rtol=0)
    rows = comm.gather(result).wait()
    assert torch.equal(rows[0], rows[1])
