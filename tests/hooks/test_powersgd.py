"""PowerSGD: the low-rank mean, what it misses, and what it remembers."""

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import comm_over
from paceline.hooks import average, in_dtype, name_of, noop, powersgd, quantized, total, way_of
from paceline.testing import ranks
from tests.hooks.world import Gradients, World, assert_equal, bucket_of, drawn, mean_of, reduce

MIXED: dict[str, tuple[int, ...]] = {
    "a": (24, 20), "bias": (24,), "b": (24, 20), "conv": (16, 4, 3, 3), "tiny": (2, 2), "scale": ()
}  # fmt: skip
MATRICES = ("a", "b", "conv")


class Reference:
    """The algorithm as the paper has it, on the stacked gradients of all ranks, in float64."""

    def __init__(self, size: int, factors: dict[str, np.ndarray], *, feedback: bool = True) -> None:
        self.factors = dict(factors)
        self.errors = [{name: np.zeros(1) for name in factors} for _ in range(size)]
        self.feedback = feedback

    def step(self, gradients: Sequence[Gradients]) -> dict[str, np.ndarray]:
        results = {}
        for name in gradients[0]:
            given = [g[name].double().numpy() for g in gradients]
            if name not in self.factors:
                results[name] = sum(given) / len(given)
                continue
            shape = given[0].shape
            inputs = [g.reshape(shape[0], -1) + e[name] for g, e in zip(given, self.errors, strict=True)]
            mean = sum(inputs) / len(inputs)
            basis, _ = np.linalg.qr(mean @ self.factors[name])
            self.factors[name] = mean.T @ basis
            approximation = basis @ self.factors[name].T
            if self.feedback:
                for error, own in zip(self.errors, inputs, strict=True):
                    error[name] = own - approximation
            results[name] = approximation.reshape(shape)
        return results


def columns_of(name: str) -> int:
    return int(np.prod(MIXED[name][1:]))


def starting_with(factors: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, Any]:
    """Return a state with chosen factors and nothing else."""
    return {"hook": "PowerSGD", "rank": rank, "size": size, "step": 0, "residuals": {}, "factors": factors}


def step(
    hooks: Sequence[Any], seed: int, dtype: torch.dtype = torch.float32, **shapes: Any
) -> list[Gradients]:
    return reduce(hooks, [drawn(1000 * seed + r, dtype, **(shapes or MIXED)) for r in range(len(hooks))])


def fresh(count: int = 2, **arguments: Any) -> list[Any]:
    return [powersgd(**{"start_step": 0, "min_compression": 1.5, **arguments}) for _ in range(count)]


# ---- the mathematics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_matches_the_paper_on_stacked_gradients(rank: int, size: int, feedback: bool) -> None:
    factors = {name: drawn(9, torch.float64, q=(rank, columns_of(name)))["q"] for name in MATRICES}
    reference = Reference(size, {n: f.numpy().T for n, f in factors.items()}, feedback=feedback)
    hooks = fresh(size, rank=rank, min_compression=1, error_feedback=feedback)
    for r, hook in enumerate(hooks):
        hook.load_state_dict(starting_with(factors, r, size))

    for count in range(6):
        gradients = [drawn(100 * count + r, torch.float64, **MIXED) for r in range(size)]
        results = reduce(hooks, gradients)
        expected = reference.step(gradients)

        for result in results:
            for name, values in expected.items():
                np.testing.assert_allclose(result[name].numpy(), values, atol=1e-10, err_msg=name)


def test_the_batched_form_is_one_square_matrix() -> None:
    shapes = {"a": (30, 20), "b": (25,)}
    reference = None
    hooks = fresh(batched=True)

    for count in range(4):
        gradients = [drawn(100 * count + r, torch.float64, **shapes) for r in range(2)]
        flat = [torch.cat([g.flatten() for g in gradient.values()]) for gradient in gradients]
        square = [{"m": f.view(25, 25)} for f in flat]
        results = reduce(hooks, gradients)
        if reference is None:  # its first factor is the hook's own: both start from the same random numbers
            hook = powersgd(start_step=0, batched=True)
            hook.step = 1
            reduce([hook], [{name: torch.zeros_like(g) for name, g in gradients[0].items()}])
            (factor,) = hook.state_dict()["factors"].values()
            reference = Reference(2, {"m": factor.numpy().T})

        expected = torch.from_numpy(reference.step(square)["m"]).flatten()
        for result in results:
            got = torch.cat([result[name].flatten() for name in shapes])
            torch.testing.assert_close(got, expected, atol=1e-10, rtol=0)


