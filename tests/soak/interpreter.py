"""Runs a program on one rank, with paceline, and writes down what was seen after each step."""

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import paceline
from paceline.hooks import average, in_dtype
from tests.soak.model import Boom, Net, batch_of, fill, loss_of, make_net, make_optimizer, new_layer
from tests.soak.program import Change, Micro, Program, Reduction, Share, Step

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Entry:
    """What one rank saw of one step: it stepped, or it raised ``error`` (the type's name) with ``text``.

    ``left`` names the gradients that were still there after an exception, of the model it came from.
    """

    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    norms: tuple[float, ...] = ()
    error: str = ""
    text: str = ""
    trace: str = ""
    left: tuple[str, ...] = ()


def run(program: Program, rank: int, group: Any = None) -> list[Entry]:
    """Run a program as one of its ranks; one entry for each step, and one for what is wrong at its end."""
    player = Player(program, rank, group)
    try:
        entries = [player.step(number, step) for number, step in enumerate(program.steps)]
        return [*entries, player.go_wrong()] if program.wrong else entries
    finally:
        player.leave()


class Player:
    """One rank of a program."""

    def __init__(self, program: Program, rank: int, group: Any = None) -> None:
        self.program = program
        self.rank = rank
        self.nets = [make_net(program, model, rank) for model in range(program.setup.models)]
        self.models = [_replicated(net, program, group) for net in self.nets]
        parameters = [p for net in self.nets for p in net.parameters()]
        self.optimizer = make_optimizer(program.setup.optimizer, parameters)
        self._losses: dict[tuple[int, int], torch.Tensor] = {}  # by reduction and micro-batch
        self._norms: list[float] = []
        self._reducing = 0  # the model that is at it

    def leave(self) -> None:
        """Take paceline off the models, so that a process can run the next program."""
        for model in self.models:
            with contextlib.suppress(ValueError):
                paceline.replica(model).detach()

    # ---- a step ------------------------------------------------------------------------------------

    def step(self, number: int, step: Step) -> Entry:
        """Run one step, and say what came of it."""
        try:
            self._step(number, step)
        except Exception as error:
            return self._raised(error)
        return self._seen()

    def _step(self, number: int, step: Step) -> None:
        self._norms = []
        for change in step.changes:
            self._change(number, change)
        if step.zero != "keep":
            self.optimizer.zero_grad(set_to_none=step.zero == "none")
        self._losses = {}
        if step.forwards_first:
            for place, reduction in enumerate(step.reductions):
                for index in range(len(reduction.shares[self.rank].run)):
                    self._forward((number, place, self.rank, index), reduction)
        for place, reduction in enumerate(step.reductions):
            self._reduce((number, place, self.rank), reduction, forwards_first=step.forwards_first)
        if step.clip:
            self._clip(step)
        self._losses = {}
        self.optimizer.step()

    def _change(self, number: int, change: Change) -> None:
        net = self.nets[change.model]
        if change.what == "add":
            layer = new_layer(self.program, number, 0 if change.alike else self.rank)
            net.layers.append(layer)
            self.optimizer.add_param_group({"params": list(layer.parameters())})
        elif change.what == "remove":
            if len(net.layers) > 1:
                del net.layers[change.layer % len(net.layers)]
        else:
            net.part(change.layer).requires_grad_(change.what == "unfreeze")

    def _clip(self, step: Step) -> None:
        for model in self.models:
            if step.clip_by == "torch":
                norm = nn.utils.clip_grad_norm_(model.parameters(), step.clip)
            else:
                norm = paceline.replica(model).clip_grad_norm_(step.clip)
            self._norms.append(float(norm))

    # ---- a reduction -------------------------------------------------------------------------------

    def _reduce(self, place: tuple[int, ...], reduction: Reduction, *, forwards_first: bool) -> None:
        self._reducing = reduction.model
        model, share = self.models[reduction.model], reduction.shares[self.rank]
        with paceline.batch(model) if reduction.batch else contextlib.nullcontext():
            if not share.run:
                self._run_none(place, model, share)
            else:
                with self._accumulating(model, share):
                    self._run_all(place, reduction, forwards_first=forwards_first)
        if reduction.again:
            with paceline.batch(model) if reduction.batch else contextlib.nullcontext():
                self._run_again(place, reduction)

    def _run_none(self, place: tuple[int, ...], model: nn.Module, share: Share) -> None:
        if share.way == "skip":
            self._raise_in_loop(place, share, 0)
            paceline.skip(model)
            return
        with paceline.accumulate(model, 1 + share.room):
            self._raise_in_loop(place, share, 0)

    @contextlib.contextmanager
    def _accumulating(self, model: nn.Module, share: Share) -> Iterator[None]:
        if share.way != "accumulate":
            yield
            return
        with paceline.accumulate(model, share.count + share.room):
            yield

    def _run_all(self, place: tuple[int, ...], reduction: Reduction, *, forwards_first: bool) -> None:
        share = reduction.shares[self.rank]
        order = list(range(len(share.run)))
        if share.reverse and forwards_first:
            order.reverse()
        left = share.count
        for index in order:
            micro = share.run[index]
            is_local = share.way == "plain" and left > 1
            self._raise_in_loop(place, share, index)
            if not forwards_first:
                # What surrounds the backward decides; of a forward, only who hears that it has raised.
                with self._local(reduction, is_local and micro.backwards == 1):
                    self._forward((*place, index), reduction)
            for repeat in range(micro.backwards):
                left -= 1
                is_kept = repeat + 1 < micro.backwards or (reduction.again and not left)
                with (
                    self._local(reduction, share.way == "plain" and left > 0),
                    self._weighing(reduction, micro),
                ):
                    self._losses[place[1], index].backward(retain_graph=is_kept)

    def _run_again(self, place: tuple[int, ...], reduction: Reduction) -> None:
        model, share = self.models[reduction.model], reduction.shares[self.rank]
        if not share.run:
            paceline.skip(model)
            return
        last = last_of(share, forwards_first=self._is_forwards_first(place))
        with self._weighing(reduction, share.run[last]):
            self._losses[place[1], last].backward()

    def _is_forwards_first(self, place: tuple[int, ...]) -> bool:
        return self.program.steps[place[0]].forwards_first

    def _forward(self, place: tuple[int, ...], reduction: Reduction) -> None:
        share, index = reduction.shares[self.rank], place[-1]
        micro = share.run[index]
        fault = share.fault if share.fault is not None and share.fault.micro == index else None
        x = batch_of(self.program, place, micro)
        model = self.models[reduction.model]
        out = model(x, micro, fault.where if fault else "", boom_of(place[:-1]))
        self._losses[place[1], index] = loss_of(out)

    def _raise_in_loop(self, place: tuple[int, ...], share: Share, index: int) -> None:
        if share.fault is not None and share.fault.where == "loop" and share.fault.micro == index:
            raise Boom(boom_of(place))

    def _local(self, reduction: Reduction, is_local: bool) -> Any:
        model = self.models[reduction.model]
        if not is_local:
            return contextlib.nullcontext()
        return model.no_sync() if self.program.setup.door == "ddp" else paceline.no_sync(model)

    def _weighing(self, reduction: Reduction, micro: Micro) -> Any:
        if not reduction.weighted:
            return contextlib.nullcontext()
        return paceline.weight(self.models[reduction.model], micro.weight)

    # ---- what was seen -----------------------------------------------------------------------------

    def _seen(self) -> Entry:
        gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self._named()}
        weights = {name: p.detach().clone() for name, p in self._named()}
        named = [
            (f"{model}.{name}", b) for model, net in enumerate(self.nets) for name, b in net.named_buffers()
        ]
        buffers = {name: buffer.clone() for name, buffer in named}
        return Entry(gradients, weights, buffers, tuple(self._norms))

    def _raised(self, error: Exception) -> Entry:
        net = self.nets[self._reducing]
        left = tuple(name for name, p in net.named_parameters() if p.grad is not None and p.requires_grad)
        self._losses = {}
        self.optimizer.zero_grad()
        trace = "".join(traceback.format_exception(error))
        return Entry(error=type(error).__name__, text=str(error), trace=trace, left=left)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model, net in enumerate(self.nets):
            yield from ((f"{model}.{name}", p) for name, p in net.named_parameters())

    # ---- wrong on purpose --------------------------------------------------------------------------

    def go_wrong(self) -> Entry:
        """Do the last thing, in which one rank does something else than the others."""
        try:
            self.optimizer.zero_grad()
            self._go_wrong(is_culprit=self.rank == self.program.culprit)
        except Exception as error:
            return self._raised(error)
        return self._seen()

    def _go_wrong(self, *, is_culprit: bool) -> None:
        wrong, first = self.program.wrong, self.models[0]
        if wrong == "does not step":
            self._train(first, step=not is_culprit)
        elif wrong == "one more":
            self._backward(first)
            if not is_culprit:
                self.optimizer.step()
        elif wrong == "alone has weights":
            with paceline.weight(first, 2) if is_culprit else contextlib.nullcontext():
                self._backward(first)
        elif wrong == "steps on unsynced":
            with paceline.batch(first), paceline.no_sync(first, is_culprit):
                self._backward(first)
                self.optimizer.step()
        elif wrong == "other order":
            for model in reversed(self.models) if is_culprit else self.models:
                self._backward(model)
        elif wrong == "changed alone" and is_culprit:
            layer = nn.Linear(3, 3)
            fill(layer, 5)
            self.nets[0].layers.append(layer)
        elif wrong == "astray" and is_culprit:
            with torch.no_grad():
                self.nets[0].trunk.bias[0] += 1
        # By the next reduction at the latest it has to be found out.
        self._train(first)

    def _train(self, model: nn.Module, *, step: bool = True) -> None:
        self._backward(model)
        if step:
            self.optimizer.step()

    def _backward(self, model: nn.Module) -> None:
        micro = Micro()
        loss_of(model(batch_of(self.program, (99, 0, self.rank, 0), micro), micro)).backward()


