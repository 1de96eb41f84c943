"""A quick part of torch's own DDP tests, on our class; ``make conformance`` runs them all."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.deviations import DEVIATIONS, OUT_OF_REACH
from tests.conformance.report import Row, summary
from tests.conformance.torch_suite import Library, Outcome, Server, Verdict, last_exception

QUICK = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel",  # save and load, static graph, device arguments
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_accumulate_gradients_no_sync",
    "test_post_localSGD_optimizer_step_reload",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",  # four ranks
    "test_ddp_ignore_params_arg",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_namedtuple",
    "test_undefined_grad_parity_unused_parameters",
    "test_ddp_broadcast_buffer",
    "test_static_graph_multi_forward",
    "test_stateless_api_with_ddp",
    "RpcTest.test_pg_init_no_rpc_init",
]


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with Server("paceline") as server:
        yield server


@pytest.mark.parametrize("name", QUICK)
def test_a_test_of_torch_passes_with_our_class(ours: Server, name: str) -> None:
    outcome = ours.run(name)

    assert outcome.verdict == "pass", f"{outcome.reason}\n{outcome.log}"


def test_every_test_that_makes_a_ddp_is_found(ours: Server) -> None:
    sizes = {name: size for name, size, _ in ours.cases}

    assert len(sizes) > 100
    assert sizes["test_stateless_api_with_ddp"] == 2
    assert sizes["test_post_localSGD_optimizer_parity_with_hierarchical_sgd"] == 4
    assert sizes["DdpUnderDistAutogradTest.test_backward_ddp_outside"] == 6
    assert set(sizes) >= {*DEVIATIONS, *OUT_OF_REACH}


def test_a_failure_is_reported_with_its_last_line(ours: Server) -> None:
    outcome = ours.run("test_ddp_device")

    assert outcome.verdict == "fail"
    assert "None mismatch" in outcome.reason


def test_a_stuck_test_fails_with_the_stack_of_every_rank() -> None:
    script = """
        import time
        from tests.conformance import standin, torch_suite

        class Stuck:
            @classmethod
            def _run(cls, rank, *_):
                time.sleep(60)

        torch_suite.LIMIT_SECONDS = 0.5
        outcome = torch_suite.run(torch_suite.Case("stuck", Stuck, "stuck", 2), "torch")
        print(outcome.verdict, outcome.reason, outcome.log)
    """
    root = Path(__file__).parents[2]
    run = [sys.executable, "-c", textwrap.dedent(script)]
    seen = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=60, check=True).stdout

    assert seen.startswith("fail still running after 0 s: rank 0, 1")
    assert seen.count("in _run\n") == 2


def test_the_last_exception_of_a_traceback_is_one_line() -> None:
    text = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in f
    g()
RuntimeError: the buckets differ:
rank 1 has two
Exception raised from check at reducer.cpp:1 (most recent call first):
#0 c10::Error
"""

    assert last_exception(text) == "RuntimeError: the buckets differ: rank 1 has two"


def row(name: str, torch: Verdict, paceline: Verdict) -> Row:
    verdicts: dict[Library, Verdict] = {"torch": torch, "paceline": paceline}
    return Row(name, 2, "", {lib: Outcome(name, lib, v, "", 1.0, "") for lib, v in verdicts.items()})


def test_the_summary_counts_what_torch_passes_and_ours_does_not() -> None:
    rows = [
        row("a", "pass", "pass"),
        row("b", "pass", "fail"),
        row(next(iter(OUT_OF_REACH)), "fail", "fail"),
        row("d", "fail", "pass"),
    ]

    assert [r.standing for r in rows] == [
        "both pass",
        "ours fails",
        "torch does not pass",
        "torch fails",
    ]
    assert "4 tests; torch passes 2, of which ours passes 1" in summary(rows)
    assert "fails 1. 1 cannot pass" in summary(rows)
