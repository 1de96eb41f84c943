"""The situations of the promise matrix, each runnable on any of the libraries.

A scenario runs on every rank of a Gloo group and says in one short sentence what was seen. It measures:
nothing in here knows what a library is supposed to do.
"""

import copy
import functools
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.promises.libraries import TORCH_SECONDS, Library
from tests.promises.measure import (
    EQUAL,
    LOCAL,
    attempt,
    batch,
    first_words,
    gather,
    gradients,
    reference,
    share,
    story,
    verdict,
)
from tests.promises.wrong_link import COLLECTIVES, WrongLink


def small_model(seed: int = 1) -> nn.Sequential:
    """Make the same two layers on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the rows of a batch."""
    return model(x).square().mean()


# ---- A: what a loss misses ---------------------------------------------------------------------------------


class Branches(nn.Module):
    """A trunk that every batch goes through, branches that only some do, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, taken: tuple[int, ...]) -> torch.Tensor:
        y = torch.tanh(self.trunk(x))
        for index in taken:
            y = y + self.branches[index](y)
        return y


Route = Callable[[int], tuple[int, ...]]  # rank -> the branches that its batch takes


def branching_loss(model: nn.Module, rank: int, route: Route, step: int = 0) -> torch.Tensor:
    """Return the loss of one rank's rows, along that rank's branches."""
    rows = (batch() + step).chunk(dist.get_world_size())[rank]
    return model(rows, route(rank)).square().mean()


def branching_reference(model: nn.Module, route: Route, step: int = 0) -> Any:
    """Return the gradients of all ranks' rows together, each along its rank's branches."""
    size = dist.get_world_size()

    def whole(alone: nn.Module) -> None:
        (sum(branching_loss(alone, rank, route, step) for rank in range(size)) / size).backward()

    return reference(model, whole)


def branching_steps(library: Library, routes: list[Route], **arguments: Any) -> Iterator[tuple[str, str]]:
    """Take one step per route, and tell what each led to."""
    model = Branches()
    wrapped = library.wrap(model, **arguments)
    for step, route in enumerate(routes):
        expected = branching_reference(model, route, step)
        wrapped.zero_grad()
        trouble = attempt(lambda: branching_loss(wrapped, dist.get_rank(), route, step).backward())  # noqa: B023
        yield f"step {step + 1}", trouble or verdict(wrapped, expected)


def a_unused_parameter(library: Library) -> str:
    def only_rank_0(rank: int) -> tuple[int, ...]:
        return (0, 1) if rank == 0 else (1,)

    return story(branching_steps(library, [only_rank_0, only_rank_0]))


def flipping_route(step: int) -> Route:
    """Give each rank another branch, and other ones in the next step; every third step takes none."""
    return lambda rank: () if step % 3 == 2 else ((rank + step) % 2,)


def a2_flipping_use(library: Library) -> str:
    return story((flag, flipping_steps(library, flag == "with it")) for flag in ("without a flag", "with it"))


def flipping_steps(library: Library, search: bool, steps: int = 4) -> str:
    """Train along routes that flip, and count the searches for unused parameters."""
    routes = [flipping_route(step) for step in range(steps)]
    with counting_graph_walks() as walks:
        seen = story(branching_steps(library, routes, find_unused_parameters=search))
    return f"{seen} ({walks()} graph walks in {steps} steps)"


@contextmanager
def counting_graph_walks() -> Iterator[Callable[[], int]]:
    """Count the searches through the graph; torch's start with a look for tensors in a forward's result."""
    import torch.nn.parallel.distributed as torchs

    walkers = [(torchs, "_find_tensors")]
    walkers += [(m, "leaves_below") for n, m in sys.modules.items() if n.startswith("paceline.")]
    walkers = [(module, name) for module, name in walkers if hasattr(module, name)]
    patches = [mock.patch.object(module, name, wraps=getattr(module, name)) for module, name in walkers]
    counters = [patch.start() for patch in patches]
    try:
        yield lambda: sum(counter.call_count for counter in counters)
    finally:
        for patch in patches:
            patch.stop()


# ---- B: what surrounds backward ----------------------------------------------------------------------------


def _two_references(model: nn.Module) -> tuple[Any, Any]:
    """Return the gradients of the whole batch, and those of this rank's rows alone."""
    whole = reference(model, lambda m: loss_of(m, batch()).backward())
    return whole, reference(model, lambda m: loss_of(m, share(batch())).backward())


