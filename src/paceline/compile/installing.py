"""What has to be in place before anything of a replica is compiled; for as long as the process lives.

Most of it waits for the first compilation, so that programs that compile nothing do not load a compiler.

Private names of torch, seen on 2.11 and 2.13: ``torch._dynamo.convert_frame._compile``, which every
compilation comes by, ``torch._dynamo.backends.registry``, ``torch._dynamo.trace_rules.add``.
"""

import threading
from functools import cache
from typing import Any

_lock = threading.Lock()

# What talks to other ranks. Where a user's frame is not compiled as a whole, Dynamo goes on with whatever it
# calls, and would trace these.
TALKING = (
    "across",
    "agreement",
    "apart",
    "auditing",
    "backward",
    "buffers",
    "comm",
    "control",
    "finite",
    "hub",
    "foretold",
    "meeting",
    "norms",
    "outbox",
    "pass_gate",
    "passes",
    "preflight",
    "python_groups",
    "recorder",
    "reporter",
    "sharded",
    "shelf",
    "starting",
    "threads",
    "torch_private",
    "trouble",
    "waiting",
    "warming",
    "watched",
    "watches",
    "whereabouts",
)


def install() -> None:
    """Be there when torch compiles something."""
    with _lock:  # ranks may be threads
        _wait_for_compilations()


@cache
def _wait_for_compilations() -> None:
    from torch._dynamo import convert_frame
    from torch._dynamo.backends import registry

    if SPLIT not in registry._BACKENDS:
        registry.register_backend(compiler_fn=paceline_split, name=SPLIT)
    frames: Any = convert_frame
    compile_frame = frames._compile

    def get_ready_and_compile(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            _get_ready()
        return compile_frame(*args, **kwargs)

    frames._compile = get_ready_and_compile


@cache
def _get_ready() -> None:
    from paceline.compile import in_graph, traced

    _keep_engine_out()
    in_graph.install()
    traced.install()


def _keep_engine_out() -> None:
    """Have Dynamo run the engine as it is, wherever it meets it."""
    from torch._dynamo import trace_rules

    for name in TALKING:
        trace_rules.add(f"paceline.{name}")


SPLIT = "paceline_split"


def paceline_split(*args: Any, **kwargs: Any) -> Any:
    """Compile by the backend of this name, which is loaded when it is first used."""
    from paceline.compile.splitting import by_name

    return by_name(*args, **kwargs)
