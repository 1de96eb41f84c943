"""`paceline run` starts ranks, watches them, stops them together, and leaves nothing behind."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from paceline.launch.job import rank_environment
from tests.launch.helpers import (
    WRITE_PID,
    alive,
    command,
    environment,
    launch,
    script,
    start,
    wait_until,
    written_pids,
)

HANG = WRITE_PID + "write_pid(os.environ['RANK']); time.sleep(1000)"


def gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


# Output


def test_every_line_starts_with_its_rank(tmp_path):
    path = script(tmp_path, "import os, sys; print('out', sys.argv[1:]); print('err', file=sys.stderr)")

    result = launch("-n", "2", path, "--steps", "3", "-n", "x")

    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [
        f"[rank {r}] out ['--steps', '3', '-n', 'x']" for r in (0, 1)
    ]
    assert f"paceline: starting 2 ranks of {path} --steps 3 -n x" in result.stderr.splitlines()[0]
    assert sorted(result.stderr.splitlines()[1:]) == ["[rank 0] err", "[rank 1] err"]


def test_the_prefixes_have_one_width_or_are_left_out(tmp_path):
    path = script(tmp_path, "print('x')")

    assert set(launch("-n", "11", path).stdout.splitlines()) >= {"[rank  9] x", "[rank 10] x"}
    assert launch("-n", "2", "--no-prefix", path).stdout == "x\nx\n"


def test_lines_are_never_torn(tmp_path):
    path = script(
        tmp_path,
        """
        import os, sys
        letter = "ab"[int(os.environ["RANK"])]
        for _ in range(300):
            for part in (letter * 500, letter * 500, "\\n"):
                sys.stdout.write(part)
        """,
    )

    lines = launch("-n", "2", path).stdout.splitlines()

    assert len(lines) == 600
    assert set(lines) == {"[rank 0] " + "a" * 1000, "[rank 1] " + "b" * 1000}


def test_a_redrawn_line_is_live_on_a_terminal_and_whole_in_a_file(tmp_path):
    path = script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            for step in range(3):
                sys.stdout.write(f"\\rstep {step}")
                time.sleep(0.1)
            print()
        """,
    )
    reader, terminal = pty.openpty()
    process = start("-n", "2", path, stdout=terminal, stderr=terminal)
    process.wait(60)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    os.close(terminal)

    assert "[rank 0] step 0\r\x1b[K[rank 0] step 1\r\x1b[K[rank 0] step 2\r\x1b[K[rank 0] step 2\r\n" in shown
    assert launch("-n", "2", path).stdout == "[rank 0] step 2\n"


def test_a_reader_that_goes_away_ends_the_run(tmp_path):
    path = script(tmp_path, WRITE_PID + "write_pid(os.environ['RANK'])\nwhile True: print('x' * 1000)")

    process = start("-n", "2", path, str(tmp_path), stderr=subprocess.DEVNULL)
    pids = written_pids(tmp_path, 2)
    process.stdout.close()

    assert process.wait(60) == 128 + signal.SIGPIPE
    assert gone(pids)


# What a rank is


def test_a_rank_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7")
    path = script(tmp_path, "import sys, beside; print(__name__, __file__ == sys.argv[0], beside.value)")

    assert launch("-n", "1", path).stdout == "[rank 0] __main__ True 7\n"


def test_a_module_runs_as_with_python_m(tmp_path):
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", "import sys; print(__name__, sys.argv[1:])", "tool.py")

    result = launch("-n", "1", "-m", "package.tool", "--flag", cwd=tmp_path)

    assert result.stdout == "[rank 0] __main__ ['--flag']\n"