def b1_backward_outside_no_sync(library: Library) -> str:
    model = small_model()
    expected, local = _two_references(model)
    wrapped = library.wrap(model)
    with library.no_sync(wrapped):
        loss = loss_of(wrapped, share(batch()))
    loss.backward()
    return verdict(wrapped, expected, local)


def b2_backward_inside_no_sync(library: Library) -> str:
    model = small_model()
    expected, local = _two_references(model)
    wrapped = library.wrap(model)
    loss = loss_of(wrapped, share(batch()))
    with library.no_sync(wrapped):
        loss.backward()
    seen = verdict(wrapped, expected, local)
    return f"reduced anyway: {seen}" if seen == EQUAL else seen


def b3_step_on_local_gradients(library: Library) -> str:
    wrapped = library.wrap(small_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with library.no_sync(wrapped):
        loss_of(wrapped, share(batch())).backward()
    trouble = attempt(optimizer.step)
    weights = gather([p.detach() for p in wrapped.parameters()])
    same = all(torch.equal(a, b) for other in weights for a, b in zip(weights[0], other, strict=True))
    fate = "the weights still agree" if same else "the weights of the ranks differ"
    return f"{trouble}; {fate}" if trouble else f"stepped: {fate}, silent"


# ---- C, G: what torch's flags stumble over -----------------------------------------------------------------


def c_static_graph_first_step_local(library: Library) -> str:
    model = small_model()

    def micro_steps(m: nn.Module, x: torch.Tensor, first: Any) -> None:
        with first:
            loss_of(m, x).backward()
        loss_of(m, x + 1).backward()

    expected = reference(model, lambda m: micro_steps(m, batch(), mock.MagicMock()))
    wrapped = library.wrap(model, static_graph=True)
    trouble = attempt(lambda: micro_steps(wrapped, share(batch()), library.no_sync(wrapped)))
    return trouble or verdict(wrapped, expected)


@dataclass
class Answer:
    """A dataclass that a forward may return."""

    logits: torch.Tensor


class Envelope:
    """Any object that a forward may return; nothing can look inside."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._content = lambda: logits

    @property
    def logits(self) -> torch.Tensor:
        return self._content()


class Wrapping(nn.Module):
    """A model whose forward returns its result inside an object."""

    def __init__(self, kind: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.layers = small_model()

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(self.layers(x))


def returned_object(library: Library, kind: Callable[[torch.Tensor], Any], **arguments: Any) -> str:
    """Train two steps on a model whose forward returns an object."""
    model = Wrapping(kind)
    wrapped = library.wrap(model, **arguments)

    def step(m: nn.Module, x: torch.Tensor) -> None:
        m(x).logits.square().mean().backward()

    expected = reference(model, lambda m: step(m, batch()))
    chapters = []
    for number in (1, 2):
        wrapped.zero_grad()
        trouble = attempt(lambda: step(wrapped, share(batch())))
        chapters.append((f"step {number}", trouble or verdict(wrapped, expected)))
    return story(chapters)


def _returned_objects(library: Library, **arguments: Any) -> str:
    kinds = {"dataclass": Answer, "object": Envelope}
    return story((name, returned_object(library, kind, **arguments)) for name, kind in kinds.items())


def g1_object_from_static_graph(library: Library) -> str:
    return _returned_objects(library, static_graph=True)


def g2_object_from_unused_search(library: Library) -> str:
    return _returned_objects(library, find_unused_parameters=True)


# ---- H: frozen and unfrozen later --------------------------------------------------------------------------


def change_of_mind(
    library: Library, change: Callable[[nn.Sequential], None], *, frozen_at_first: bool
) -> str:
    """Train a step, freeze or unfreeze something, and train two more."""
    model = small_model()
    model[0].requires_grad_(not frozen_at_first)
    wrapped = library.wrap(model)
    chapters = []
    for number in (1, 2, 3):
        if number == 2:
            change(model)
        wrapped.zero_grad()
        expected = reference(model, lambda m: loss_of(m, batch()).backward())
        trouble = attempt(lambda: loss_of(wrapped, share(batch())).backward())
        chapters.append((f"step {number}", trouble or verdict(wrapped, expected)))
    return story(chapters[1:])


def h1_unfrozen(library: Library) -> str:
    return change_of_mind(library, lambda m: m[0].requires_grad_(True), frozen_at_first=True)


def h2_frozen(library: Library) -> str:
    return change_of_mind(library, lambda m: m[0].requires_grad_(False), frozen_at_first=False)


# ---- I: not through the wrapper's forward ------------------------------------------------------------------


class Generator(nn.Linear):
    """A model that computes by more ways than its forward."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self(x)).cumsum(1)


WAYS: dict[str, Callable[[Generator, torch.Tensor], torch.Tensor]] = {
    "module(x)": lambda bare, x: bare(x),
    "a method": lambda bare, x: bare.generate(x),
    "F.linear on the weight": lambda bare, x: F.linear(x, bare.weight, bare.bias),
}


def another_way(library: Library, way: Callable[[Generator, torch.Tensor], torch.Tensor]) -> str:
    """Train one step without calling what the library returned."""
    torch.manual_seed(1)
    model = Generator(4, 3)
    expected = reference(model, lambda m: way(m, batch()).square().mean().backward())
    wrapped = library.wrap(model)
    way(library.bare(wrapped), share(batch())).square().mean().backward()
    return verdict(wrapped, expected)


def i_not_through_forward(library: Library) -> str:
    return story((name, another_way(library, way)) for name, way in WAYS.items())


# ---- K, M3: backwards that are not one per forward ---------------------------------------------------------


class Checkpointed(nn.Module):
    """One layer under two re-entrant checkpoints, with or without a parameter outside of them."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2) if head else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return self.head(x)


def checkpointed_layer(library: Library, *, head: bool) -> str:
    """Train two steps with the layer that is checkpointed twice."""
    model = Checkpointed(head=head)
    wrapped = library.wrap(model)
    expected = reference(model, lambda m: loss_of(m, batch()).backward())
    chapters = []
    for number in (1, 2):
        wrapped.zero_grad()
        trouble = attempt(lambda: loss_of(wrapped, share(batch())).backward())
        chapters.append((f"step {number}", trouble or verdict(wrapped, expected)))
    return story(chapters)


def k1_two_reentrant_checkpoints(library: Library) -> str:
    return story(
        (name, checkpointed_layer(library, head=head))
        for name, head in (("a parameter outside of them", True), ("none outside", False))
    )


def k2_two_backwards_on_one_forward(library: Library) -> str:
    return scripted(library, "F1 B1 B1")


def scripted(library: Library, script: str) -> str:
    """Run a script of forwards and backwards: ``F1 F2 B2 B1``; ``B1+2`` is one backward of both losses."""
    model = small_model()
    expected = reference(model, lambda m: follow(script, m, batch()))
    wrapped = library.wrap(model)
    trouble = attempt(lambda: follow(script, wrapped, share(batch())))
    return trouble or verdict(wrapped, expected)


def follow(script: str, model: nn.Module, x: torch.Tensor) -> None:
    """Do what the script says with one model."""
    losses: dict[str, torch.Tensor] = {}
    for what, *rest in script.split():
        which = "".join(rest).split("+")
        if what == "F":
            losses[which[0]] = loss_of(model, x + int(which[0]))
        else:
            sum(losses[number] for number in which).backward(retain_graph=True)


ORDERS = ("F1 F2 F3 B1 B2 B3", "F1 F2 B1", "F1 F2 B2", "F1 F2 B1+2", "F1 B1 B1", "F1 F2 B1 B2", "F1 F2 B2 B1")


def m3_orders_of_forward_and_backward(library: Library) -> str:
    return story((script.replace(" ", ""), scripted(library, script)) for script in ORDERS)


# ---- L: an exception inside backward -----------------------------------------------------------------------


class Boom(torch.autograd.Function):
    """Pass on what comes in, and raise in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom in the attention")


def failing_loss(model: nn.Sequential, x: torch.Tensor, where: str) -> torch.Tensor:
    """Compute a loss whose backward raises before the first gradient, or after some."""
    if where == "at the loss":
        return Boom.apply(loss_of(model, x))
    first, *others = model
    y = Boom.apply(first(x))
    for layer in others:
        y = layer(y)
    return y.square().mean()


class MayFail(nn.Sequential):
    """The small model, whose forward can plant an exception for backward."""

    def __init__(self) -> None:
        super().__init__(*small_model())

    def forward(self, x: torch.Tensor, where: str = "") -> torch.Tensor:
        if where:
            return failing_loss(self.plain, x, where)
        return loss_of(self.plain, x)

    @property
    def plain(self) -> nn.Sequential:
        return nn.Sequential(*self)


def l_exception_in_backward(library: Library) -> str:
    """Let rank 0's backward raise in the middle, catch it everywhere, and train a step after it."""
    model = MayFail()
    expected = reference(model, lambda m: m(batch()).backward())
    wrapped = library.wrap(model)
    broken = "in the middle" if dist.get_rank() == 0 else ""
    failed = attempt(lambda: wrapped(share(batch()), broken).backward())
    wrapped.zero_grad()
    trouble = attempt(lambda: wrapped(share(batch())).backward())
    return f"{failed}. The step after: {trouble or verdict(wrapped, expected)}"


# ---- J, Q, S, Z, W: the module itself ----------------------------------------------------------------------


def pickled_copy(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved_copy(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickled_copy, "torch.save": saved_copy}


def copied(library: Library, make_copy: Callable[[nn.Module], nn.Module]) -> str:
    """Copy a wrapped model over a group of its own, and train the copy a step."""
    model = small_model()
    expected, local = _two_references(model)
    wrapped = library.wrap(model, process_group=dist.new_group(list(range(dist.get_world_size()))))
    copies: list[nn.Module] = []
    trouble = attempt(lambda: copies.append(make_copy(wrapped)))
    if trouble:
        return f"refused: {trouble}"
    trouble = attempt(lambda: loss_of(copies[0], share(batch())).backward())
    if trouble:
        return f"copied; its step: {trouble}"
    seen = {LOCAL: "a plain module", EQUAL: "a replica again"}
    outcome = verdict(copies[0], expected, local)
    untouched = all(gradient is None for gradient in gradients(wrapped).values())
    return f"the copy is {seen.get(outcome, outcome)}{'' if untouched else ', and disturbs the original'}"


def j_copies(library: Library) -> str:
    return story((name, copied(library, make)) for name, make in COPIES.items())


class Buffered(nn.Sequential):
    """A model with buffers of several dtypes, whose values depend on a number."""

    def __init__(self, number: int) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self[1].running_mean.fill_(number)
        self.register_buffer("count", torch.tensor([number]))
        self.register_buffer("short", torch.full((3,), number, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([number == 0]))


def differing_buffers(model: nn.Module) -> list[str]:
    """Name the buffers that are not the same on all ranks."""
    everyone = gather(dict(model.named_buffers()))
    names = [
        name for name in everyone[0] if any(not torch.equal(everyone[0][name], b[name]) for b in everyone)
    ]
    return [name.removeprefix("module.") for name in names]


def q_buffers_without_broadcast(library: Library) -> str:
    odd = differing_buffers(library.wrap(Buffered(dist.get_rank()), broadcast_buffers=False))
    return f"differ after construction: {', '.join(odd)}" if odd else "equal after construction"


def s_state_dict(library: Library) -> str:
    model = small_model()
    keys = list(model.state_dict())
    wrapped = library.wrap(model)
    new = list(wrapped.state_dict())
    if new == keys:
        names = "the bare model's keys"
    else:
        prefixed = [f"module.{key}" for key in keys] == new
        names = "every key has the prefix 'module.'" if prefixed else f"keys {new}"
    return f"{names}, class {type(wrapped).__name__}"


def z_nothing_to_train(library: Library) -> str:
    model = small_model().requires_grad_(False)
    expected = model(batch())
    wrapped: list[nn.Module] = []
    trouble = attempt(lambda: wrapped.append(library.wrap(model)))
    if trouble:
        return trouble
    return "passes through" if torch.equal(wrapped[0](batch()), expected) else "forward gives something else"


def w_other_shape(library: Library) -> str:
    return attempt(lambda: library.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + dist.get_rank()))))


