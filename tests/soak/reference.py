"""What has to come of a program: the same training in one process, and the comparison with what was seen.

The reference follows the ranks step by step. Its gradients are compared with theirs; then it takes theirs
over, so that no rounding adds up, steps by itself, and has to end with the very bits of their weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tests.soak.interpreter import Entry, Tensors, boom_of, last_of
from tests.soak.model import batch_of, loss_of, make_net, make_optimizer, new_layer
from tests.soak.program import Change, Micro, Program, Reduction, Share, Step

RTOL, ATOL = 1e-4, 1e-6

Piece = tuple[float, dict[str, torch.Tensor]]  # a weight, and a gradient for each parameter that was used


class Mismatch(AssertionError):
    """The ranks did not do what was promised."""


@dataclass
class Figures:
    """What a number of programs came to."""

    programs: int = 0
    steps: int = 0
    raised: int = 0

    def __str__(self) -> str:
        return f"{self.programs} programs, {self.steps} steps, {self.raised} raised as promised"


def judge(program: Program, seen: Sequence[Sequence[Entry]], figures: Figures | None = None) -> None:
    """Raise Mismatch unless the ranks, step by step, did what they had to."""
    reference = Reference(program)
    expected = len(program.steps) + (program.wrong is not None)
    for rank, entries in enumerate(seen):
        if len(entries) != expected:
            raise Mismatch(f"rank {rank} has seen {len(entries)} of {expected} steps")
    for number, step in enumerate(program.steps):
        entries = [rank[number] for rank in seen]
        try:
            reference.follow(number, step, entries)
        except Mismatch as error:
            raise Mismatch(f"step {number}: {error}\n{_told(entries)}") from None
    if program.wrong:
        _judge_wrong(program, [rank[-1] for rank in seen])
    if figures is not None:
        figures.programs += 1
        figures.steps += expected
        figures.raised += sum(bool(entry.error) for entry in seen[0])


class Reference:
    """One process that does what all ranks do together."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nets = [make_net(program, model, 0) for model in range(program.setup.models)]
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizer = make_optimizer(program.setup.optimizer, parameters)
        self._is_dropped = False  # check_finite="skip" has emptied gradients in this step
        self._apart: list[tuple[int, nn.Parameter]] = []  # added, and no reduction has made them equal yet

    def follow(self, number: int, step: Step, entries: Sequence[Entry]) -> None:
        """Do one step, and compare."""
        self._is_dropped = False
        for change in step.changes:
            self._change(number, change)
        if step.zero != "keep":
            self.optimizer.zero_grad(set_to_none=step.zero == "none")
        for place, reduction in enumerate(step.reductions):
            if reduction.faults:
                self._expect_failure((number, place), reduction, entries)
                return
            for pieces in self._meetings((number, place), step, reduction):
                if not self._reduce(reduction, pieces):
                    self._expect(entries, "NotFinite", "holds NaN")
                    return
        for entry in entries:
            if entry.error:
                raise Mismatch(f"nothing was to be raised, but {entry.error}: {entry.text}\n{entry.trace}")
        norms = self._clip(step.clip) if step.clip else ()
        self._compare_ranks(entries, {reduction.model for reduction in step.reductions})
        self._compare(entries[0], norms)
        self.optimizer.step()
        self._compare_weights(entries[0])

    def _change(self, number: int, change: Change) -> None:
        net = self.nets[change.model]
        if change.what == "add":
            layer = new_layer(self.program, number, 0)
            net.layers.append(layer)
            self._apart += [(change.model, parameter) for parameter in layer.parameters()]
            self.optimizer.add_param_group({"params": list(layer.parameters())})
        elif change.what == "remove":
            if len(net.layers) > 1:
                del net.layers[change.layer % len(net.layers)]
        else:
            net.part(change.layer).requires_grad_(change.what == "unfreeze")

    # ---- gradients -----------------------------------------------------------------------------------

    def _meetings(
        self, place: tuple[int, int], step: Step, reduction: Reduction
    ) -> Iterator[list[list[Piece] | None]]:
        """Yield, for each meeting of the ranks, what each brings along; None if it leaves its batch out."""
        yield [self._pieces(place, rank, reduction) for rank in range(self.program.ranks)]
        if reduction.again:
            yield [
                self._last(place, rank, reduction, forwards_first=step.forwards_first)
                for rank in range(self.program.ranks)
            ]

    def _pieces(self, place: tuple[int, int], rank: int, reduction: Reduction) -> list[Piece] | None:
        share = reduction.shares[rank]
        if share.way == "skip":
            return None
        return [
            piece
            for index, micro in enumerate(share.run)
            for piece in [self._piece((*place, rank, index), reduction, micro)] * micro.backwards
        ]

    def _last(
        self, place: tuple[int, int], rank: int, reduction: Reduction, *, forwards_first: bool
    ) -> list[Piece] | None:
        share: Share = reduction.shares[rank]
        if not share.run:
            return None
        index = last_of(share, forwards_first=forwards_first)
        return [self._piece((*place, rank, index), reduction, share.run[index])]

    def _piece(self, place: tuple[int, ...], reduction: Reduction, micro: Micro) -> Piece:
        net = self.nets[reduction.model]
        named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
        plain = Micro(micro.rows, micro.layers)
        loss = loss_of(net(batch_of(self.program, place, micro), plain))
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        used = {name: g.double() for (name, _), g in zip(named, gradients, strict=True) if g is not None}
        return micro.weight if reduction.weighted else 1.0, used

    def _reduce(self, reduction: Reduction, brought: Sequence[list[Piece] | None]) -> bool:
        """Add what all ranks have brought to the gradients; tell whether that went well."""
        present = [pieces for pieces in brought if pieces is not None]
        flat = [(weight, used) for pieces in present for weight, used in pieces if weight]
        divisor = sum(weight for weight, _ in flat) if reduction.weighted else len(present)
        total: dict[str, torch.Tensor] = {}
        for weight, used in flat:
            for name, gradient in used.items():
                total[name] = total.get(name, 0) + weight * gradient / divisor
        net = self.nets[reduction.model]
        self._apart = [(model, parameter) for model, parameter in self._apart if model != reduction.model]
        if any(not bool(gradient.isfinite().all()) for gradient in total.values()):
            if self.program.setup.check_finite == "raise":
                return False
            self._drop(net)
            return True
        for name, parameter in net.named_parameters():
            if name in total:
                before = 0 if parameter.grad is None else parameter.grad.double()
                parameter.grad = (before + total[name]).float()
        return True

    def _drop(self, net: nn.Module) -> None:
        self._is_dropped = True
        for parameter in net.parameters():
            parameter.grad = None

    def _clip(self, limit: float) -> tuple[float, ...]:
        return tuple(float(nn.utils.clip_grad_norm_(net.parameters(), limit)) for net in self.nets)

    # ---- the comparison ------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model, net in enumerate(self.nets):
            yield from ((f"{model}.{name}", p) for name, p in net.named_parameters())

    def _compare_ranks(self, entries: Sequence[Entry], reduced: set[int]) -> None:
        """Compare the ranks with each other, bit for bit."""
        first = entries[0]
        apart = {id(parameter) for _, parameter in self._apart}
        equal = {name for name, parameter in self._named() if id(parameter) not in apart}
        for rank, entry in enumerate(entries[1:], 1):
            weights = {name: weight for name, weight in entry.weights.items() if name in equal}
            # Buffers are made equal where a model's gradients are.
            buffers = {name: b for name, b in entry.buffers.items() if int(name.partition(".")[0]) in reduced}
            for what, mine, theirs in (
                ("gradient", entry.gradients, first.gradients),
                ("weight", weights, first.weights),
                ("buffer", buffers, first.buffers),
            ):
                if odd := _differing(mine, theirs):
                    raise Mismatch(f"{what} {odd} is not the same on ranks 0 and {rank}")

    def _compare(self, first: Entry, norms: tuple[float, ...]) -> None:
        """Compare the first rank with the reference, and take over its gradients."""
        for name, parameter in self._named():
            got, expected = first.gradients.get(name), parameter.grad
            if self._is_dropped and not parameter.requires_grad and got is not None:
                expected = got  # it may have been out of the plan
            if not _is_close(got, expected):
                raise Mismatch(f"the gradient of {name} is\n{got}\nbut in one process\n{expected}")
            parameter.grad = got
        for got_norm, norm in zip(first.norms, norms, strict=True):
            if abs(got_norm - norm) > 1e-4 * norm + 1e-6:
                raise Mismatch(f"the norm was {got_norm}, but in one process {norm}")

    def _compare_weights(self, first: Entry) -> None:
        if odd := _differing({name: p.detach() for name, p in self._named()}, first.weights):
            raise Mismatch(f"after the optimizer step {odd} is not what it is in one process")

    # ---- steps that raise ----------------------------------------------------------------------------

    def _expect_failure(self, place: tuple[int, int], reduction: Reduction, entries: Sequence[Entry]) -> None:
        booms = {rank: boom_of((*place, rank)) for rank in reduction.faults}
        own = [rank for rank, entry in enumerate(entries) if entry.error == "Boom"]
        if not own or any(entries[rank].text != booms.get(rank) for rank in own):
            raise Mismatch(f"ranks {sorted(booms)} were to raise their own, but ranks {own} did")
        others = [entry for rank, entry in enumerate(entries) if rank not in own]
        self._expect(others, "PeerFailed", "boom on rank")
        if others and not any(boom in others[0].text for boom in booms.values()):
            raise Mismatch(
                f"a PeerFailed with other words than those of the rank that raised: {others[0].text}"
            )
        self._check_dropped(entries)
        self.optimizer.zero_grad()

    def _expect(self, entries: Sequence[Entry], error: str, words: str) -> None:
        for entry in entries:
            if entry.error != error or words not in entry.text:
                raise Mismatch(
                    f"{error} ({words!r}) was to be raised, not {entry.error}: {entry.text}\n{entry.trace}"
                )
        if len({entry.text for entry in entries}) > 1:
            raise Mismatch("the texts of the exceptions differ")
        self._check_dropped(entries)
        self.optimizer.zero_grad()

    @staticmethod
    def _check_dropped(entries: Sequence[Entry]) -> None:
        for rank, entry in enumerate(entries):
            if entry.left:
                raise Mismatch(
                    f"gradients were left on rank {rank} after {entry.error}: {', '.join(entry.left)}"
                )


