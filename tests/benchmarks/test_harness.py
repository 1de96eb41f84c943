"""The benchmarks run, on sizes that prove nothing about speed."""

import json

import pytest

from benchmarks import __main__ as cli
from benchmarks import gpu
from benchmarks.counts import calls_from_autograd
from benchmarks.cycles import Cycle, Estimate, estimate, merge
from benchmarks.overhead import bar_9
from benchmarks.steps import against_torch, bar_8, bar_15, cycles_of, promises
from benchmarks.table import Row, as_markdown, write_json
from paceline.testing import ranks


def cycle(step: float, others: float = 0.0) -> Cycle:
    return Cycle({"a": step, "b": 1.0}, {"a": step, "b": 1.0}, wall=1.0, own_cpu=1.0, all_cpu=2.0 + others)


def test_a_ratio_is_the_median_of_ratios_within_a_cycle():
    mine = [cycle(step) for step in (1.0, 2.0, 9.0)]

    assert merge([mine, mine]).ratio("a", "b").median == 2.0


def test_cycles_that_others_disturbed_are_left_out():
    mine = [cycle(1.0)] * 9 + [cycle(50.0, others=0.5)] * 10

    samples = merge([mine, mine])

    assert samples.median("a") == 1.0
    assert samples.kept == "9 of 19 cycles"


def test_too_few_quiet_cycles_mean_all_cycles_and_say_so():
    mine = [cycle(1.0)] * 2 + [cycle(3.0, others=0.5)] * 3

    samples = merge([mine, mine])

    assert samples.median("a") == 3.0
    assert samples.kept == "all 5 cycles, 2 quiet"


def test_a_short_run_may_be_quiet_as_a_whole():
    assert merge([[cycle(1.0)] * 3] * 2).is_quiet


def test_cpu_seconds_come_from_all_cycles():
    mine = [cycle(1.0)] * 9 + [cycle(3.0, others=0.5)] * 10

    assert len(merge([mine, mine]).cpu["a"]) == 19


def test_an_estimate_narrows_with_more_values():
    some, many = estimate([1.0, 2.0, 3.0] * 2), estimate([1.0, 2.0, 3.0] * 100)

    assert (some.low, some.high) == (1.0, 3.0)
    assert many.low == many.high == 2.0


def test_an_estimate_from_few_values_has_no_bounds():
    assert str(estimate([1.0, 2.0, 3.0])) == "2.000 (few samples)"


def test_a_time_from_a_busy_machine_never_meets_a_goal():
    assert Row(8, "what", Estimate(1.0, 1.0, 1.0), "<= 1.03", is_quiet=False).met == "noisy"


@pytest.mark.parametrize(
    ("measured", "goal", "met"),
    [
        (Estimate(1.0, 0.9, 1.1), "<= 1.03", "yes"),
        (Estimate(1.05, 1.0, 1.1), "<= 1.03", "unclear"),
        (Estimate(1.05, 1.04, 1.1), "<= 1.03", "no"),
        (estimate([9.0]), "<= 1.03", "unclear"),
        (Estimate(7.0, 6.5, 7.5), ">= 6", "yes"),
    ],
)
def test_a_miss_within_the_noise_is_called_unclear(measured, goal, met):
    assert Row(8, "what", measured, goal).met == met


def test_the_table_has_a_line_for_each_row_and_the_json_the_same_rows(tmp_path):
    rows = [Row(15, "second", Estimate(1, 1, 1), "<= 1.01"), Row(8, "first", Estimate(2, 2, 2), "<= 1.03")]

    write_json(rows, tmp_path / "results" / "bench.json", quick=True)

    lines = as_markdown(rows).splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["first", "second"]
    record = json.loads((tmp_path / "results" / "bench.json").read_text())
    assert [(row["bar"], row["met"]) for row in record["rows"]] == [(15, "yes"), (8, "no")]
    assert record.keys() >= {"date", "torch", "cores", "quick"}


@ranks(2)
def test_all_ranks_run_the_same_cycles_of_all_variants(rank):
    cycles = cycles_of(against_torch, "convnet", 0.0, True)

    assert len(cycles) == 3
    assert set(cycles[0].steps) == {
        "bare",
        "paceline",
        "torch DDP",
        "torch DDP, views",
        "torch DDP, views, static",
    }
    assert all(seconds > 0 for cycle in cycles for seconds in cycle.steps.values())


@ranks(2)
def test_promises_can_be_taken_away_in_the_same_process(rank):
    cycles = cycles_of(promises, "402 tiny tensors", 0.0, True)

    assert set(cycles[0].steps) == {"paceline", "no guard", "no frames", "no promises"}


def test_bars_8_9_and_15_give_a_row_for_each_model(capfd):
    rows = [
        *bar_8(0.0, ["small MLP"], tiny=True),
        *bar_15(0.0, ["small GPT"], tiny=True),
        *bar_9(0.0, parameters=3),
    ]

    assert [row.bar for row in rows] == [8, 15, 15, 15, 9, 9, 9]


def test_the_command_prints_its_table_and_writes_its_file(tmp_path, capsys, monkeypatch):
    row = Row(9, "made up", Estimate(1, 1, 1), "<= 1.0")
    monkeypatch.setitem(cli.BARS, "9", (lambda seconds: [row] * round(seconds), (2, 1)))

    assert cli.main(["9", "--quick", "--out", str(tmp_path / "out.json")]) == 0

    assert capsys.readouterr().out.count("made up") == 1
    assert json.loads((tmp_path / "out.json").read_text())["quick"] is True


def test_nothing_of_ours_is_counted_where_autograd_does_not_call_us():
    with calls_from_autograd() as names:
        estimate([1.0])

    assert names == []


@ranks(1, timeout=100, backend=None)
def test_the_gpu_script_runs_small_on_a_cpu(rank, tmp_path):
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)]) == 0

    rows = json.loads((tmp_path / "bench-gpu.json").read_text())["rows"]
    checks = {row["what"]: row["met"] for row in rows if "equal" in row["what"] or "ranks" in row["what"]}
    assert len(checks) == 6
    assert set(checks.values()) == {"yes"}, rows