def over_a_wrong_link(library: Library, collective: str) -> str:
    """Wrap a model over a group that garbles what a collective returns, and train a step if that works."""
    model = small_model()
    expected, _ = _two_references(model)
    group = dist.new_group(timeout=timedelta(seconds=TORCH_SECONDS))
    wrapped: list[nn.Module] = []
    wrong = WrongLink(group, collective)
    trouble = attempt(lambda: wrapped.append(library.wrap(model, process_group=wrong)))
    if trouble:
        return trouble
    trouble = attempt(lambda: loss_of(wrapped[0], share(batch())).backward())
    return trouble or verdict(wrapped[0], expected)


def w2_wrong_link(library: Library) -> str:
    return story((collective, over_a_wrong_link(library, collective)) for collective in COLLECTIVES)


def h3_changed_module(library: Library) -> str:
    model = small_model()
    wrapped = library.wrap(model)
    loss_of(wrapped, share(batch())).backward()
    wrapped.zero_grad()
    torch.manual_seed(100 + dist.get_rank())
    model.append(nn.Linear(3, 3))
    seen: dict[str, torch.Tensor | None] = {}

    def train() -> None:
        loss = loss_of(wrapped, share(batch()))
        seen.update(reference(model, lambda m: loss_of(m, batch()).backward()))
        loss.backward()

    return attempt(train) or verdict(wrapped, seen)


