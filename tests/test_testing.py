"""@ranks runs tests on ranks, and says what went wrong on each of them."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.testing import RankFailure, ranks


def failure_of(run, *args, **kwargs) -> RankFailure:
    """Run a decorated function that has to fail."""
    with pytest.raises(RankFailure) as caught:
        run(*args, **kwargs)
    return caught.value


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that is dead but not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# What a rank gets


@ranks(2)
def test_the_ranks_share_a_default_group(rank, size):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)

    assert total.item() == 3
    assert (dist.get_rank(), dist.get_world_size(), size) == (rank, 2, 2)


@ranks(1)
def test_one_rank_is_a_group_too(rank):
    assert (rank, dist.get_world_size()) == (0, 1)


@ranks(2, backend=None)
def test_without_a_backend_there_is_no_group():
    assert not dist.is_initialized()


@ranks(2)
def test_a_rank_starts_with_seed_0_and_one_thread():
    drawn = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)

    assert drawn == (torch.rand(1), random.random())
    assert torch.get_num_threads() == 1


@dataclass(frozen=True)
class Shape:
    rows: int


@pytest.mark.parametrize("shape", [Shape(1), Shape(2)])
@ranks(2)
def test_parameters_may_be_instances_of_the_test_files_own_classes(rank, shape):
    assert isinstance(shape, Shape)
    assert shape.rows in (1, 2)


@ranks(2)
def test_all_ranks_see_the_same_tmp_path(rank, tmp_path):
    (tmp_path / str(rank)).touch()
    dist.barrier()

    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.fixture
def changed_environment(monkeypatch):
    monkeypatch.setenv("PACELINE_TEST_VARIABLE", "seen")


@ranks(1)
def test_ranks_see_the_environment_of_the_moment(changed_environment):
    assert os.environ["PACELINE_TEST_VARIABLE"] == "seen"


class TestMethods:
    answer = 42

    @ranks(2)
    def test_methods_work(self, rank):
        assert self.answer == 42

    @staticmethod
    @ranks(2)
    def test_static_methods_work(rank):
        assert rank in (0, 1)


@ranks(2)
def test_expected_exceptions_are_caught_on_the_rank(rank):
    with pytest.raises(ValueError, match="as planned"):
        raise ValueError("as planned")


@given(number=st.integers(0, 3))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@ranks(1)
def test_hypothesis_may_stand_above(number):
    assert 0 <= number <= 3


@ranks(2)
def test_destroying_the_group_yourself_is_fine(rank):
    dist.destroy_process_group()


# What happens when a rank fails, dies, or never ends


@ranks(2)
def compare_on_rank_1(rank):
    print("rank", rank, "was here")
    values = [rank, 1]
    assert values == [0, 1]


def test_a_failed_assert_shows_its_values(capsys):
    failure = failure_of(compare_on_rank_1)

    assert list(failure.texts) == [1]
    assert str(failure).startswith("rank 1 of 2 failed\nTraceback")
    assert "assert [1, 1] == [0, 1]" in str(failure)
    assert "in compare_on_rank_1" in str(failure)
    assert "paceline/testing.py" not in str(failure)
    assert capsys.readouterr().out == "[rank 0] rank 0 was here\n[rank 1] rank 1 was here\n"


@ranks(2)
def raise_on_both(rank):
    raise KeyError(f"lost on {rank}")


def test_every_failed_rank_is_shown():
    failure = failure_of(raise_on_both)

    assert "KeyError: 'lost on 0'" in failure.texts[0]
    assert "KeyError: 'lost on 1'" in failure.texts[1]


@ranks(2)
def leave(rank, how):
    if rank == 1:
        print("last words", flush=True)
        how(os.getpid())
    dist.barrier()


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def exit_3(pid):
    os._exit(3)


def sys_exit(pid):
    sys.exit(4)


@pytest.mark.parametrize(
    ("how", "words"),
    [(kill, "was killed by SIGKILL\nlast words"), (exit_3, "died with exit code 3\nlast words")],
)
def test_a_dead_rank_comes_first_and_is_named_with_its_ending(how, words):
    failure = failure_of(leave, how=how)

    assert failure.texts[1] == words
    assert str(failure).startswith("rank 1 of 2")


def test_sys_exit_inside_a_test_is_a_failure():
    assert "SystemExit: 4" in failure_of(leave, how=sys_exit).texts[1]


def sleep_long():
    time.sleep(1000)


@ranks(2, timeout=3)
def never_end(rank):
    if rank == 0:
        threading.Thread(target=sleep_long, daemon=True).start()
        dist.barrier()
    sleep_long()


def test_a_stuck_rank_shows_the_stacks_of_its_threads():
    failure = failure_of(never_end)

    assert failure.texts[0].startswith("was still running after 3 s; it was here\n")
    assert "in barrier" in failure.texts[0]
    assert "in sleep_long" in failure.texts[0]
    assert "in never_end" in failure.texts[1]
    assert "in sleep_long" in failure.texts[1]


@ranks(2)
def fail_beside_a_stuck_rank(rank):
    if rank == 0:
        raise ValueError("the cause")
    sleep_long()


def test_the_other_ranks_get_a_moment_only_once_one_has_failed():
    failure = failure_of(fail_beside_a_stuck_rank)

    assert "ValueError: the cause" in failure.texts[0]
    assert failure.texts[1].startswith("was still running when rank 0 had failed; it was here\n")


@ranks(2, backend=None)
def leave_a_thread_behind(rank):
    if rank == 1:
        threading.Thread(target=sleep_long).start()


def test_a_rank_that_cannot_exit_is_a_failure(monkeypatch):
    monkeypatch.setattr("paceline.testing.EXIT_SECONDS", 1.0)
    failure = failure_of(leave_a_thread_behind)

    assert failure.texts[1].startswith("did not exit within 1 s after the test; it was here\n")
    assert "in sleep_long" in failure.texts[1]


@ranks(2)
def write_pids_and_hang(rank, folder):
    child = subprocess.Popen(["sleep", "1000"])
    (folder / f"{rank}.part").write_text(f"{os.getpid()} {child.pid}")
    (folder / f"{rank}.part").rename(folder / f"{rank}.pids")
    sleep_long()


def pids_in(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def test_an_interrupt_ends_the_ranks_and_their_children(tmp_path):
    def interrupt():
        wait_until(lambda: len(pids_in(tmp_path)) == 4)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        write_pids_and_hang(folder=tmp_path)

    wait_until(lambda: not any(map(alive, pids_in(tmp_path))))


def test_ranks_end_with_a_test_process_that_was_killed(tmp_path):
    (tmp_path / "test_hang.py").write_text(HANGING_TEST)
    process = subprocess.Popen(pytest_command("test_hang.py"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(pids_in(tmp_path)) == 2, seconds=100)
    process.kill()
    process.wait()

    wait_until(lambda: not any(map(alive, pids_in(tmp_path))))


HANGING_TEST = """
import os, time
from pathlib import Path
from paceline.testing import ranks

