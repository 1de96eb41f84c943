"""The benchmarks of compiled training run in all their ways, on sizes that prove nothing about speed."""

import json

from benchmarks import __main__ as cli
from benchmarks import gpu_compile
from benchmarks.compiled import Counts, compiled, measure
from benchmarks.cycles import Cycle
from benchmarks.ways import AFTER, BARE, EAGER, OURS, SPLIT, TORCHS, best_of, ways
from paceline.testing import ranks

TORCH_MODES = {TORCHS, f"{TORCHS}, views", "torch, python_reducer", "torch, no_optimization"}


@ranks(2, timeout=100)
def test_every_way_is_compiled_timed_and_counted(rank):
    cycles, counts = measure("small MLP", 0.0, True, "aot_eager")

    assert len(cycles) == 3
    assert set(cycles[0].steps) == set(counts) == {BARE, OURS, AFTER, SPLIT, EAGER, *TORCH_MODES}
    assert {way for way, count in counts.items() if count.collectives == 0} == {BARE}
    assert {way for way, count in counts.items() if count.compiled == 0} == {EAGER}
    assert counts["torch, python_reducer"].captured == 2  # the backward too: it is really in that mode
    assert counts[OURS].compiled == counts[AFTER].compiled == 1


def test_a_model_has_rows_of_times_and_of_counts(monkeypatch):
    def made_up(size, work, *args):
        cycle = Cycle(dict.fromkeys(ways(), 1.0), dict.fromkeys(ways(), 1.0), 1.0, 1.0, 2.0)
        return [([cycle] * 3, dict.fromkeys(ways(), Counts(1, 2, 3)))] * size

    monkeypatch.setattr("benchmarks.compiled.on_ranks", made_up)

    rows = compiled(0.0, ["small MLP"])

    assert {row.bar for row in rows} == {0}
    assert [row.what.removeprefix("small MLP, compiled: ") for row in rows] == [
        f"step, {OURS} / {TORCHS}",
        f"step, {OURS} / {AFTER}",
        f"step, {SPLIT} / {OURS}",
        f"step, {OURS} / {EAGER}",
        f"graphs captured, {OURS}",
        f"graphs compiled, {OURS}",
        f"collectives a step, {OURS}",
    ]


def test_torch_picks_the_best_of_its_modes_after_the_fact():
    times = {OURS: 1.0, TORCHS: 3.0, "torch, python_reducer": 2.0}

    assert best_of(times) == "torch, python_reducer"


def test_the_command_has_it_by_name_and_not_by_default(tmp_path, monkeypatch):
    asked = []
    for name in cli.BARS:
        monkeypatch.setitem(cli.BARS, name, (lambda seconds, name=name: asked.append(name) or [], (0, 0)))

    cli.main(["compiled", "--out", str(tmp_path / "out.json")])
    cli.main(["--out", str(tmp_path / "out.json")])

    assert asked == ["compiled", "8", "9", "10", "15"]


@ranks(1, timeout=100, backend=None)
def test_the_gpu_script_runs_small_on_a_cpu(rank, tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--backend", "aot_eager", "--rows", "2", "--out", str(tmp_path)]

    assert gpu_compile.main(arguments) == 0

    rows = json.loads((tmp_path / "bench-gpu-compile.json").read_text())["rows"]
    assert set(rows[0]["raw"]["median_seconds"]) == {BARE, OURS, AFTER, SPLIT, *TORCH_MODES}
    assert [row["bar"] for row in rows].count(14) >= 2