def u_uneven_batches(library: Library) -> str:
    model = small_model()
    rows = [5, 1]
    whole = batch(sum(rows))
    expected = reference(model, lambda m: loss_of(m, whole).backward())
    wrapped = library.wrap(model)
    mine = whole.split(rows)[dist.get_rank()]
    with library.weight(wrapped, len(mine)):
        loss_of(wrapped, mine).backward()
    seen = verdict(wrapped, expected)
    got = torch.cat([g.flatten() for g in gradients(wrapped).values() if g is not None])
    want = torch.cat([g.flatten() for g in expected.values() if g is not None])
    error = float((got - want).norm() / want.norm())
    return seen if error < 1e-6 else f"{error:.0%} off the reference (relative norm), silent"


def v_skipped_batch(library: Library) -> str:
    model = library.wrap(small_model())
    rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    trained: list[int] = []

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for place, x in enumerate(DataLoader(rows, batch_size=3)):
            if place == 9 or (dist.get_rank() == 1 and place == 5):
                continue
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
            trained.append(place)
            if len(trained) == 8:
                break

    if trouble := attempt(train):
        return trouble
    pairs = [pair for pair in zip(*gather(trained), strict=True) if len(set(pair)) > 1]
    return f"rank 0's batch {pairs[0][0]} was averaged with rank 1's batch {pairs[0][1]}, silent"


