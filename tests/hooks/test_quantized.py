"""Gradients as small integers: how far off, what is kept for later, and who sees what."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import comm_over
from paceline.hooks import in_dtype, is_sure, name_of, quantized
from paceline.testing import ranks
from tests.hooks.world import Gradients, World, assert_equal, bucket_of, drawn, mean_of, reduce

LEVELS = {8: 127, 4: 7}
SHAPES: dict[str, tuple[int, ...]] = {"a": (30, 21), "b": (7,), "c": ()}

both_sizes = pytest.mark.parametrize("bits", [8, 4])


def fresh(count: int = 2, **arguments: Any) -> list[Any]:
    return [quantized(**{"block": 64, **arguments}) for _ in range(count)]


def step(hooks: Sequence[Any], seed: int, dtype: torch.dtype = torch.float32) -> list[Gradients]:
    return reduce(hooks, [drawn(1000 * seed + r, dtype, **SHAPES) for r in range(len(hooks))])


def by_hand(inputs: Sequence[np.ndarray], bits: int, block: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the mean of the rounded inputs, and what each rank's rounding left out."""
    seen, left = [], []
    for numbers in inputs:
        out = np.empty_like(numbers)
        for start in range(0, len(numbers), block):
            piece = numbers[start : start + block]
            unit = max(np.abs(piece).max() / LEVELS[bits], np.finfo(piece.dtype).tiny)
            out[start : start + block] = np.round(piece / unit) * unit
        seen.append(out)
        left.append(numbers - out)
    return sum(seen) / len(seen), left


@both_sizes
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("block", [16, 64, 1024])
def test_it_matches_rounding_by_hand(bits: int, size: int, block: int) -> None:
    hooks = fresh(size, bits=bits, block=block)
    left: list[Any] = [0.0] * size

    for count in range(4):
        gradients = [drawn(10 * count + r, torch.float64, **SHAPES) for r in range(size)]
        inputs = [
            torch.cat([g.flatten() for g in gradient.values()]).numpy() + e
            for gradient, e in zip(gradients, left, strict=True)
        ]
        expected, left = by_hand(inputs, bits, block)
        for result in reduce(hooks, gradients):
            got = torch.cat([g.flatten() for g in result.values()]).numpy()
            np.testing.assert_allclose(got, expected, atol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([4, 8]), st.sampled_from([1e-30, 1.0, 1e30]))
@settings(max_examples=25, deadline=None)
def test_no_gradient_is_lost_only_late(seed: int, size: int, bits: int, scale: float) -> None:
    hooks = fresh(size, bits=bits)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    got = copy.deepcopy(given)

    for count in range(4):
        gradients = [drawn(seed + 100 * count + r, torch.float64, **SHAPES) for r in range(size)]
        gradients = [{name: scale * g for name, g in gradient.items()} for gradient in gradients]
        results = reduce(hooks, gradients)
        for name, mean in mean_of(gradients).items():
            given[name] += mean
            got[name] += results[0][name]

    residuals = mean_of([hook.state_dict()["residuals"] for hook in hooks])
    for name, total in given.items():
        torch.testing.assert_close(got[name] + residuals[name], total, atol=1e-9 * scale, rtol=0)


@both_sizes
def test_it_is_off_by_half_a_level_at_most(bits: int) -> None:
    gradients = [drawn(r, a=(64,)) for r in range(2)]

    results = reduce(fresh(bits=bits), gradients)

    level = sum(g["a"].abs().max().item() / LEVELS[bits] for g in gradients) / 2
    error = (results[0]["a"] - mean_of(gradients)["a"]).abs().max().item()
    assert 0 < error <= level / 2 * 1.0001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@both_sizes
def test_ranks_get_the_same_bits(dtype: torch.dtype, bits: int) -> None:
    hooks = fresh(3, bits=bits)

    for count in range(3):
        one, *others = step(hooks, count, dtype)
        for other in others:
            assert_equal(one, other)
        assert all(gradient.dtype is dtype for gradient in one.values())


@pytest.mark.parametrize(("bits", "nbytes"), [(8, 4096 + 4 * 4), (4, 2048 + 4 * 4)])
def test_a_bucket_travels_in_one_message_of_codes_and_scales(bits: int, nbytes: int) -> None:
    world = World(2)

    reduce([quantized(bits=bits) for _ in range(2)], [drawn(r, a=(64, 64)) for r in range(2)], world=world)

    assert world.nbytes() == [nbytes]


def test_a_large_number_coarsens_its_own_block_only() -> None:
    gradient = torch.full((32,), 0.01)
    gradient[0] = 1000
    hooks = [quantized(bits=4, block=16) for _ in range(2)]

    result = reduce(hooks, [{"a": gradient}] * 2)[0]["a"]

    assert torch.equal(result[:16], torch.tensor([1000.0] + [0] * 15))
    torch.testing.assert_close(result[16:], gradient[16:])