def test_what_a_square_cannot_hold_travels_as_it_is() -> None:
    gradients = [drawn(r, a=(1001,)) for r in range(2)]

    results = reduce(fresh(batched=True), gradients)

    expected = mean_of(gradients)["a"].float()  # 31 rows of 32, and 9 more
    torch.testing.assert_close(results[0]["a"][992:], expected[992:])
    assert not torch.allclose(results[0]["a"][:992], expected[:992], atol=0.1)


def test_a_gradient_of_low_rank_is_exact() -> None:
    gradients = [{"a": drawn(r, u=(40, 1))["u"] @ drawn(7, v=(1, 50))["v"]} for r in range(2)]

    results = reduce(fresh(), gradients)

    torch.testing.assert_close(results[0]["a"].double(), mean_of(gradients)["a"], atol=1e-5, rtol=0)


@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
@settings(max_examples=20, deadline=None)
def test_no_gradient_is_lost_only_late(seed: int, size: int, batched: bool) -> None:
    hooks = fresh(size, batched=batched)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in MIXED.items()}
    got = copy.deepcopy(given)

    for count in range(5):
        gradients = [drawn(seed + 100 * count + r, torch.float64, **MIXED) for r in range(size)]
        results = reduce(hooks, gradients)
        for name, mean in mean_of(gradients).items():
            given[name] += mean
            got[name] += results[0][name]

    residuals = mean_of([hook.state_dict()["residuals"] for hook in hooks])
    for name, wanted in given.items():
        torch.testing.assert_close(got[name] + residuals[name], wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batched", [True, False])
def test_ranks_get_the_same_bits(dtype: torch.dtype, batched: bool) -> None:
    hooks = fresh(3, batched=batched)

    for count in range(4):
        one, *others = step(hooks, count, dtype)
        for other in others:
            assert_equal(one, other)
        assert all(gradient.dtype is dtype for gradient in one.values())


# ---- what travels -------------------------------------------------------------------------------------


def test_a_bucket_takes_two_collectives_and_the_small_tensors_go_along_with_the_first() -> None:
    world = World(2)
    gradients = [drawn(r, **MIXED) for r in range(2)]

    reduce(fresh(), gradients, world=world)

    rest = 24 + 2 * 2 + 1
    first = rest + 2 * (24 + 24 + 16)
    second = 2 * (20 + 20 + 36)
    assert world.nbytes() == [4 * first, 4 * second]


def test_no_second_collective_starts_before_all_first_ones() -> None:
    world = World(2)
    buckets = [[drawn(r, **{name: (30, 30)}) for r in range(2)] for name in ("a", "b", "c")]

    reduce(fresh(min_compression=1), *buckets, world=world)

    assert world.nbytes() == [4 * 60] * 6


@pytest.mark.parametrize("shape", [(), (500,), (4, 4), (100, 1), (1, 100), (0, 5), (5, 1, 1)])
def test_what_would_not_shrink_travels_as_it_is(shape: tuple[int, ...]) -> None:
    gradients = [drawn(r, a=shape, filler=(2,)) for r in range(2)]
    world = World(2)

    results = reduce(fresh(min_compression=1), gradients, world=world)

    assert len(world.calls[0]) == 1
    torch.testing.assert_close(results[0]["a"].double(), mean_of(gradients)["a"])


def test_min_compression_decides() -> None:
    world, other = World(2), World(2)
    gradients = [drawn(r, a=(20, 20)) for r in range(2)]  # 400 numbers, or 80

    reduce(fresh(min_compression=4.9), gradients, world=world)
    reduce(fresh(min_compression=5), gradients, world=other)

    assert (len(world.calls[0]), len(other.calls[0])) == (2, 1)


def test_parameters_that_are_named_travel_as_they_are() -> None:
    gradients = [drawn(r, head=(20, 20), body=(20, 20)) for r in range(2)]
    world = World(2)

    results = reduce(fresh(2, rank=1, uncompressed=["he*"]), gradients, world=world)

    mean = mean_of(gradients)
    torch.testing.assert_close(results[0]["head"].double(), mean["head"])
    assert not torch.allclose(results[0]["body"].double(), mean["body"], atol=0.1)
    assert sum(world.nbytes()) == 4 * (400 + 20 + 20)  # all of one, and the factors of the other


def test_a_name_that_no_parameter_has_is_refused() -> None:
    hook = powersgd(uncompressed=["heads"])

    with pytest.raises(ValueError, match="uncompressed=...\\) names 'heads', which no parameter .* matches"):
        hook.bind([("head", torch.zeros(2, 2))], World(2).comms[0])


def test_the_first_steps_are_plain() -> None:
    hooks = fresh(start_step=3)

    for count in range(5):
        gradients = [drawn(10 * count + r, a=(30, 30)) for r in range(2)]
        plain = reduce([average, average], gradients)
        results = reduce(hooks, gradients)
        assert torch.equal(results[0]["a"], plain[0]["a"]) == (count < 3)


def test_complex_gradients_are_averaged() -> None:
    gradients = [{"a": torch.randn(30, 30, dtype=torch.complex64)} for _ in range(2)]

    results = reduce(fresh(), gradients)

    assert torch.equal(results[0]["a"], reduce([average] * 2, gradients)[0]["a"])


def test_unusual_strides_are_no_matter() -> None:
    def turned(gradients: Gradients) -> Gradients:
        return {"a": gradients["a"].to(memory_format=torch.channels_last)}

    hooks, others = fresh(rank=9, min_compression=1), fresh(rank=9, min_compression=1)
    gradients = [drawn(r, torch.float64, a=(16, 6, 3, 3)) for r in range(2)]
    low = {"a": drawn(3, torch.float64, u=(16, 2))["u"] @ drawn(4, torch.float64, v=(2, 54))["v"]}
    low["a"] = low["a"].view(16, 6, 3, 3)

    exact = reduce(others, [turned(low)] * 2)
    results = reduce(hooks, [turned(g) for g in gradients])

    torch.testing.assert_close(exact[0]["a"], low["a"])
    residuals = mean_of([hook.state_dict()["residuals"] for hook in hooks])
    torch.testing.assert_close(results[0]["a"] + residuals["a"], mean_of(gradients)["a"])


# ---- nesting ------------------------------------------------------------------------------------------


def test_factors_can_travel_in_16_bits() -> None:
    world = World(2)
    gradients = [drawn(r, a=(40, 40)) for r in range(2)]

    results = reduce(fresh(inner=in_dtype(torch.bfloat16)), gradients, world=world)
    plain = reduce(fresh(), gradients)

    assert_equal(*results)
    assert {call.sent.dtype for call in world.calls[0]} == {torch.bfloat16}
    torch.testing.assert_close(results[0]["a"], plain[0]["a"], atol=0.05, rtol=0.05)


def test_it_works_inside_another_dtype() -> None:
    hooks = [in_dtype(torch.bfloat16, hook) for hook in fresh()]
    world = World(2)

    for count in range(3):
        gradients = [drawn(10 * count + r, **MIXED) for r in range(2)]
        results = reduce(hooks, gradients, world=world)
        assert_equal(*results)

    assert len(world.calls[0]) == 6
    assert {call.sent.dtype for call in world.calls[0]} == {torch.bfloat16}
    torch.testing.assert_close(results[0]["bias"].double(), mean_of(gradients)["bias"], atol=0.03, rtol=0)


def test_gradients_that_are_in_no_bucket_go_the_way_of_the_hook_inside() -> None:
    assert [way_of(powersgd(inner=inner)) for inner in (average, total, noop)] == ["mean", "sum", "own"]


def test_small_gradients_in_16_bits_do_not_vanish() -> None:
    low = 1e-5 * drawn(1, u=(40, 2))["u"] @ drawn(2, v=(2, 40))["v"]
    hooks = fresh()

    for _ in range(3):
        results = reduce(hooks, [{"a": low.half()}] * 2)

    torch.testing.assert_close(results[0]["a"].float(), low, atol=1e-6, rtol=0.1)


# ---- memory -------------------------------------------------------------------------------------------


def test_a_new_plan_changes_nothing() -> None:
    shapes = dict.fromkeys("abcd", (20, 20))
    one, several = fresh(), fresh()

    for count, plan in enumerate([["dcba"], ["da", "c", "b"], ["a", "bcd"], ["abcd"]]):
        gradients = [drawn(10 * count + r, torch.float64, **shapes) for r in range(2)]
        buckets = [[{name: g[name] for name in names} for g in gradients] for names in plan]
        whole = reduce(one, gradients)
        parts = reduce(several, *buckets)
        for name in shapes:
            torch.testing.assert_close(parts[0][name], whole[0][name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("names", ["abcd", "abc", "a"])
def test_what_leaves_the_matrix_in_a_new_plan_is_sent_once(names: str) -> None:
    shapes = {"a": (3, 5), "b": (7, 11), "c": (23,), "d": (2000,)}  # a alone is too small to be compressed
    hooks = fresh(batched=True)
    reduce(hooks, [drawn(r, torch.float64, **shapes) for r in range(2)])
    left = mean_of([hook.state_dict()["residuals"] for hook in hooks])
    nothing = {name: torch.zeros(shapes[name], dtype=torch.float64) for name in reversed(names)}
    got = {name: torch.zeros_like(zeros) for name, zeros in nothing.items()}

    for _ in range(5):
        result = reduce(hooks, [nothing, nothing])[0]
        for name in names:
            got[name] += result[name]

    still = [hook.state_dict()["residuals"] for hook in hooks]
    for name in names:
        late = torch.stack([state.get(name, nothing[name]) for state in still]).mean(dim=0)
        torch.testing.assert_close(got[name] + late, left[name], atol=1e-12, rtol=0)


def test_a_bucket_that_is_too_small_in_a_new_plan_gets_at_once_what_it_lacks() -> None:
    hooks = fresh(batched=True)
    reduce(hooks, [drawn(r, a=(3, 5), b=(2000,)) for r in range(2)])
    left = mean_of([hook.state_dict()["residuals"] for hook in hooks])["a"].float()

    result, again = (reduce(hooks, [{"a": torch.zeros(3, 5)}] * 2)[0]["a"] for _ in range(2))

    assert left.abs().max() > 0.1
    torch.testing.assert_close(result, left)
    assert again.count_nonzero() == 0


@pytest.mark.parametrize("arguments", [{}, {"batched": True}, {"warm_start": False}, {"start_step": 4}])
def test_a_saved_state_resumes_bit_for_bit(arguments: dict[str, Any], tmp_path: Any) -> None:
    hooks = fresh(**arguments)
    for count in range(3):
        step(hooks, count)
    for rank, hook in enumerate(hooks):
        torch.save(hook.state_dict(), tmp_path / str(rank))

    resumed = fresh(**arguments)
    for rank, hook in enumerate(resumed):
        hook.load_state_dict(torch.load(tmp_path / str(rank), weights_only=True))

    for count in range(3, 6):
        expected = step(hooks, count)
        for got, wanted in zip(step(resumed, count), expected, strict=True):
            assert_equal(got, wanted)
    assert not torch.equal(step(fresh(**arguments), 9)[0]["a"], step(hooks, 9)[0]["a"])


def test_a_saved_state_is_not_changed_by_what_comes_after() -> None:
    hooks = fresh()
    step(hooks, 0)
    state = hooks[0].state_dict()
    before = copy.deepcopy(state)

    hooks[0].load_state_dict(state)
    step(hooks, 1)

    assert_equal(state["residuals"], before["residuals"])
    assert_equal(state["factors"], before["factors"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_goes_on_on_its_own(copied: Any) -> None:
    hooks = fresh()
    step(hooks, 0)
    twins = [copied(hook) for hook in hooks]

    expected = step(hooks, 1)

    assert_equal(step(twins, 1)[0], expected[0])


def test_a_dropped_step_is_forgotten() -> None:
    hooks = fresh()
    for count in range(3):
        step(hooks, count)

    for hook in hooks:
        hook.forget()

    assert_equal(step(hooks, 7)[0], step(fresh(), 7)[0])


def test_a_hook_can_go_on_with_a_model_of_other_shapes() -> None:
    hooks = fresh(error_feedback=False)
    reduce(hooks, [drawn(r, a=(40, 30)) for r in range(2)])
    for hook in hooks:
        hook.unbind()

    low = drawn(1, u=(50, 2))["u"] @ drawn(2, v=(2, 60))["v"]
    results = reduce(hooks, [{"a": low}] * 2)

    torch.testing.assert_close(results[0]["a"], low, atol=1e-4, rtol=0)


def test_without_warm_start_each_step_draws_anew_the_same_on_every_rank() -> None:
    hooks = fresh(warm_start=False, error_feedback=False)

    one = step(hooks, 1)
    again = step(hooks, 1)

    assert_equal(*one)
    assert not torch.equal(one[0]["a"], again[0]["a"])
    assert_equal(one[0], step(fresh(warm_start=False, error_feedback=False), 1)[0])


def test_the_seed_decides_what_is_drawn() -> None:
    results = [step(fresh(seed=seed), 1)[0]["a"] for seed in (0, 0, 1)]

    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_parameter_that_had_no_gradient_gets_one_again() -> None:
    hooks = fresh(error_feedback=False)
    low = drawn(1, u=(40, 2))["u"] @ drawn(2, v=(2, 40))["v"]

    reduce(hooks, [{"a": torch.zeros(40, 40)}] * 2)
    results = reduce(hooks, [{"a": low}] * 2)

    torch.testing.assert_close(results[0]["a"], low, atol=1e-4, rtol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("batched", [True, False])
def test_a_step_that_is_no_number_shows_and_leaves_no_trace(poison: float, batched: bool) -> None:
    hooks = fresh(batched=batched)
    step(hooks, 0)
    gradients = [drawn(r, **MIXED) for r in range(2)]
    gradients[1]["a"][3, 3] = poison

    poisoned = reduce(hooks, gradients)
    after = step(hooks, 2)

    assert not poisoned[0]["a"].isfinite().all()
    assert_equal(*after)
    for hook, result in zip(hooks, after, strict=True):
        state = hook.state_dict()
        for tensors in (result, state["residuals"], state["factors"]):
            assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_large_numbers_are_not_lost() -> None:
    low = 1e25 * drawn(1, u=(40, 2))["u"] @ drawn(2, v=(2, 40))["v"]

    results = reduce(fresh(), [{"a": low}] * 2)

    torch.testing.assert_close(results[0]["a"], low, atol=1e20, rtol=1e-4)


# ---- arguments ----------------------------------------------------------------------------------------


def test_its_name_has_every_setting() -> None:
    assert name_of(powersgd(rank=3, inner=in_dtype(torch.float16))) == (
        "powersgd(rank=3, start_step=10, warm_start=True, error_feedback=True, min_compression=2.0, "
        "uncompressed=(), batched=False, seed=0, inner=in_dtype(torch.float16, average))"
    )
    assert "uncompressed=('a', 'b', 'c')" in name_of(powersgd(uncompressed=iter("bca")))  # whatever order


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rank": 0}, ValueError, "powersgd() needs rank to be a whole number of 1 or more, got 0"),
        ({"rank": 1.5}, ValueError, "powersgd() needs rank to be a whole number of 1 or more, got 1.5"),
        ({"rank": True}, ValueError, "powersgd() needs rank to be a whole number of 1 or more, got True"),
        ({"start_step": -1}, ValueError, "start_step to be a whole number of 0 or more, got -1"),
        ({"seed": "x"}, ValueError, "seed to be a whole number of 0 or more, got 'x'"),
        ({"min_compression": 0.5}, ValueError, "min_compression to be a number of 1.0 or more, got 0.5"),
        ({"min_compression": float("nan")}, ValueError, "min_compression to be a number of 1.0 or more"),
        ({"uncompressed": "head"}, ValueError, "a list of names or patterns such as ['head.*'], got 'head'"),
        ({"uncompressed": None}, ValueError, "uncompressed to be a list of names or patterns"),
        ({"uncompressed": [1]}, ValueError, "uncompressed to be a list of names or patterns"),
        ({"uncompressed": ["a"], "batched": True}, ValueError, "batched=True or uncompressed, not both"),
        ({"inner": "average"}, TypeError, "powersgd() takes another hook inside"),
        ({"inner": quantized()}, ValueError, "which may remember nothing of them; got quantized(bits=8"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        powersgd(**arguments)

    assert text in str(caught.value)


def test_factors_of_another_rank_are_refused() -> None:
    hooks = fresh(1, rank=2)
    step(hooks, 0)

    with pytest.raises(
        ValueError, match=r"saved factors of powersgd\(\) are of rank 2, this hook's of rank 3"
    ):
        powersgd(rank=3).load_state_dict(hooks[0].state_dict())


# ---- on Gloo ------------------------------------------------------------------------------------------


@ranks(2)
def test_it_starts_on_gloo_every_time(rank: int) -> None:
    comm = comm_over(None)
    for start in range(20):
        hook = powersgd(start_step=0, min_compression=1, batched=start % 2 == 1)
        for count in range(3):
            names = ("a", "b", "c", "d")
            gradients = [
                [drawn(1000 * start + 100 * count + 10 * i + r, **{name: (30, 20), f"{name}.bias": (30,)})
                 for i, name in enumerate(names)] for r in range(2)
            ]  # fmt: skip
            buckets = [bucket_of(g, i) for i, g in enumerate(gradients[rank])]
            hook.begin()
            flights = [hook(bucket, comm) for bucket in buckets]
            while sum(flight.advance() for flight in flights):
                pass
            results = torch.cat([flight.wait() for flight in flights])
            rows = comm.gather(results).wait()

            assert torch.equal(rows[0], rows[1])
            assert results.isfinite().all()
