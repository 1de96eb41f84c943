"""The words at the end of a failed run."""

from paceline.launch.report import (
    Ending,
    describe,
    exit_code,
    failure_report,
    find_traceback,
    interrupt_report,
)

TRACEBACK = ("Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: boom")
ECHO = (*TRACEBACK[:2], "paceline.errors.PeerLost: rank 1 is gone")


def failed(rank, code, words=(), *, stopped=False):
    return Ending(rank, code, stopped, tuple(words))


def test_a_clean_run_has_no_report():
    endings = [failed(0, 0), failed(1, 0)]

    assert failure_report(endings, 2) == []
    assert exit_code(endings) == 0


def test_the_report_names_the_first_failure_its_traceback_and_those_it_stopped():
    endings = [failed(1, 3, ("noise", *TRACEBACK)), failed(2, 1), failed(0, -15, stopped=True)]

    assert failure_report(endings, 3) == [
        "rank 1 of 3 failed first: exit code 3. Its last words:",
        "    Traceback (most recent call last):",
        '      File "a.py", line 1, in <module>',
        "    ValueError: boom",
        "rank 2 failed after it",
        "stopped because of it: rank 0",
    ]
    assert exit_code(endings) == 3


def test_the_echo_of_a_failure_is_not_its_cause():
    endings = [failed(0, 1, ECHO), failed(1, 3, TRACEBACK)]

    assert failure_report(endings, 2)[0].startswith("rank 1 of 2 failed first: exit code 3")
    assert exit_code(endings) == 3


def test_an_echo_is_the_cause_when_there_is_no_other():
    assert exit_code([failed(0, 7, ECHO), failed(1, 0)]) == 7


def test_a_signal_is_named_and_becomes_a_shells_exit_code():
    assert describe(-11) == "killed by SIGSEGV"
    assert "ran out of memory" in describe(-9)
    assert describe(-9, stopped=True) == "killed by SIGKILL, as it had not ended by itself"
    assert exit_code([failed(1, -9)]) == 137


def test_an_interrupted_run_lists_the_ranks_in_order():
    report = interrupt_report("SIGINT", [failed(1, -2), failed(0, 0)])

    assert report == ["SIGINT was passed on to the ranks; rank 0: exit code 0, rank 1: killed by SIGINT"]


def test_the_last_traceback_is_found_with_its_causes():
    chain = ["", "The above exception was the direct cause of the following exception:", ""]
    earlier = list(TRACEBACK)

    assert find_traceback([*earlier, "went on", *TRACEBACK]) == list(TRACEBACK)
    assert find_traceback([*earlier, *chain, *TRACEBACK]) == [*earlier, *chain, *TRACEBACK]


def test_without_a_traceback_the_last_lines_have_to_do():
    lines = [str(number) for number in range(30)]

    assert find_traceback(lines) == lines[-10:]
    assert find_traceback(["x", "Fatal Python error: Segmentation fault", "y"])[0].startswith("Fatal")


def test_a_traceback_that_torch_has_prefixed_is_found_whole() -> None:
    words = ["noise", "[rank1]: Traceback (most recent call last):"]
    words += [f'[rank1]:   File "x.py", line {i}' for i in range(30)]
    words += ["[rank1]: ValueError: boom"]

    found = find_traceback(words)

    assert found[0] == "Traceback (most recent call last):"
    assert found[-1] == "ValueError: boom"
    assert len(found) == 32