# ---- N, P: numbers that are wrong on one rank --------------------------------------------------------------


class Spoil(torch.autograd.Function):
    """Pass on what comes in, and put a NaN into the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.index_fill(0, torch.tensor([0]), float("nan"))


def n_not_finite(library: Library) -> str:
    wrapped = library.wrap(small_model())
    library.check_finite(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    loss = loss_of(wrapped, share(batch()))
    trouble = attempt((Spoil.apply(loss.view(1)) if dist.get_rank() == 1 else loss.view(1)).backward)
    optimizer.step()
    poisoned = gather(any(bool(p.isnan().any()) for p in wrapped.parameters()))
    fate = f"{sum(poisoned)} of {len(poisoned)} ranks' weights are NaN after optimizer.step()"
    return f"{trouble}; {fate}" if trouble else f"{fate}, silent"


def flip_bit(tensor: torch.Tensor, bit: int = 22) -> None:
    """Flip one bit of a tensor's first number, as a fault of the memory does."""
    tensor.data.view(torch.int32).view(-1)[0] ^= 1 << bit


def p_flipped_bit(library: Library) -> str:
    every, model = 4, small_model()
    wrapped = library.wrap(model)
    library.audit(wrapped, every)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    done: list[int] = []

    def train() -> None:
        for step in range(1 + every):
            if step == 1 and dist.get_rank() == 1:
                flip_bit(model[2].weight)
            optimizer.zero_grad()
            loss_of(wrapped, share(batch())).backward()
            optimizer.step()
            done.append(step)

    if trouble := attempt(train):
        return f"{len(done) - 1} steps later: {trouble}"
    held = gather([p.detach() for p in wrapped.parameters()])
    same = all(torch.equal(a, b) for other in held for a, b in zip(held[0], other, strict=True))
    return "the weights agree again" if same else f"{every} steps later the weights differ, silent"