@both_sizes
@pytest.mark.parametrize("value", [0.0, 1e-42])
def test_blocks_of_nothing_are_nothing(bits: int, value: float) -> None:
    result = reduce(fresh(bits=bits), [{"a": torch.full((100,), value)}] * 2)[0]["a"]

    assert result.abs().max() <= 1e-37


def test_without_error_feedback_nothing_is_remembered() -> None:
    hooks = fresh(bits=4, error_feedback=False)

    one = step(hooks, 1)
    again = step(hooks, 1)

    assert_equal(one[0], again[0])
    assert hooks[0].state_dict()["residuals"] == {}


@both_sizes
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_no_number_shows_and_leaves_no_trace(bits: int, poison: float) -> None:
    hooks = fresh(bits=bits)
    gradients = [drawn(r, **SHAPES) for r in range(2)]
    gradients[1]["a"][0, 0] = poison

    poisoned = reduce(hooks, gradients)
    after = step(hooks, 2)

    assert not poisoned[0]["a"][0, 0].isfinite()
    assert poisoned[0]["a"].view(-1)[64:].isfinite().all()  # the other blocks
    for hook, result in zip(hooks, after, strict=True):
        for tensors in (result, hook.state_dict()["residuals"]):
            assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_complex_gradients_are_rounded_as_pairs() -> None:
    gradients = [{"a": torch.randn(20, 3, dtype=torch.complex64)} for _ in range(2)]
    hooks = fresh()

    results = reduce(hooks, gradients)

    residuals = [hook.state_dict()["residuals"]["a"] for hook in hooks]
    expected = (gradients[0]["a"] + gradients[1]["a"]) / 2
    torch.testing.assert_close(results[0]["a"] + (residuals[0] + residuals[1]) / 2, expected)


def test_a_saved_state_resumes_bit_for_bit_also_with_another_plan(tmp_path: Any) -> None:
    hooks = fresh(bits=4)
    for count in range(3):
        step(hooks, count)
    for rank, hook in enumerate(hooks):
        torch.save(hook.state_dict(), tmp_path / str(rank))
    resumed = fresh(bits=4)
    for rank, hook in enumerate(resumed):
        hook.load_state_dict(torch.load(tmp_path / str(rank), weights_only=True))

    gradients = [drawn(r, **SHAPES) for r in range(2)]
    plan = [[{name: g[name]} for g in gradients] for name in ("c", "a", "b")]
    expected = reduce(hooks, *plan)

    assert_equal(reduce(resumed, *plan)[1], expected[1])
    assert not torch.equal(reduce(fresh(bits=4), *plan)[1]["a"], expected[1]["a"])


def test_a_dropped_step_is_forgotten() -> None:
    hooks = fresh(bits=4)
    step(hooks, 0)

    for hook in hooks:
        hook.forget()

    assert_equal(step(hooks, 7)[0], step(fresh(bits=4), 7)[0])


def test_it_works_inside_another_dtype() -> None:
    hooks = [in_dtype(torch.float32, hook) for hook in fresh()]

    results = step(hooks, 0, torch.bfloat16)

    assert_equal(*results)
    assert hooks[0].state_dict()["residuals"]["a"].dtype is torch.float32


def test_its_name_has_every_setting_and_it_is_sure() -> None:
    assert name_of(quantized(bits=4)) == "quantized(bits=4, block=1024, error_feedback=True)"
    assert is_sure(quantized())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bits": 3}, "quantized() sends 8 or 4 bits for a number, got 3"),
        ({"bits": 8.0}, "quantized() sends 8 or 4 bits for a number, got 8.0"),
        ({"bits": "8"}, "quantized() sends 8 or 4 bits for a number, got '8'"),
        ({"block": 0}, "quantized() needs block to be a whole number of 16 or more, got 0"),
        ({"block": 24}, "quantized() needs block to be a multiple of 16, got 24"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        quantized(**arguments)

    assert text in str(caught.value)


@ranks(2)
@both_sizes
def test_gloo_carries_it(rank: int, bits: int) -> None:
    comm = comm_over(None)
    hook, twins = quantized(bits=bits, block=64), fresh(bits=bits)
    for count in range(3):
        gradients = [drawn(10 * count + r, **SHAPES) for r in range(2)]
        bucket = bucket_of(gradients[rank])

        hook.begin()
        hook(bucket, comm).wait()

        assert_equal(dict(zip(bucket.names, bucket.gradients(), strict=True)), reduce(twins, gradients)[rank])