def last_of(share: Share, *, forwards_first: bool) -> int:
    """Return which micro-batch a rank runs backward through last."""
    return 0 if share.reverse and forwards_first else len(share.run) - 1


def boom_of(place: tuple[int, ...]) -> str:
    """Return the words of the exception that a rank raises at a step and a reduction."""
    step, reduction, rank = place
    return f"boom on rank {rank} in step {step}, reduction {reduction}"


def _replicated(net: Net, program: Program, group: Any) -> nn.Module:
    setup = program.setup
    hook = in_dtype(torch.float64) if setup.hook == "float64" else average
    if setup.door == "ddp":
        model: nn.Module = paceline.DistributedDataParallel(
            net, bucket_cap_mb=setup.bucket_mb, process_group=group
        )
        if setup.hook != "average":
            paceline.replica(model).set_hook(hook)
        if setup.check_finite:
            paceline.replica(model).check_finite(setup.check_finite)
    else:
        model = paceline.replicate(
            net,
            group=group,
            bucket_mb=setup.bucket_mb,
            first_bucket_mb=setup.bucket_mb,
            hook=hook,
            deterministic=setup.deterministic,
            check_finite=setup.check_finite or False,
        )
    if setup.audit:
        paceline.audit(model, every=setup.audit)
    return model