def test_the_environment_is_torchruns_and_the_users_settings_win():
    base = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "RANK": "99", "HOME": "/home"}

    got = rank_environment(base, rank=1, size=4, port=1234)

    assert (got["RANK"], got["LOCAL_RANK"], got["WORLD_SIZE"], got["MASTER_PORT"]) == ("1", "1", "4", "1234")
    assert (got["OMP_NUM_THREADS"], got["GLOO_SOCKET_IFNAME"], got["HOME"]) == ("7", "eth9", "/home")
    assert got["MASTER_ADDR"] == "127.0.0.1"
    assert got["NCCL_SOCKET_IFNAME"].startswith("lo")
    assert int(rank_environment({}, rank=0, size=1000, port=1)["OMP_NUM_THREADS"]) == 1


def test_a_script_that_knows_only_torch_meets_too(tmp_path):
    path = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
        """,
    )

    result = launch("-n", "2", path)

    assert sorted(result.stdout.splitlines()) == ["[rank 0] 2.0", "[rank 1] 2.0"], result.stderr
    assert result.returncode == 0


def test_two_runs_at_once_do_not_meet(tmp_path):
    path = script(
        tmp_path,
        """
        import sys, torch, torch.distributed as dist
        import paceline
        with paceline.world() as world:
            total = torch.tensor([float(sys.argv[1])])
            dist.all_reduce(total)
            print(total.item())
        """,
    )

    runs = [start("-n", "2", path, number) for number in ("1", "10")]
    outputs = [run.communicate(timeout=90)[0] for run in runs]

    assert [run.returncode for run in runs] == [0, 0]
    assert [sorted(output.splitlines()) for output in outputs] == [
        ["[rank 0] 2.0", "[rank 1] 2.0"],
        ["[rank 0] 20.0", "[rank 1] 20.0"],
    ]


# Failures


def test_the_first_failure_stops_the_others_and_gives_the_exit_code(tmp_path):
    path = script(
        tmp_path,
        WRITE_PID
        + """
        write_pid(os.environ["RANK"])
        if os.environ["RANK"] == "1":
            while len(list(pathlib.Path(sys.argv[1]).glob("*.pid"))) < 3: time.sleep(0.01)
            try:
                open("/no/such/file")
            except OSError:
                print("giving up", file=sys.stderr)
                raise SystemExit(3)
        time.sleep(1000)
        """.replace("\n        ", "\n"),
    )

    result = launch("-n", "3", path, str(tmp_path))

    assert result.returncode == 3
    assert result.stderr.splitlines()[-3:] == [
        "paceline: rank 1 of 3 failed first: exit code 3. Its last words:",
        "    giving up",
        "paceline: stopped because of it: ranks 0, 2",
    ]
    assert gone(written_pids(tmp_path, 3))


def test_the_report_shows_the_traceback(tmp_path):
    path = script(
        tmp_path, "import os, time\nif os.environ['RANK'] == '0': raise ValueError('boom')\ntime.sleep(1000)"
    )

    result = launch("-n", "2", path)

    assert result.returncode == 1
    assert "[rank 0] ValueError: boom" in result.stderr
    report = result.stderr.partition("paceline: rank 0 of 2 failed first: exit code 1. Its last words:\n")[2]
    assert report.startswith("    Traceback (most recent call last):\n")
    assert report.endswith("    ValueError: boom\npaceline: stopped because of it: rank 1\n")


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    path = script(
        tmp_path, "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(1000)"
    )

    result = launch("-n", "2", path)

    assert result.returncode == 137
    assert "paceline: rank 1 of 2 failed first: killed by SIGKILL" in result.stderr


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    path = script(
        tmp_path,
        WRITE_PID
        + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); write_pid(os.environ['RANK'])\n"
        + "folder = pathlib.Path(sys.argv[1])\n"
        + "while len(list(folder.glob('*.pid'))) < 2: time.sleep(0.01)\n"
        + "if os.environ['RANK'] == '1': sys.exit(4)\n"
        + "time.sleep(1000)",
    )

    result = launch("-n", "2", path, str(tmp_path))

    assert result.returncode == 4
    assert gone(written_pids(tmp_path, 2))


@pytest.mark.parametrize("how", ["", "start_new_session=True"], ids=["child", "daemon"])
def test_children_of_ranks_do_not_stay(tmp_path, how):
    path = script(
        tmp_path,
        WRITE_PID
        + "import subprocess\n"
        + f"child = subprocess.Popen(['sleep', '1000'], {how})\n"
        + "write_pid(os.environ['RANK'], child.pid)",
    )

    result = launch("-n", "2", path, str(tmp_path))

    assert result.returncode == 0
    assert gone(written_pids(tmp_path, 2))


# Signals


def test_ctrl_c_reaches_the_ranks(tmp_path):
    process = start("-n", "2", script(tmp_path, HANG), str(tmp_path))
    pids = written_pids(tmp_path, 2)

    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]

    assert process.returncode == 130
    assert "[rank 1] KeyboardInterrupt" in err
    assert err.splitlines()[-1] == (
        "paceline: SIGINT was passed on to the ranks; rank 0: killed by SIGINT, rank 1: killed by SIGINT"
    )
    assert gone(pids)


CATCH = """
def done(*_):
    print('saved')
    sys.exit(int(sys.argv[2]))
