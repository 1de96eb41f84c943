import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.conftest import EXAMPLES, Starter

TINY = ("--layers", 1, "--width", 32, "--context", 16, "--batch", 4)


@pytest.fixture(scope="module")
def six_steps(start: Starter) -> str:
    return start.run("paceline run", "train.py", *TINY, "--steps", 6, "--checkpoint", "six.pt")


def value_of(row: str, output: str) -> str:
    """Return what the closing table says in a row."""
    found = re.findall(rf"^(?:\[rank 0\] )?{re.escape(row)}  +(.+)", output, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} rows {row!r} in:\n{output}"
    return found[0].strip()


def weights(start: Starter, checkpoint: str) -> dict[str, torch.Tensor]:
    return torch.load(start.folder / checkpoint)["model"]


def test_the_closing_table_says_how_training_went(six_steps: str) -> None:
    assert value_of("ranks", six_steps) == "2 on cpu"
    assert value_of("steps", six_steps) == "0 to 6, 4 x 16 tokens each"
    assert re.fullmatch(r"\d\.\d+ to \d\.\d+", value_of("loss, first to last", six_steps))
    assert re.fullmatch(r"\d\.\d+", value_of("loss on held-out text", six_steps))
    assert re.match(r"[\d,]+ tokens/s", value_of("throughput", six_steps))
    assert value_of("checkpoint", six_steps) == "six.pt"


def test_all_ranks_end_with_the_same_weights(six_steps: str) -> None:
    assert value_of("weights on rank 0", six_steps) == value_of("weights on rank 1", six_steps)
    assert value_of("weights equal", six_steps) == "yes"


def test_the_first_steps_equal_those_of_one_process(six_steps: str) -> None:
    difference = float(value_of("one process, 3 steps", six_steps).removeprefix("largest difference "))

    assert difference < 1e-4


def test_one_rank_shows_progress(six_steps: str) -> None:
    lines = re.findall(r"step (\d+)/6  loss \d\.\d+  [\d,]+ tokens/s  \d+:\d\d left", six_steps)

    assert lines == ["1", "6"]


def test_the_sample_goes_on_from_its_prompt(six_steps: str) -> None:
    assert six_steps.count("    def __init__(self") == 1


@pytest.mark.usefixtures("six_steps")
def test_a_resumed_run_ends_with_the_same_bits_as_one_that_never_stopped(start: Starter) -> None:
    start.run("paceline run", "train.py", *TINY, "--steps", 3, "--checkpoint", "three.pt")
    after_three = weights(start, "three.pt")
    start.run("paceline run", "train.py", *TINY, "--steps", 6, "--checkpoint", "three.pt", "--resume")

    resumed, straight = weights(start, "three.pt"), weights(start, "six.pt")

    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert not torch.equal(after_three["head.weight"], straight["head.weight"])


@pytest.mark.usefixtures("six_steps")
def test_plain_python_trains_the_same_model_in_a_world_of_one(start: Starter) -> None:
    output = start.run("python", "train.py", *TINY, "--steps", 6, "--checkpoint", "alone.pt")

    assert value_of("ranks", output) == "1 on cpu"
    alone, two_ranks = weights(start, "alone.pt"), weights(start, "six.pt")
    assert all(torch.allclose(alone[name], two_ranks[name], atol=1e-4) for name in alone)


@pytest.mark.usefixtures("six_steps")
def test_torchrun_trains_the_same_model(start: Starter) -> None:
    output = start.run("torchrun", "train.py", *TINY, "--steps", 6, "--checkpoint", "torchrun.pt")

    assert value_of("weights equal", output) == "yes"
    torchrun, ours = weights(start, "torchrun.pt"), weights(start, "six.pt")
    assert all(torch.equal(torchrun[name], ours[name]) for name in ours)


def test_an_interrupt_saves_and_says_where_it_stopped(start: Starter) -> None:
    command = start.command("paceline run", "train.py", *TINY, "--steps", 10**6, "--checkpoint", "stopped.pt")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=start.folder, env=start.environment()
    ) as run:
        assert run.stdout is not None
        first_line = run.stdout.readline()
        run.send_signal(signal.SIGINT)
        output = run.stdout.read()

    assert "step 1/1000000" in first_line
    assert run.returncode == 130, output
    stopped = re.search(r"stopped after step (\d+), saved stopped.pt", output)
    assert stopped, output
    assert torch.load(start.folder / "stopped.pt")["step"] == int(stopped[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--steps", "0"), "expected a whole number above 0, got '0'"),
        (("--steps", "many"), "expected a whole number above 0, got 'many'"),
        (("--width", "30"), "--width 30 cannot be split into 4 heads"),
        (("--resume", "--checkpoint", "nowhere.pt"), "--resume: there is no checkpoint at nowhere.pt"),
        (
            ("--resume", "--checkpoint", "six.pt", "--steps", "6"),
            "is at step 6; give a larger --steps",
        ),
        (
            ("--resume", "--checkpoint", "six.pt", "--width", "64"),
            "was made with {'layers': 1, 'width': 32",
        ),
        (("--resume", "--checkpoint", "broken.pt"), "broken.pt is no checkpoint of this script"),
        (("--checkpoint", "."), "--checkpoint . is a folder"),
    ],
)
@pytest.mark.usefixtures("six_steps")
def test_a_bad_argument_gets_a_clear_message(
    start: Starter,
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(start.folder)
    Path("broken.pt").write_bytes(b"not a checkpoint")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, TINY), *args])

    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")

    said = str(stop.value) + capsys.readouterr().err
    assert stop.value.code != 0
    assert message in said


def test_a_batch_that_the_ranks_cannot_share_evenly_is_refused(start: Starter) -> None:
    command = start.command("paceline run", "train.py", *TINY, "--batch", 3, "--checkpoint", "odd.pt")

    done = subprocess.run(command, capture_output=True, text=True, cwd=start.folder, env=start.environment())

    assert done.returncode == 2
    assert "--batch 3 cannot be split evenly over 2 ranks" in done.stderr


def test_the_text_is_python_source_and_a_twentieth_of_it_is_held_out() -> None:
    read_text = runpy.run_path(str(EXAMPLES / "gpt.py"))["read_text"]

    training, held_out = read_text()

    assert b"import " in bytes(training[:100_000].tolist())
    assert 0.04 < len(held_out) / (len(training) + len(held_out)) < 0.06
    assert training.max() < 128


def test_a_machine_without_sources_gets_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    read_text = runpy.run_path(str(EXAMPLES / "gpt.py"))["read_text"]

    with pytest.raises(SystemExit, match="no text to train on"):
        read_text()
