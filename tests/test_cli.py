"""The command line says what it can do, and refuses what makes no sense."""

import pytest
import torch

import paceline
from paceline import cli
from paceline.launch.job import Job


@pytest.fixture
def jobs(monkeypatch, tmp_path) -> list[Job]:
    """Collect the jobs that would be run, beside a script.py."""
    started: list[Job] = []
    monkeypatch.setattr(cli, "run", lambda job: started.append(job) or 7)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "folder").mkdir()
    return started


def complaint(capsys, *args: str) -> str:
    """Return the last line of what a command line is refused with."""
    with pytest.raises(SystemExit) as exit:
        cli.main(args)
    assert exit.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_the_exit_code_is_that_of_the_run(jobs):
    assert cli.main(["run", "-n", "2", "script.py"]) == 7


@pytest.mark.parametrize(
    ("args", "job"),
    [
        (["-n", "2", "script.py"], Job(("script.py",), 2)),
        (["-n2", "script.py", "-n", "5", "--help"], Job(("script.py", "-n", "5", "--help"), 2)),
        (["--drop-in", "--no-prefix", "-n", "1", "script.py"], Job(("script.py",), 1, True, False)),
        (["-n", "1", "script.py", "--drop-in"], Job(("script.py", "--drop-in"), 1)),
        (["-n", "3", "-m", "a.b", "-m", "x"], Job(("-m", "a.b", "-m", "x"), 3)),
    ],
)
def test_what_comes_after_the_script_is_the_scripts(jobs, args, job):
    cli.main(["run", *args])

    assert jobs == [job]


def test_n_gpu_is_one_rank_per_gpu(jobs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    cli.main(["run", "-n", "gpu", "script.py"])

    assert jobs == [Job(("script.py",), 4)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-n", "2", "nope.py"], "there is no script 'nope.py' in "),
        (["-n", "2", "folder"], "'folder' is a folder without a __main__.py"),
        (["-n", "0", "script.py"], "-n needs a number of ranks of 1 or more, or 'gpu'; got '0'"),
        (["-n", "-1", "script.py"], "-n needs a number of ranks of 1 or more, or 'gpu'; got '-1'"),
        (["-n", "x", "script.py"], "-n needs a number of ranks of 1 or more, or 'gpu'; got 'x'"),
        (["-n", "gpu", "script.py"], "-n gpu: torch sees no GPU here; give a number of ranks, as in -n 2"),
        (["-n", "2"], "which script? As in: paceline run -n 2 train.py"),
        (["script.py"], "the following arguments are required: -n"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_started(jobs, capsys, monkeypatch, args, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert words in complaint(capsys, "run", *args)
    assert jobs == []


def test_a_command_is_needed(capsys):
    assert "command" in complaint(capsys)


def test_a_run_that_cannot_be_started_says_why(jobs, capsys, monkeypatch):
    def run(job):
        raise OSError("no more processes")

    monkeypatch.setattr(cli, "run", run)

    assert cli.main(["run", "-n", "2", "script.py"]) == 1
    assert capsys.readouterr().err == "paceline run: could not start the ranks: no more processes\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--version"], f"paceline {paceline.__version__}"),
        (["--help"], "paceline run -n 2 train.py"),
        (["run", "--help"], "paceline run -n 2 --drop-in train.py"),
    ],
)
def test_help_and_version(capsys, args, words):
    with pytest.raises(SystemExit) as exit:
        cli.main(args)

    assert exit.value.code == 0
    assert words in capsys.readouterr().out
