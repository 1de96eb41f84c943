import subprocess
import sys

from tests.examples.conftest import EXAMPLES, Starter


def test_the_ranks_agree(start: Starter) -> None:
    printed = start.run("python", "check_my_step.py")

    assert "256 ranks, of which 6 were run: 0, 1, 2, 8, 128, 255. They agree." in printed
    assert "step 1: loss ?" in printed


def test_the_bug_is_found_with_its_line() -> None:
    script = EXAMPLES / "check_my_step.py"
    line = next(n for n, text in enumerate(script.read_text().splitlines(), 1) if "for ever" in text)

    done = subprocess.run([sys.executable, str(script), "--bug"], capture_output=True, text=True, timeout=100)

    assert done.returncode == 1
    assert "rank 0: all_reduce of 4 B" in done.stderr
    assert f"check_my_step.py:{line}, but ranks 1, 2, 8, 128, 255:" in done.stderr