@ranks(2)
def test_hang(rank):
    Path(f"{rank}.part").write_text(str(os.getpid()))
    Path(f"{rank}.part").rename(f"{rank}.pids")
    time.sleep(1000)
"""


def pytest_command(*args: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]


# Skips and warnings


@ranks(2)
def skip_on(rank, which):
    if rank in which:
        pytest.skip("no such device")


def test_a_skip_on_all_ranks_skips():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        skip_on(which=[0, 1])


def test_a_skip_on_some_ranks_fails():
    failure = failure_of(skip_on, which=[1])

    assert failure.texts == {1: "skipped, not every rank did: no such device"}


def warn(rank):
    warnings.warn("careful", UserWarning, stacklevel=1)


@ranks(2)
def warns(rank):
    warn(rank)


@ranks(2, warnings="default")
def warns_quietly(rank):
    warn(rank)


def test_a_warning_on_a_rank_is_an_error_by_default():
    assert "UserWarning: careful" in failure_of(warns).texts[1]
    warns_quietly()


@pytest.mark.filterwarnings("ignore:careful:UserWarning")
@ranks(2)
def test_a_filterwarnings_mark_reaches_the_ranks(rank):
    warn(rank)


# Wrong use


def test_wrong_arguments_are_refused_at_the_decorator():
    with pytest.raises(TypeError, match=r"@ranks needs the number of ranks: write @ranks\(2\)"):
        ranks(warn)
    with pytest.raises(ValueError, match="@ranks needs one rank or more, got 0"):
        ranks(0)
    with pytest.raises(ValueError, match="@ranks needs a timeout above 0 seconds, got 0"):
        ranks(2, timeout=0)
    with pytest.raises(TypeError, match="is defined inside a function; ranks need a test at module level"):
        ranks(2)(lambda rank: None)


@ranks(2)
def take_anything(rank, thing):
    pass


def test_an_argument_that_cannot_travel_is_named():
    with pytest.raises(
        TypeError, match=r"argument 'thing' \(function\) cannot be sent to the ranks: .*inside the test"
    ):
        take_anything(thing=lambda: None)


# In other folders, beside other tests

TEST_FILE = """
from paceline.testing import ranks
from {helper} import number

@ranks(2)
def test_reads_its_own_helper(rank):
    assert number() == {expected}
"""


def test_files_of_one_name_use_the_helpers_beside_them_also_in_packages_and_under_xdist(tmp_path):
    for folder in ("one", "three"):
        write_test(tmp_path / folder, f"helper_{folder}", expected=len(folder))
    write_test(tmp_path / "package", ".helper", expected=7)
    (tmp_path / "package" / "__init__.py").touch()

    result = subprocess.run(
        pytest_command("--import-mode=importlib", "-n1", "."),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert "3 passed" in result.stdout, result.stdout + result.stderr


def write_test(folder: Path, helper: str, expected: int) -> None:
    folder.mkdir()
    (folder / "test_same.py").write_text(TEST_FILE.format(helper=helper, expected=expected))
    (folder / f"{helper.lstrip('.')}.py").write_text(f"def number():\n    return {expected}\n")
    (folder / "conftest.py").write_text(
        "import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n"
    )
