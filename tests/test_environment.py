"""``paceline env``: what a bug report needs, and nothing that it must not show."""

import json
import subprocess
import sys

import pytest
import torch

import paceline
from paceline import cli, environment

VERSION = paceline.__version__


def test_versions_and_machine_are_there():
    found = environment.collect(VERSION, {})

    assert found["versions"]["paceline"] == paceline.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "gloo" in found["versions"]["backends"]
    assert set(found["machine"]) >= {"platform", "processor", "cores"}
    assert (found["launch"], found["settings"]) == ({}, {})


def test_variables_of_the_launch_and_of_the_transports_are_shown():
    found = environment.collect(
        VERSION, {"RANK": "3", "SLURM_PROCID": "3", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    )

    assert found["launch"] == {"RANK": "3", "SLURM_PROCID": "3"}
    assert found["settings"] == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "NCCL_SECRET", "SLURM_JWT", "WANDB_API_KEY", "TORCH_PASSWORD", "HOME", "PATH"]
)
def test_a_variable_that_is_not_on_the_list_is_never_shown(name):
    found = environment.collect(VERSION, {name: "do not show me"})

    assert "do not show me" not in environment.as_text(found) + environment.as_json(found)


def test_no_name_on_the_list_sounds_like_a_secret():
    names = (environment.LAUNCH + environment.SETTINGS).split()

    assert len(names) == len(set(names))
    assert not [
        n for n in names if any(word in n for word in ("KEY", "TOKEN", "SECRET", "PASS", "JWT", "CRED"))
    ]


def test_the_command_prints_every_section(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    assert cli.main(["env"]) == 0

    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert titles == ["versions", "machine", "gpus", "launch", "settings"]
    assert "  GLOO_SOCKET_IFNAME  lo" in printed


def test_the_command_prints_json(capsys):
    assert cli.main(["env", "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == json.loads(
        environment.as_json(environment.collect(VERSION))
    )


def test_gpus_are_named_by_the_driver(monkeypatch):
    answer = subprocess.CompletedProcess(
        [], 0, "NVIDIA H200, 143771 MiB, 570.1\nNVIDIA H200, 143771 MiB, 570.1\n"
    )
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(environment.subprocess, "run", lambda *args, **kwargs: answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    assert environment.collect(VERSION, {})["gpus"] == {
        "visible to torch": 1,
        "gpu 0": "NVIDIA H200, 143771 MiB, 570.1",
        "gpu 1": "NVIDIA H200, 143771 MiB, 570.1",
    }


@pytest.mark.parametrize("error", [OSError("no such thing"), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_a_driver_that_does_not_answer_is_told_of(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(environment.subprocess, "run", fail)

    assert environment.collect(VERSION, {})["gpus"]["gpu 0"].startswith("nvidia-smi failed: ")


def test_without_a_gpu_there_is_none(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    found = environment.collect(VERSION, {})
    assert found["gpus"] == {}
    assert "gpus\n  none" in environment.as_text(found)


def test_without_torch_it_says_so(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)

    found = environment.collect(VERSION, {})
    assert (found["versions"]["torch"], found["gpus"]) == ("not installed", {})


def test_it_neither_loads_torch_for_the_help_nor_sets_a_gpu_up():
    script = (
        "import sys; from paceline import cli, environment\n"
        "assert 'torch' not in sys.modules\n"
        "environment.collect('1')\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )

    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
