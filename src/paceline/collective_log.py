"""What each rank of a check has communicated, and the first place where two ranks differ. Pure.

    rank 0   all_reduce  all_reduce  barrier  all_reduce
    rank 5   all_reduce  all_reduce  ────────  all_reduce
                                     └ the first place

Two ranks are compared by what they do in the groups that both are in: what a rank does in a group of its own
(its stage of a pipeline, its slice of a mesh) is no concern of the others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import name_ranks, name_some

FRAME = "exchange"  # a few bytes that paceline's ranks tell each other; no collective
NEW_GROUP = "new_group"
SENDS, RECEIVES = "send", "recv"


@dataclass(frozen=True)
class Group:
    """A process group, as all its members know it: its ranks, and which one of those with the same ranks."""

    ranks: tuple[int, ...]
    number: int = 0
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        again = f", number {self.number + 1}" if self.number else ""
        return f"{self.label or name_ranks(self.ranks)}{again} ({len(self.ranks)} ranks)"


@dataclass(frozen=True)
class Collective:
    """One collective that a rank has started. ``where`` is the user's line.

    ``terms`` is what else has to be the same on every rank, and ``facts`` says it in lines.
    """

    kind: str
    group: Group
    nbytes: int = 0
    dtype: str = ""
    sizes: tuple[int, ...] = ()  # the elements of each tensor, where all ranks need the same
    terms: tuple[object, ...] = ()
    variant: str = field(default="", compare=False)  # in which it may not differ, where both have one
    note: str = field(default="", compare=False)
    facts: tuple[str, ...] = field(default=(), compare=False)
    where: str = field(default="", compare=False)
    said: bytes = field(default=b"", compare=False, repr=False)  # what this rank tells, which may differ
    peer: int | None = None  # whom a message goes to, or comes from

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that has to be the same on the other ranks of the group."""
        return self.kind, self.group, self.dtype, self.sizes, self.terms

    def meets(self, other: "Collective") -> bool:
        """Tell whether two ranks that come here go on."""
        return self.key == other.key and (
            "" in (self.variant, other.variant) or self.variant == other.variant
        )

    def __str__(self) -> str:
        if self.kind == FRAME:
            return self.note
        size = f" of {name_bytes(self.nbytes)} {self.dtype}" if self.dtype else ""
        return f"{self.kind}{size}{self.note} on {self.group}"

    @property
    def shown(self) -> str:
        """Say what it is, and where the user has asked for it."""
        return f"{self}, at {self.where}" if self.where else str(self)


Logs = Mapping[int, Sequence[Collective]]


@dataclass(frozen=True)
class Difference:
    """The first place where ranks differ. None stands for a rank that has nothing more to come."""

    first: int
    ranks: tuple[int, ...]
    place: int  # in what both have in common
    mine: Collective | None
    theirs: Collective | None
    before: Collective | None  # the last one that was the same
    is_sure: bool = True  # up to here, no rank had told another one something that it did not know

    def __str__(self) -> str:
        mine, theirs = f"rank {self.first}", name_ranks(self.ranks)
        told = f"{mine}: {_shown(self.mine)}, but {theirs}: {_shown(self.theirs)}"
        odd = _odd_facts(self.mine, self.theirs)
        if odd == ("", ""):
            told += ", with the same tensors in another order or with other settings (such as the hook)"
        elif odd:
            told += f". Only {mine} has {odd[0] or 'nothing'}; only {theirs}: {odd[1] or 'nothing'}"
        return told if self.before is None else f"{told}. What came before is the same: {self.before.shown}"


def _shown(collective: Collective | None) -> str:
    return "nothing more" if collective is None else collective.shown


def _odd_facts(mine: Collective | None, theirs: Collective | None) -> tuple[str, str] | None:
    """Return what only one side has, of what two ranks have told of themselves."""
    if mine is None or theirs is None or not (mine.facts and theirs.facts):
        return None
    mine_only = [fact for fact in mine.facts if fact not in set(theirs.facts)]
    theirs_only = [fact for fact in theirs.facts if fact not in set(mine.facts)]
    return name_some(mine_only), name_some(theirs_only)


# ---- comparing -----------------------------------------------------------------------------------


