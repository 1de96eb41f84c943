"""What a replica does, as a page that a person can read. Pure: facts in, text out."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.buffer_policies import Policy
from paceline.memory import HUGE_NBYTES, WORTHWHILE_NBYTES
from paceline.plan import Bucket, Plan

WIDTH = 100
INDENT = 15  # where the text of a row starts
SHOWN_BUCKETS = 20

WHEN: dict[Policy, str] = {
    "after_backward": "made rank 0's at the end of each reduced backward",
    "before_forward": "made rank 0's before each forward in training",
    "after_forward": "made rank 0's after each forward in training",
    "before_saving": "made rank 0's when sync_buffers() is called",
    "start": "made rank 0's at the start only",
    "never": "left to each rank",
}


@dataclass(frozen=True)
class Facts:
    """What there is to say. ``rows`` has what a wrapper knows better, by the names of the rows.

    ``precision``, ``consumer`` and ``joining`` are what the engine works with, or None.
    """

    module: str
    rank: int
    size: int
    plan: Plan
    backend: str = ""  # nothing for a process alone
    seconds: float = 0.0  # how long a rank waits for the others
    step: int = 0
    left_out: Sequence[str] = ()
    sharded: str = ""  # how many parameters, and over what
    is_plan_learned: bool = False
    plan_changes: int = 0
    hook: str = "average"
    unused: str = "allow"
    skip_unused: bool = False
    guard: bool = True
    buffers: Sequence[tuple[Policy, int]] = ()  # policy and size of each
    precision: Any = None
    consumer: Any = None
    joining: Any = None
    rows: Mapping[str, str] = field(default_factory=dict)


def explain(facts: Facts) -> str:
    """Draw the page, at most 100 columns wide."""
    where = f"rank {facts.rank} of {facts.size}"
    title = f"{facts.module} on {where}, {f'over {facts.backend}' if facts.backend else 'a process alone'}"
    rows = {**_rows(facts), **facts.rows}
    lines = [line for name, text in rows.items() for line in _row(name, text)]
    return "\n".join([shorten(title, WIDTH), "", *lines, *_buckets(facts.plan)])


def _rows(facts: Facts) -> dict[str, str]:
    alone = facts.size == 1
    rows = {
        "parameters": _parameters(facts),
        "gradients": _gradients(facts),
        "hook": facts.hook,
        "unused": _unused(facts),
        "buffers": _buffers(facts),
        "precision": _precision(facts),
        "optimizer": _optimizer(facts),
        "guard": _guard(facts),
        "join": _joining(facts),
        "plan": _plan(facts),
        "memory": _memory(facts),
    }
    if alone or not facts.plan.members:
        rows = {name: rows[name] for name in ("parameters", "gradients", "precision", "memory")}
    return rows


def _parameters(facts: Facts) -> str:
    trained = len(facts.plan.members)
    left_out = f"; left to each rank: {_names(facts.left_out)}" if facts.left_out else ""
    sharded = f"; {facts.sharded}" if facts.sharded else ""
    return f"{trained} trained, {len(facts.plan.specs) - trained} frozen{sharded}{left_out}"


def _gradients(facts: Facts) -> str:
    if not facts.plan.members:
        return "none: nothing is trained here"
    size = size_of(sum(bucket.nbytes for bucket in facts.plan.buckets))
    if facts.size == 1:
        return f"{size}; with one rank there is nobody to agree with, so nothing is sent"
    waiting = f"a rank waits up to {facts.seconds:g} s for the others"
    return f"{size} in each step, {_count(facts.step, 'step')} so far; {waiting}"


def _plan(facts: Facts) -> str:
    count = _count(len(facts.plan.buckets), "bucket")
    sparse = f", and {_count(len(facts.plan.sparse), 'sparse gradient')} by rows" if facts.plan.sparse else ""
    standing = (
        "in the order in which gradients were seen to arrive"
        if facts.is_plan_learned
        else "last registered first, until the first backward shows in which order gradients arrive"
    )
    return f"{count}{sparse}, {standing}; changed {_count(facts.plan_changes, 'time')}"


def _unused(facts: Facts) -> str:
    if facts.unused == "error":
        return "a trained parameter without a gradient, on any rank, is an error on all of them"
    skipped = "; a bucket that no rank has anything for is not sent" if facts.skip_unused else ""
    return f"allowed: zeros from a rank without a gradient, untouched if no rank has one{skipped}"


def _buffers(facts: Facts) -> str:
    groups: dict[Policy, list[int]] = {}
    for policy, nbytes in facts.buffers:
        groups.setdefault(policy, []).append(nbytes)
    parts = [f"{len(sizes)} ({size_of(sum(sizes))}) {_when(policy)}" for policy, sizes in groups.items()]
    return "; ".join(parts) or "none"


def _when(policy: Policy) -> str:
    return WHEN[policy] if isinstance(policy, str) else f"made rank 0's at one in {policy} reduced backwards"


def _precision(facts: Facts) -> str:
    if facts.precision is None:
        return "as the parameters are"
    asked = {
        "computes in": facts.precision.param,
        "sends gradients in": facts.precision.reduce,
        "keeps buffers in": facts.precision.buffer,
    }
    words = [f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in asked.items() if dtype]
    return f"{', '.join(words) or 'as the parameters are'}; the optimizer sees full precision"


def _joining(facts: Facts) -> str:
    if facts.joining is None:
        return "not inside join(): every rank runs the same number of backwards"
    if facts.joining.early == "stop":
        return "inside join(): all ranks stop when one has run out of batches"
    who = (
        "ranks that still have batches" if facts.joining.divide_by == "active" else "initial number of ranks"
    )
    return f"inside join(): ranks may run out of batches; gradients are divided by the {who}"


def _optimizer(facts: Facts) -> str:
    if facts.consumer is None:
        return "steps after backward()"
    optimizer = getattr(facts.consumer, "optimizer", None)
    name = type(optimizer).__name__ if optimizer is not None else "several"
    return f"{name}, inside backward: each bucket as soon as it is reduced"


def _guard(facts: Facts) -> str:
    if not facts.guard:
        return "off: an optimizer may step on gradients that the ranks have not agreed on"
    return "on: no optimizer steps on gradients that the ranks have not agreed on"


def _memory(facts: Facts) -> str:
    buckets = facts.plan.buckets
    if facts.size == 1 or not buckets:
        return "nothing beside what the module and its gradients take"
    largest = f"largest bucket {size_of(max(bucket.nbytes for bucket in buckets))}"
    if facts.consumer is not None:
        return f"a bucket is freed as soon as it is stepped; {largest}"
    total = size_of(sum(bucket.nbytes for bucket in buckets))
    return (
        f"{total} while there are gradients, which are views of the buckets; {_between(buckets)}; {largest}"
    )


def _between(buckets: Sequence[Bucket]) -> str:
    """Say what is held from zero_grad() to the next backward."""
    on_cpu = [bucket.nbytes for bucket in buckets if bucket.device.type == "cpu"]
    kept = sum(nbytes for nbytes in on_cpu if WORTHWHILE_NBYTES <= nbytes < HUGE_NBYTES)
    lent = sum(nbytes for nbytes in on_cpu if nbytes >= HUGE_NBYTES)
    if not kept and not lent:
        return "none after zero_grad()"
    parts = [f"{size_of(kept)} of pages"] * (kept > 0)
    parts += [f"{size_of(lent)} of pages that the kernel may take"] * (lent > 0)
    return f"after zero_grad(), for the next step: {' and '.join(parts)}"


def _row(name: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {name:<{INDENT - 2}}", subsequent_indent=" " * INDENT
    )


def _buckets(plan: Plan) -> Iterator[str]:
    if not plan.members:
        return
    yield ""
    yield "  bucket  device  dtype             size  parameters"
    for bucket in plan.buckets[:SHOWN_BUCKETS]:
        names = [plan.specs[slot.parameter].name for slot in bucket.slots]
        dtype = str(bucket.dtype).removeprefix("torch.")
        start = f"{bucket.index:>8}  {bucket.device.type:<6}  {dtype:<10}  {size_of(bucket.nbytes):>10}  "
        yield start + fitting(names, WIDTH - len(start))
    rest = plan.buckets[SHOWN_BUCKETS:]
    if rest:
        yield f"          and {_count(len(rest), 'bucket')} more, {size_of(sum(b.nbytes for b in rest))}"
    if plan.sparse:
        start = "  sparse  gathered by rows             "
        yield start + fitting([plan.specs[index].name for index in plan.sparse], WIDTH - len(start))


def fitting(names: Sequence[str], width: int) -> str:
    """Join as many names as fit, and count the rest."""
    shown = ", ".join(names)
    count = len(names)
    while len(shown) > width and count > 1:
        count -= 1
        shown = f"{', '.join(names[:count])} and {len(names) - count} more"
    if len(shown) <= width:
        return shown
    tail = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return shorten(names[0], width - len(tail)) + tail


def shorten(text: str, width: int) -> str:
    """Cut out the middle of what is too long: both ends of a parameter's name tell something."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]}...{text[len(text) - (width - 3 - head) :]}"


def size_of(nbytes: int) -> str:
    """Write a number of bytes as a person would."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(names: Sequence[str]) -> str:
    return fitting(sorted(names), 60)
