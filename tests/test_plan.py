"""The plan: every gradient in exactly one slot, the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import MIB, SMALL_NBYTES, Caps, Plan, Spec, plan_buckets

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
DEVICES = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]


def spec(
    name: str, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICES[0]
) -> Spec:
    return Spec(name, shape, dtype, device, tuple(torch.empty(shape, device="meta").stride()))


@st.composite
def specs(draw: st.DrawFn) -> list[Spec]:
    count = draw(st.integers(0, 30))
    return [
        spec(
            f"p{i}",
            *draw(st.lists(st.integers(0, 40), max_size=3)),
            dtype=draw(st.sampled_from(DTYPES)),
            device=draw(st.sampled_from(DEVICES)),
        )
        for i in range(count)
    ]


caps = st.lists(st.integers(1, 20_000), min_size=1, max_size=4).map(lambda sizes: Caps(tuple(sizes)))


@given(specs(), caps)
def test_every_parameter_is_in_exactly_one_slot(specs: list[Spec], caps: Caps) -> None:
    plan = plan_buckets(specs, caps)

    assert sorted(plan.order) == list(range(len(specs)))


@given(specs(), caps)
def test_slots_of_a_bucket_lie_end_to_end(specs: list[Spec], caps: Caps) -> None:
    for bucket in plan_buckets(specs, caps).buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset == end
            assert slot.numel == specs[slot.parameter].numel
            end += slot.numel
        assert end == bucket.numel


@given(specs(), caps)
def test_dtypes_and_devices_are_never_mixed(specs: list[Spec], caps: Caps) -> None:
    for bucket in plan_buckets(specs, caps).buckets:
        kinds = {(specs[slot.parameter].device, specs[slot.parameter].dtype) for slot in bucket.slots}
        assert kinds == {(bucket.device, bucket.dtype)}


@given(specs(), caps)
def test_only_a_single_parameter_may_outgrow_the_cap(specs: list[Spec], caps: Caps) -> None:
    seen: dict[object, int] = {}
    for bucket in plan_buckets(specs, caps).buckets:
        nth = seen.setdefault((bucket.device, bucket.dtype), 0)
        seen[(bucket.device, bucket.dtype)] += 1
        assert bucket.nbytes <= caps[nth] or len([s for s in bucket.slots if s.numel]) == 1


@given(specs(), caps, st.randoms())
def test_the_same_parameters_give_the_same_plan_on_every_rank(specs: list[Spec], caps: Caps, random) -> None:
    order = list(range(len(specs)))
    random.shuffle(order)
    elsewhere = [
        Spec(s.name, s.shape, s.dtype, torch.device("cuda", s.device.index + 2), s.strides)
        if s.device.index
        else s
        for s in specs
    ]

    here, there = (plan_buckets(s, caps, order=order) for s in (specs, elsewhere))

    assert here.digest == there.digest
    assert here.order == there.order


@given(specs(), caps, st.data())
def test_replanning_keeps_every_parameter_and_follows_the_arrival(specs, caps, data) -> None:
    plan = plan_buckets(specs, caps)
    arrival = data.draw(st.permutations(range(len(specs)))) if specs else []
    arrived = arrival[: data.draw(st.integers(0, len(arrival)))]

    again = plan.reordered(arrived)

    assert sorted(again.order) == sorted(plan.order)
    expected = [*arrived, *(i for i in plan.order if i not in arrived)]
    for bucket in again.buckets:
        forms: dict[object, list[int]] = {}
        for slot in bucket.slots:
            forms.setdefault((slot.numel, specs[slot.parameter].shape), []).append(
                expected.index(slot.parameter)
            )
        assert all(places == sorted(places) for places in forms.values())


@given(specs(), caps)
def test_runs_cover_the_slots_of_a_bucket_in_order(specs: list[Spec], caps: Caps) -> None:
    plan = plan_buckets(specs, caps)
    for bucket in plan.buckets:
        runs = plan.runs(bucket)
        assert sum(run.count for run in runs) == len(bucket.slots)
        first = 0
        for run in runs:
            for slot in bucket.slots[first : first + run.count]:
                assert specs[slot.parameter].shape == run.shape
            assert run.offset == bucket.slots[first].offset
            first += run.count


@given(specs(), caps)
def test_on_a_cpu_small_slots_lie_behind_the_large_ones(specs: list[Spec], caps: Caps) -> None:
    on_cpu = [bucket for bucket in plan_buckets(specs, caps).buckets if bucket.device.type == "cpu"]
    for bucket in on_cpu:
        small = [specs[slot.parameter].nbytes < SMALL_NBYTES for slot in bucket.slots]
        assert small == sorted(small)


def test_on_a_gpu_slots_lie_in_the_order_of_arrival_whatever_their_size() -> None:
    sizes, device = [SMALL_NBYTES // 8, SMALL_NBYTES, SMALL_NBYTES // 4], torch.device("cuda", 0)
    specs = [Spec(f"p{n}", (n,), torch.float32, device, (1,)) for n in sizes]

    (bucket,) = plan_buckets(specs, Caps.of_sizes(25), order=[0, 1, 2]).buckets

    assert [slot.parameter for slot in bucket.slots] == [0, 1, 2]


@given(specs(), caps, st.data())
def test_moving_the_late_ones_keeps_every_parameter(specs, caps, data) -> None:
    plan = plan_buckets(specs, caps)
    misses = {i: data.draw(st.floats(0, 1)) for i in range(len(specs)) if data.draw(st.booleans())}

    again = plan.with_late(misses)

    assert sorted(again.order) == sorted(plan.order)


def names(plan: Plan) -> list[list[str]]:
    return [[plan.specs[slot.parameter].name for slot in bucket.slots] for bucket in plan.buckets]


def test_the_last_registered_parameter_goes_first() -> None:
    assert names(plan_buckets([spec("a", 4), spec("b", 4), spec("c", 4)])) == [["c", "b", "a"]]


def test_the_first_bucket_is_small_and_the_rest_are_large() -> None:
    layers = [spec(f"p{i}", MIB // 8) for i in range(60)]  # half a MiB each

    sizes = [len(bucket) for bucket in names(plan_buckets(layers))]

    assert sizes == [2, 50, 8]


def test_a_parameter_larger_than_the_cap_gets_its_own_bucket() -> None:
    plan = plan_buckets([spec("a", 4), spec("huge", 1000), spec("b", 4)], Caps((64,)))

    assert names(plan) == [["b"], ["huge"], ["a"]]


def test_a_list_of_caps_is_used_in_order() -> None:
    plan = plan_buckets([spec(f"p{i}", 1) for i in range(9)], Caps((4, 8, 12)))

    assert [len(bucket.slots) for bucket in plan.buckets] == [1, 2, 3, 3]


def test_frozen_parameters_get_no_slot() -> None:
    assert names(plan_buckets([spec("a", 4), spec("frozen", 4), spec("b", 4)], order=[2, 0])) == [["b", "a"]]


def test_parameters_that_are_often_missing_go_last() -> None:
    plan = plan_buckets([spec("a", 1), spec("rare", 1), spec("b", 1)], Caps((8,)))

    assert names(plan.with_late({1: 0.9, 0: 0.1})) == [["b", "a"], ["rare"]]


def test_the_digest_tells_plans_apart() -> None:
    base = [spec("a", 4), spec("b", 4)]
    others = [
        plan_buckets([spec("a", 4), spec("b", 2, 2)]),
        plan_buckets([spec("a", 4), spec("c", 4)]),
        plan_buckets([spec("a", 4), spec("b", 4, dtype=torch.float64)]),
        plan_buckets(base, Caps((16,))),
        plan_buckets(base, order=[0, 1]),
        plan_buckets(base, order=[0]),
    ]

    assert len({plan.digest for plan in [plan_buckets(base), *others]}) == 7


@pytest.mark.parametrize("sizes", [[0], [-1], [25, 0], [float("nan")], []])
def test_caps_have_to_be_positive(sizes: list[float]) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        Caps.of_mib(sizes)


def test_caps_in_bytes_have_to_be_positive() -> None:
    with pytest.raises(ValueError, match=r"positive, got \[0\] bytes"):
        Caps((0,))


def test_an_order_that_names_a_parameter_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="parameters 0 to 1 at most once"):
        plan_buckets([spec("a", 1), spec("b", 1)], order=[0, 0])


def test_the_table_shows_every_bucket() -> None:
    table = plan_buckets([spec(f"p{i}", 300_000) for i in range(5)]).describe()

    assert table.splitlines()[0].split() == ["bucket", "device", "dtype", "MiB", "parameters"]
    assert "p3, p2, p1 and 1 more" in table


def test_a_few_gradients_on_one_machine_travel_as_one_bucket() -> None:
    few = [spec(f"p{i}", 2**18) for i in range(3)]  # 1 MiB each
    caps = Caps.of_sizes(25)

    assert len(plan_buckets(few, caps).buckets) == 2
    assert len(plan_buckets(few, caps.among(is_local=True)).buckets) == 1


def test_more_than_a_few_are_cut_on_one_machine_too() -> None:
    many = [spec(f"p{i}", 2**18) for i in range(5)]

    assert plan_buckets(many, Caps.of_sizes(25).among(is_local=True)).buckets == plan_buckets(many).buckets


@pytest.mark.parametrize("sizes", [(25, 1), ([1, 25], None), (2, None)])
def test_sizes_that_were_asked_for_hold_on_one_machine(sizes: tuple[float, float | None]) -> None:
    few = [spec(f"p{i}", 2**18) for i in range(3)]
    caps = Caps.of_sizes(*sizes)

    assert plan_buckets(few, caps.among(is_local=True)).buckets == plan_buckets(few, caps).buckets


def test_caps_follow_the_ranks_to_other_machines_and_back() -> None:
    caps = Caps.of_sizes(25)

    assert caps.among(is_local=True) != caps
    assert caps.among(is_local=True).among(is_local=False) == caps
