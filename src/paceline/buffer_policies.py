"""Which buffers are made equal when: one policy for all, or the first pattern of names that matches.

    after_backward   at the end of each reduced backward
    a number k       at the end of every k-th reduced backward
    before_forward   before each forward in training
    after_forward    after each forward in training
    before_saving    when sync_buffers() is called
    start            at the start only
    never            not even at the start

Under every policy but the last they also become rank 0's at the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from paceline.errors import name_some

Policy = Literal["after_backward", "before_forward", "after_forward", "before_saving", "start", "never"] | int

DEFAULT: Policy = "after_backward"
WORDS = ("after_backward", "before_forward", "after_forward", "before_saving", "start", "never")
FORWARD: frozenset[Policy] = frozenset({"before_forward", "after_forward"})
LEFT_TO_EACH_RANK: frozenset[Policy] = frozenset({"before_saving", "start", "never"})  # while it trains


class Due:
    """Whether buffers that are due around a forward have to wait for the end of its backward.

    Compiled code sets this: inside of it nothing can be exchanged.
    """

    def __init__(self, policies: frozenset[Policy]) -> None:
        self.policies = policies
        self.is_put_off = False


@dataclass(frozen=True)
class Policies:
    """Patterns of buffers' names, each with its policy. What no pattern matches has the default."""

    rules: tuple[tuple[str, Policy], ...] = (("*", DEFAULT),)

    @classmethod
    def of(cls, given: Policy | Mapping[str, Policy]) -> "Policies":
        """Read what a user gives: a policy for all buffers, or a mapping of patterns to policies."""
        return cls(tuple(given.items()) if isinstance(given, Mapping) else (("*", given),))

    def of_buffer(self, name: str) -> Policy:
        """Return the policy of one buffer."""
        return next((policy for pattern, policy in self.rules if fnmatchcase(name, pattern)), DEFAULT)

    def never(self, names: Sequence[str]) -> frozenset[str]:
        """Return the buffers that are each rank's own from the beginning."""
        return frozenset(name for name in names if self.of_buffer(name) == "never")

    def check(self, names: Sequence[str]) -> None:
        """Refuse what is no policy, and patterns that say nothing about any of the buffers."""
        for pattern, policy in self.rules:
            _check_pattern(pattern)
            _check_policy(policy)
        left = list(names)
        for pattern, _ in self.rules:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in left):
                raise ValueError(_of_no_use(pattern, names))
            left = [name for name in left if not fnmatchcase(name, pattern)]

    def __str__(self) -> str:
        """Write them down as they were given."""
        if [pattern for pattern, _ in self.rules] == ["*"]:
            return repr(self.rules[0][1])
        return repr(dict(self.rules))


def _check_policy(policy: object) -> None:
    if isinstance(policy, str) and policy in WORDS:
        return
    if isinstance(policy, int) and not isinstance(policy, bool) and policy > 0:
        return
    raise ValueError(
        f"{policy!r} is no policy for buffers; take one of {', '.join(WORDS)}, or a number of reduced "
        "backwards above 0"
    )


def _check_pattern(pattern: object) -> None:
    if not isinstance(pattern, str):
        raise TypeError(f"buffers maps patterns of names to policies, got the pattern {pattern!r}")


def _of_no_use(pattern: str, names: Sequence[str]) -> str:
    if any(fnmatchcase(name, pattern) for name in names):
        return (
            f"buffers: the pattern {pattern!r} comes too late: what it matches is matched by patterns before "
            "it, and the first one wins. Put it first"
        )
    there = f"there are {name_some(names)}" if names else "there are no buffers"
    return f"buffers: the pattern {pattern!r} matches no buffer; {there}"