signal.signal(signal.{name}, done)
write_pid(os.environ['RANK'])
time.sleep(1000)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 0), ("SIGTERM", 0), ("SIGTERM", 5)])
def test_a_script_may_end_in_its_own_way(tmp_path, name, code):
    path = script(tmp_path, WRITE_PID + "import signal" + CATCH.format(name=name))
    process = start("-n", "2", path, str(tmp_path), str(code))
    written_pids(tmp_path, 2)

    process.send_signal(signal.Signals[name])
    out = process.communicate(timeout=60)[0]

    assert process.returncode == code
    assert sorted(out.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]


def test_sigterm_ends_a_run(tmp_path):
    process = start("-n", "2", script(tmp_path, HANG), str(tmp_path))
    pids = written_pids(tmp_path, 2)

    process.terminate()
    process.communicate(timeout=60)

    assert process.returncode == 143
    assert gone(pids)


def test_a_second_ctrl_c_kills(tmp_path):
    ignore = "import signal; signal.signal(signal.SIGINT, lambda *_: print('not now'))\n"
    path = script(tmp_path, WRITE_PID + ignore + "write_pid(os.environ['RANK'])\nwhile True: time.sleep(1)")
    process = start("-n", "1", path, str(tmp_path))
    pids = written_pids(tmp_path, 1)

    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "[rank 0] not now\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert gone(pids)


def test_nothing_outlives_a_launcher_that_was_killed(tmp_path):
    path = script(
        tmp_path,
        WRITE_PID
        + "import subprocess\n"
        + "write_pid('child' + os.environ['RANK'], subprocess.Popen(['sleep', '1000']).pid)\n"
        + HANG,
    )
    process = start("-n", "2", path, str(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids = written_pids(tmp_path, 4) + children_of(process.pid)
    assert len(set(pids)) == 5  # two ranks, their children, and the store

    process.kill()
    process.wait()

    wait_until(lambda: gone(pids), seconds=20)


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_nothing_of_a_finished_run_is_left(tmp_path):
    process = start("-n", "2", script(tmp_path, HANG), str(tmp_path))
    written_pids(tmp_path, 2)
    pids = children_of(process.pid)
    assert len(pids) == 3

    process.terminate()
    process.communicate(timeout=60)

    assert gone(pids)


def test_what_the_launcher_was_told_to_ignore_stays_ignored(tmp_path):
    path = script(tmp_path, HANG)
    process = subprocess.Popen(
        ["nohup", *command("-n", "1", path, str(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    pids = written_pids(tmp_path, 1)

    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 143
    assert gone(pids)


def test_the_launcher_itself_needs_no_torch():
    code = "import sys, paceline.cli; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