def first_difference(logs: Logs) -> Difference | None:
    """Find the earliest place where a rank differs from the first one that it shares a group with."""
    found = [difference for first, other in _pairs(logs) if (difference := _compare(logs, first, other))]
    if not found:
        return None
    earliest = min(found, key=lambda difference: difference.place)
    alike = [each for each in found if _is_alike(each, earliest)]
    return replace(earliest, ranks=tuple(sorted({rank for each in alike for rank in each.ranks})))


def _is_alike(one: Difference, other: Difference) -> bool:
    same_place = (one.first, one.place, one.mine) == (other.first, other.place, other.mine)
    keys = [each.theirs.key if each.theirs is not None else None for each in (one, other)]
    return same_place and keys[0] == keys[1]


def _pairs(logs: Logs) -> Iterator[tuple[int, int]]:
    """Yield each rank with the first one of every group that it uses."""
    groups = dict.fromkeys(each.group for log in logs.values() for each in log)
    pairs: dict[tuple[int, int], None] = {}
    for group in groups:
        members = sorted(set(group.ranks) & logs.keys())
        pairs.update(dict.fromkeys((members[0], other) for other in members[1:]))
    return iter(pairs)


def _compare(logs: Logs, first: int, other: int) -> Difference | None:
    mine, theirs = (_shared(logs[rank], first, other) for rank in (first, other))
    for place in range(max(len(mine), len(theirs))):
        here = mine[place] if place < len(mine) else None
        there = theirs[place] if place < len(theirs) else None
        if here is None or there is None or not here.meets(there):
            before = mine[place - 1] if place else None
            is_sure = all(a.said == b.said for a, b in zip(mine[:place], theirs[:place], strict=True))
            return Difference(first, (other,), place, here, there, before, is_sure)
    return None


def _shared(log: Sequence[Collective], first: int, other: int) -> list[Collective]:
    return [
        each for each in log if each.peer is None and first in each.group.ranks and other in each.group.ranks
    ]


def frames_before(logs: Logs, difference: Difference) -> Counter[object]:
    """Count the frames of each topic that were exchanged before the place where two ranks differ."""
    log = _shared(logs[difference.first], difference.first, difference.ranks[0])
    return Counter(each.terms[0] for each in log[: difference.place] if each.said)


def first_unmatched(logs: Logs) -> str:
    """Say which message between two ranks has no counterpart; nothing, if each has one."""
    for sender, log in logs.items():
        for receiver in sorted(
            {each.peer for each in log if each.kind == SENDS and each.peer is not None} | logs.keys()
        ):
            if receiver in logs and (told := _unmatched(logs, sender, receiver)):
                return told
    return ""


def _unmatched(logs: Logs, sender: int, receiver: int) -> str:
    sent = [each for each in logs[sender] if each.kind == SENDS and each.peer == receiver]
    if any(each.kind == RECEIVES and each.peer == -1 for each in logs[receiver]):
        return ""  # from whomever: nobody can say which
    taken = [each for each in logs[receiver] if each.kind == RECEIVES and each.peer == sender]
    for one, other in zip(sent, taken, strict=False):
        if one.key[1:] != other.key[1:]:
            return f"rank {sender}: {one.shown}, but rank {receiver}: {other.shown}"
    rest = sent[len(taken) :] or taken[len(sent) :]
    if not rest:
        return ""
    who, missing = (sender, receiver) if len(sent) > len(taken) else (receiver, sender)
    return f"rank {who}: {rest[0].shown}, but rank {missing}: nothing more"


# ---- showing -------------------------------------------------------------------------------------


def table(log: Sequence[Collective]) -> list[str]:
    """Count a rank's collectives by kind, group and dtype."""
    counts: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for each in log:
        if each.kind != FRAME:
            row = each.kind, str(each.group), each.dtype
            counts[row] += 1
            nbytes[row] += each.nbytes
    width = max([5, *(len(group) for _, group, _ in counts)])
    lines = [f"{'kind':<26}  {'group':<{width}}  {'dtype':<10}  {'count':>6}  {'bytes':>10}"]
    for row, count in counts.items():
        kind, group, dtype = row
        size = name_bytes(nbytes[row]) if dtype else ""
        lines.append(f"{kind:<26}  {group:<{width}}  {dtype:<10}  {count:>6}  {size:>10}".rstrip())
    return lines


def name_bytes(count: int) -> str:
    """Write a number of bytes for a reader."""
    if count < 1024:
        return f"{count} B"
    power = min(3, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB')[power - 1]}"