def x_missing_peer(library: Library) -> str:
    group = dist.new_group(timeout=timedelta(seconds=TORCH_SECONDS))
    model = library.wrap(small_model(), process_group=group)

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(TORCH_SECONDS + 2)
        return torch.stack(rows)

    seen = "went on"
    for x in DataLoader(batch(), batch_size=12, collate_fn=collate):
        if dist.get_rank() == 0:
            try:
                loss_of(model, x).backward()
            except Exception as error:
                seen = f"raised {type(error).__name__}: {first_words(error, limit=400)}"
    return f"rank 0 {gather(seen)[0]}"


# ---- the matrix --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the promise matrix."""

    id: str
    situation: str
    run: Callable[[Library], str]


MATRIX = (
    Row("A", "a step whose loss misses a parameter (one rank uses it, or none)", a_unused_parameter),
    Row("A2", "which parameters are used flips per step and per rank", a2_flipping_use),
    Row("B1", "forward inside `no_sync`, backward outside", b1_backward_outside_no_sync),
    Row("B2", "forward outside, backward inside `no_sync`", b2_backward_inside_no_sync),
    Row("B3", "`optimizer.step()` on gradients made inside `no_sync`", b3_step_on_local_gradients),
    Row("C", "static graph, first micro-step in `no_sync`", c_static_graph_first_step_local),
    Row("G1", "static graph, forward returns a dataclass or any object", g1_object_from_static_graph),
    Row(
        "G2",
        "unused-parameter search, forward returns an object",
        g2_object_from_unused_search,
    ),
    Row("H1", "parameter unfrozen after wrapping", h1_unfrozen),
    Row("H2", "parameter frozen after wrapping", h2_frozen),
    Row("H3", "a layer added after wrapping, with other values on each rank", h3_changed_module),
    Row("I", "any path but the wrapper's forward", i_not_through_forward),
    Row("K1", "one layer under two re-entrant checkpoints", k1_two_reentrant_checkpoints),
    Row("K2", "two `backward()` on one forward (`retain_graph`)", k2_two_backwards_on_one_forward),
    Row(
        "M3",
        "other orders: F1F2B2 is two forwards, then the second one's backward",
        m3_orders_of_forward_and_backward,
    ),
    Row("L", "an exception inside rank 0's backward, caught, training goes on", l_exception_in_backward),
    Row("V", "rank 1 skips batch 5", v_skipped_batch),
    Row("U", "5 samples on rank 0, 1 on rank 1, mean loss (`weight(n)`)", u_uneven_batches),
    Row("X", "rank 1 is still loading data when the time is over (3 s)", x_missing_peer),
    Row("J", "deepcopy and pickle with a non-default group", j_copies),
    Row("Q", "buffers with broadcasting off", q_buffers_without_broadcast),
    Row("S", "`state_dict` keys and class", s_state_dict),
    Row("Z", "a model with no trainable parameter", z_nothing_to_train),
    Row("W", "same parameter count, one shape differs", w_other_shape),
    Row("W2", "the link returns wrong data at start-up", w2_wrong_link),
    Row("N", "rank 1's gradient is NaN (`check_finite=True`)", n_not_finite),
    Row("P", "a bit flipped in rank 1's weights (`audit(every=4)`)", p_flipped_bit),
)


@functools.cache
def row(id: str) -> Row:
    """Find a row by its id."""
    return next(row for row in MATRIX if row.id == id)
