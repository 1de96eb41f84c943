"""What is measured in a scenario, and the words for it.

Everything here is called by all ranks together and says the same on all of them: the ranks show each other
what they hold over the default group. Torch's class gets a group of its own, because it may break it.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EQUAL = "equals the reference, ranks agree"
DIFFER = "ranks differ, silent"
ASTRAY = "ranks agree, but not with the reference, silent"
LOCAL = "not reduced: each rank keeps its own gradient"

Gradients = Mapping[str, torch.Tensor | None]


def share(whole: torch.Tensor) -> torch.Tensor:
    """Take this rank's rows of a batch."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def batch(rows: int = 12, width: int = 4, seed: int = 7) -> torch.Tensor:
    """Make the same whole batch on every rank."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def gather(mine: Any) -> list[Any]:
    """Show every rank what all ranks have."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copy the gradients of a model, under the names of the bare one."""
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def reference(model: nn.Module, run: Callable[[nn.Module], object]) -> Gradients:
    """Return the gradients that one process gets by running the whole batch."""
    alone = copy.deepcopy(model)
    run(alone)
    return gradients(alone)


def verdict(model: nn.Module, expected: Gradients, local: Gradients | None = None) -> str:
    """Compare the gradients between the ranks, bit for bit, and with the reference."""
    mine = gradients(model)
    everyone = gather(mine)
    if all(_identical(everyone[0], other) for other in everyone[1:]):
        return EQUAL if _close(mine, expected) else ASTRAY
    if local is not None and all(gather(_close(mine, local))):
        return LOCAL
    return DIFFER


def attempt(action: Callable[[], object]) -> str:
    """Run something on every rank and say which ranks raised what; nothing if none did."""
    try:
        action()
        mine = ""
    except Exception as error:
        mine = f"{type(error).__name__}: {first_words(error)}"
    told = gather(mine)
    if not any(told):
        return ""
    if len(set(told)) == 1:
        return f"every rank raised {told[0]}"
    deeds = (f"raised {text}" if text else "went on" for text in told)
    return "; ".join(f"rank {rank} {deed}" for rank, deed in enumerate(deeds))


def story(chapters: Iterable[tuple[str, str]]) -> str:
    """Tell what was seen under each heading, once where it was the same."""
    headings: dict[str, list[str]] = {}
    for heading, seen in chapters:
        headings.setdefault(seen, []).append(heading)
    if len(headings) == 1:
        return next(iter(headings))
    return "; ".join(f"{', '.join(names)}: {seen}" for seen, names in headings.items())


def first_words(error: BaseException, limit: int = 170) -> str:
    """Shorten a message to its first sentence, without what changes from run to run."""
    text = (str(error).strip().splitlines() or [""])[0]
    text = re.sub(r' at "\S+":\d+, please.*', "", text)
    text = re.sub(r"\[?\S*/(\w+\.(?:cc|cpp|h|py)):\d+\]?", r"\1:", text)
    text = re.sub(r"(\d+\.\d+\.\d+\.\d+)\]?:\d+", r"\1", text)
    text = re.split(r"(?<=\w)\. ", text, maxsplit=1)[0]
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " ..."


def _identical(one: Gradients, other: Gradients) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def _close(one: Gradients, other: Gradients) -> bool:
    assert one.keys() == other.keys()
    pairs = [(one[name], other[name]) for name in one]
    return all((a is None) == (b is None) for a, b in pairs) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs if a is not None and b is not None
    )
