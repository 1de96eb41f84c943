"""Where the two columns of the conformance table differ, and what neither can show here, and why.

Each entry says what our side is seen to fail with, so that any other failure still counts as one.
"""

from typing import NamedTuple


class Deviation(NamedTuple):
    """Why a test of torch's may fail on our class, and with which words it does."""

    reason: str
    seen: str


_UNUSED = "expects torch's error for unused parameters; ours trains such a model correctly (promise A)"

# Torch raises or goes silently wrong, and paceline trains correctly, or says what is missing for that.
# Told to users in docs/from-ddp.md.
ALLOWED = {
    "test_DistributedDataParallel_requires_grad": Deviation(
        "expects an error for a module with nothing to train; ours passes it through (promise Z)",
        "RuntimeError not raised",
    ),
    "test_static_graph_api_cpu": Deviation(
        "expects an error when static_graph is set late; nothing depends on it here",
        "RuntimeError not raised",
    ),
    "test_ddp_unused_params_rebuild_buckets_exception": Deviation(_UNUSED, "error not raised"),
    "test_ddp_control_flow_same_across_ranks": Deviation(_UNUSED, "DDP error not raised"),
    "test_ddp_control_flow_different_across_ranks": Deviation(_UNUSED, "DDP error not raised"),
    "test_invalid_static_graph": Deviation(
        "expects an error when use changes under static_graph=True; ours trains on", "RuntimeError not raised"
    ),
    "test_ddp_multiple_nested_unused_params_error": Deviation(_UNUSED, "Expected error was not raised"),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": Deviation(
        _UNUSED, "Expected error was not raised"
    ),
    "test_ddp_sync_bn_training_vs_eval": Deviation(
        "one rank alone runs backward on model.module: torch leaves its gradients unreduced without a word; "
        "ours reduces whatever reaches the parameters (promise I), and says that the other rank has left",
        "PeerLost: rank 1 is gone",
    ),
}

# Not of that kind: ours differs, and trains neither better nor worse for it.
OTHERWISE = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": Deviation(
        "hands the wrapper's C++ logger to a C++ function of torch's reducer; such an object can be made of "
        "torch's own reducer only, and ours has none",
        "no attribute 'logger'",
    ),
}

DEVIATIONS = {**ALLOWED, **OTHERWISE}

# Tests that torch's class does not pass under the stand-in either.
OUT_OF_REACH = {
    "test_ddp_profiling_execution_trace": "checks NCCL's entries in a trace",
    "test_ddp_device": "checks the index of the GPU that inputs were moved to",
    "test_ddp_has_finalized": "expects NCCL's watchdog to end the process",
}