WRONG = {
    "does not step": ("RanksDisagree", "different numbers of optimizer steps"),
    "one more": ("RanksDisagree", "different numbers of optimizer steps"),
    "alone has weights": ("RanksDisagree", "only some ranks have given a weight"),
    "steps on unsynced": ("PeerFailed", "UnsyncedGradients"),
    "other order": ("RanksDisagree", ""),
    "changed alone": ("RanksDisagree", "layers."),
    "astray": ("RanksDisagree", "trunk.bias"),
}


def _judge_wrong(program: Program, entries: Sequence[Entry]) -> None:
    """Every rank has to have raised, with the same text where it is not its own doing."""
    assert program.wrong is not None
    error, words = WRONG[program.wrong]
    others = [e for rank, e in enumerate(entries) if error == "RanksDisagree" or rank != program.culprit]
    problem = ""
    if any(not entry.error for entry in entries):
        problem = "not every rank raised"
    elif any(entry.error != error or words not in entry.text for entry in others):
        problem = f"{error} ({words!r}) was to be raised"
    elif len({entry.text for entry in others}) > 1:
        problem = "the texts of the exceptions differ"
    if problem:
        raise Mismatch(f"rank {program.culprit} {program.wrong}, and {problem}\n{_told(entries)}")


def _told(entries: Sequence[Entry]) -> str:
    return "\n".join(
        f"  rank {rank} {f'raised {e.error}: {e.text}' if e.error else 'stepped'}"
        for rank, e in enumerate(entries)
    )


def _differing(mine: Tensors, theirs: Tensors) -> str:
    for name, tensor in mine.items():
        other = theirs.get(name)
        if (tensor is None) != (other is None):
            return name
        if tensor is not None and other is not None and not torch.equal(tensor, other):
            return name
    return ""


def _is_close(got: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if got is None or expected is None:
        return got is expected
    return torch.allclose(got, expected, rtol=RTOL, atol=ATOL)
