"""Distributed autograd on a GPU: `PYTHONPATH=src python3 tests/gpu/remote.py`, or with `--device cpu`.

Two trainers share the GPU, data-parallel over Gloo with CUDA tensors; a third process, which they call over
torch RPC, holds the rest of the model. First with tensors on the CPU between the processes, then with device
maps, where torch can do that here. Needs torch and this repository, nothing else. Prints a line per check and
ends with a non-zero status if one failed; within 150 s on a GPU, whatever fails.

Two callers at once are tried without any replica, too: where torch alone fails or dies of that, it says so,
and what comes of it with replicas is shown but not counted.
"""

import argparse
import contextlib
import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc

sys.path.insert(0, str(Path(__file__).parents[2]))

import paceline
from paceline import DistributedDataParallel as Ours
from paceline import remote as paceline_remote
from tests.gpu.checks_on_ranks import Deadline, NotHere, Place, gather, leave, one_group, raises, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch scripts its optimizers, and says that one should not
    from torch.distributed.optim import DistributedOptimizer

LAG_CYCLES = 20_000_000  # some 10 ms, in which the host runs ahead of the GPU
RPC_SECONDS = 10.0
SCRIPT_SECONDS = 135.0  # on a GPU; then it takes some more to end what is stuck
REFUSED = (  # what a pass may say that has come at the same time as another one
    "several passes of distributed autograd run at once",
    "of distributed autograd has ended before its backward had its turn",
    "Could not find autograd context",  # torch's: another part had failed, and the caller has given up
)
SERVER = "worker2"


# ---- three processes --------------------------------------------------------------------------------


@contextlib.contextmanager
def three(place: Place, *, maps: bool = False) -> Iterator[None]:
    """Have two trainers and a server that call each other."""
    torch.set_num_interop_threads(8)  # distributed autograd works on these, and some of ours wait there
    with one_group(place):
        place.notes["trainers"] = dist.new_group([0, 1])
        place.notes["wire"] = place.device if maps else torch.device("cpu")
        place.notes["why not"] = ""
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{place.folder / 'rpc'}", rpc_timeout=RPC_SECONDS
        )
        if maps and place.device.type == "cuda":
            for other in range(3):
                if other != place.rank:
                    options.set_device_map(f"worker{other}", {place.device: place.device})
        rpc.init_rpc(f"worker{place.rank}", rank=place.rank, world_size=3, rpc_backend_options=options)
        if maps:
            place.notes["why not"] = why_no_maps(place)
        yield
        dist.barrier()
        # No rpc.shutdown(): torch may wait forever for what belongs to a pass that has failed.


@contextlib.contextmanager
def three_with_maps(place: Place) -> Iterator[None]:
    with three(place, maps=True):
        yield


def why_no_maps(place: Place) -> str:
    """Return why torch alone cannot do a pass with device maps here; nothing, if it can."""
    said = ""
    if place.rank < 2:
        try:
            with autograd.context() as context:
                numbers = torch.ones(3, device=place.device, requires_grad=True)
                output = rpc.rpc_sync(SERVER, torch.mul, args=(numbers, 3))
                autograd.backward(context, [output.sum()])
                got = autograd.get_gradients(context)[numbers].tolist()
                said = "" if got == [3.0, 3.0, 3.0] else f"a wrong gradient: {got}"
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    said = next(filter(None, gather(said)), "")
    if said:
        place.say(f"       torch RPC with device maps does not work here without us: {said}")
    return said


def together(check: Callable[[Place], None]) -> Callable[[Place], None]:
    """Have all three begin and end a check together, with nothing served from before."""

    def run_together(place: Place) -> None:
        if place.notes["why not"]:
            raise NotHere("no device maps here")
        served.clear()
        dist.barrier()
        check(place)
        dist.barrier()

    functools.update_wrapper(run_together, check)
    return run_together


# ---- what runs on whom ------------------------------------------------------------------------------

served: dict[str, nn.Module] = {}


def compute(name: str, inputs: torch.Tensor) -> torch.Tensor:
    """Compute where the module is; what comes over the wire goes back over it."""
    module = served[name]
    return module(inputs.to(next(module.parameters()).device)).to(inputs.device)


def gradients_of(context: int, name: str) -> list[torch.Tensor]:
    return in_context(context, served[name])


def parameters_of(name: str) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in served[name].parameters()]


def values_of(name: str) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in served[name].parameters()]


kept: list[object] = []


@contextlib.contextmanager
def kept_context() -> Iterator[int]:
    """Keep a context in memory for good. torch writes to it when it hears late that a part has failed: to
    memory that is another context by then, so that an innocent pass fails, or the process dies.
    """
    with autograd.context() as context:
        kept.append(autograd._retrieve_context(context))
        yield context


class Remote(nn.Module):
    """A part of a model that another process holds."""

    def __init__(self, place: Place, name: str, worker: str = SERVER) -> None:
        super().__init__()
        self.place, self.name, self.worker = place, name, worker

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sent = inputs.to(self.place.notes["wire"])
        return rpc.rpc_sync(self.worker, compute, args=(self.name, sent)).to(self.place.device)


def layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def mine(place: Place, step: int = 0) -> torch.Tensor:
    return batch(place.rank, step).to(place.device)


def in_context(context: int, module: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that a context holds of a module's parameters."""
    gradients = autograd.get_gradients(context)
    return [gradients[parameter].cpu() for parameter in module.parameters()]


def reference(parts: Sequence[nn.Module], batches: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the gradients of each part, of the mean loss over all batches, in one process on the CPU."""
    parts = copy.deepcopy(list(parts))
    loss = sum(nn.Sequential(*parts)(rows).square().sum() for rows in batches) / len(batches)
    loss.backward()
    return [[p.grad for p in part.parameters()] for part in parts]


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def lag(place: Place) -> None:
    """Let the GPU be late, so that who reads too early reads something else."""
    if place.device.type == "cuda":
        torch.cuda._sleep(LAG_CYCLES)


# ---- the gradients ----------------------------------------------------------------------------------

ORDERS = {
    "before": ["local", "remote"],
    "after": ["remote", "local"],
    "between": ["remote", "local", "other"],
    "around": ["local", "remote", "again"],
    "alone": ["local"],
}
DOORS = {"group": paceline.replicate, "process_group": Ours}


@together
def a_replicated_part_has_the_gradient_of_everybodys_batch(place: Place) -> None:
    for order, kinds in ORDERS.items():
        for server_on in (torch.device("cpu"), place.device):
            for key, wrap in DOORS.items():
                parts = {f"{order} {kind}": layer(seed) for seed, kind in enumerate(kinds)}
                wanted = dict(zip(parts, reference(list(parts.values()), [batch(0), batch(1)]), strict=True))
                served.update({name: copy.deepcopy(part).to(server_on) for name, part in parts.items()})
                dist.barrier()
                if place.rank < 2:
                    _train_hybrid(
                        place, parts, wanted, lambda part, k=key, w=wrap: w(part, **{k: _group(place)})
                    )
                dist.barrier()


def _group(place: Place) -> Any:
    return place.notes["trainers"]


def _train_hybrid(place: Place, parts: dict[str, nn.Module], wanted: Any, wrap: Any) -> None:
    ours = {name: part.to(place.device) for name, part in parts.items() if name.endswith(("local", "again"))}
    model = nn.Sequential(*[wrap(ours[name]) if name in ours else Remote(place, name) for name in parts])
    for _ in range(2):
        with autograd.context() as context:
            loss = model(mine(place)).square().sum()
            lag(place)
            autograd.backward(context, [loss])
            for name, part in ours.items():
                assert_close(in_context(context, part), wanted[name])
            for name in parts.keys() - ours.keys():
                # The server sums up what the trainers send in contexts of their own: here, this rank's.
                assert len(rpc.rpc_sync(SERVER, gradients_of, args=(context, name))) == 2
            assert all(p.grad is None for p in model.parameters())


@together
def replicas_that_another_process_calls_are_reduced_in_its_context(place: Place) -> None:
    inner = layer(1)
    wanted = reference([inner], [batch(0), batch(1)])[0]
    if place.rank < 2:
        served["inner"] = paceline.replicate(inner.to(place.device), group=_group(place))
    dist.barrier()
    if place.rank == 2:
        for _ in range(3):
            with autograd.context() as context:
                rows = [batch(r).to(place.notes["wire"]) for r in (0, 1)]
                calls = [rpc.rpc_async(f"worker{r}", compute, args=("inner", rows[r])) for r in (0, 1)]
                autograd.backward(context, [sum(call.wait().square().sum() for call in calls)])
                got = [rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner")) for r in (0, 1)]
            assert_close(got, [wanted, wanted])


@together
def what_is_agreed_on_is_there_for_other_streams_and_threads(place: Place) -> None:
    """The reduced gradients are written late, and read at once on another stream."""
    if place.rank == 2:
        return
    plain = layer(0)
    wanted = reference([plain], [batch(0), batch(1)])[0]
    model = paceline.replicate(plain.to(place.device), group=_group(place))
    write = paceline_remote._write

    def late(*args: Any) -> None:
        lag(place)
        write(*args)

    paceline_remote._write = late
    try:
        for _ in range(3):
            with autograd.context() as context:
                autograd.backward(context, [model(mine(place)).square().sum()])
                if place.device.type == "cuda":
                    with torch.cuda.stream(torch.cuda.Stream()):
                        got = in_context(context, model)
                else:
                    got = in_context(context, model)
                assert_close(got, wanted)
    finally:
        paceline_remote._write = write


@together
def what_the_engine_can_do_it_does_in_contexts(place: Place) -> None:
    if place.rank == 2:
        return
    plain = layer(0)
    shares = [batch(0), batch(1)[:1]]
    weighted = copy.deepcopy(plain)
    (sum(weighted(rows).square().sum() for rows in shares) / 5).backward()
    both = reference([plain], [torch.cat([batch(r), batch(r, 1)]) for r in (0, 1)])[0]
    wanted = reference([plain], [batch(0), batch(1)])[0]

    def replica(**options: Any) -> nn.Module:
        return paceline.replicate(copy.deepcopy(plain).to(place.device), group=_group(place), **options)

    model, rows = replica(), shares[place.rank].to(place.device)
    with autograd.context() as context, paceline.weight(model, len(rows)):
        autograd.backward(context, [model(rows).square().sum() / len(rows)])
        assert_close(in_context(context, model), [p.grad for p in weighted.parameters()])

    with autograd.context() as context:  # accumulated within one context
        with paceline.no_sync(model):
            autograd.backward(context, [model(mine(place)).square().sum()])
        autograd.backward(context, [model(mine(place, 1)).square().sum()])
        assert_close(in_context(context, model), both)

    with autograd.context() as context:  # an ordinary backward between a pass's forward and backward
        loss = model(mine(place)).square().sum()
        model(mine(place)).square().sum().backward()
        autograd.backward(context, [loss])
        assert_close(in_context(context, model), wanted)
        assert_close([p.grad.cpu() for p in model.parameters()], wanted)
        model.zero_grad()

    for options in ({"deterministic": True}, {"bucket_mb": 1e-5}, {"hook": paceline.hooks.total}):
        again = replica(**options)
        with autograd.context() as context:
            autograd.backward(context, [again(mine(place)).square().sum()])
            factor = 2 if "hook" in options else 1
            assert_close(in_context(context, again), [factor * gradient for gradient in wanted])

    skipping = replica(check_finite="skip")
    with autograd.context() as context:
        nan = float("nan") if place.rank else 1.0
        autograd.backward(context, [skipping(mine(place)).sum() * nan])
        assert all(not gradient.any() for gradient in in_context(context, skipping))


@together
def a_sparse_gradient_of_a_replicated_table(place: Place) -> None:
    if place.rank == 2:
        return
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(6, 3, sparse=True, mode="sum")
    alone = copy.deepcopy(plain)
    (sum(alone(rows_of(r, 0)).square().sum() for r in (0, 1)) / 2).backward()
    model = paceline.replicate(plain.to(place.device), group=_group(place))
    for _ in range(2):
        with autograd.context() as context:
            autograd.backward(context, [model(rows_of(place.rank, 0).to(place.device)).square().sum()])
            got = autograd.get_gradients(context)[model.weight]
            assert got.is_sparse
            assert_close(got.to_dense().cpu(), alone.weight.grad.to_dense())


@together
def trainers_with_different_numbers_of_batches_join(place: Place) -> None:
    parts = {kind: layer(seed) for seed, kind in enumerate(ORDERS["between"])}
    steps = [
        reference(list(parts.values()), [batch(r, s) for r in present])[1]
        for s, present in enumerate([(0, 1), (0, 1), (1,)])
    ]
    served.update(copy.deepcopy(parts))
    dist.barrier()
    if place.rank == 2:
        return
    local = paceline.replicate(parts["local"].to(place.device), group=_group(place))
    model = nn.Sequential(Remote(place, "remote"), local, Remote(place, "other"))
    got = []
    with paceline.join(local):
        for step in range(2 + place.rank):
            with autograd.context() as context:
                autograd.backward(context, [model(mine(place, step)).square().sum()])
                got.append(in_context(context, local))
    assert_close(got, steps[: 2 + place.rank])


# ---- optimizers -------------------------------------------------------------------------------------


class Plain(torch.optim.SGD):
    """An optimizer that torch has no script for."""


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(6, (4, 2), generator=torch.Generator().manual_seed(10 * step + rank))


@together
def a_distributed_optimizer_takes_the_steps_of_one_process(place: Place) -> None:
    """A sparse table and a head on the server, the middle replicated on the GPU."""
    for kind in (torch.optim.SGD, Plain):
        torch.manual_seed(0)
        table, middle, head = nn.EmbeddingBag(6, 3, sparse=True, mode="sum"), layer(1), layer(2)
        alone = copy.deepcopy(nn.Sequential(table, middle, head))
        _train_alone(alone)
        served.update(table=table, head=head.to(place.device))
        dist.barrier()
        if place.rank < 2:
            _train_with(kind, place, middle.to(place.device))
            assert_close(
                [p.detach().cpu() for p in middle.parameters()], [p.detach() for p in alone[1].parameters()]
            )
            for name, part in (("table", alone[0]), ("head", alone[2])):
                got = rpc.rpc_sync(SERVER, values_of, args=(name,))
                assert_close(got, [p.detach() for p in part.parameters()])
        dist.barrier()


def _train_alone(alone: nn.Sequential) -> None:
    # What a server holds gets a step from each trainer, a replica gets one of their mean.
    rates = [
        {"params": part.parameters(), "lr": 0.01 * times}
        for part, times in zip(alone, (2, 1, 2), strict=True)
    ]
    optimizer = torch.optim.SGD(rates)
    for step in range(4):
        (sum(alone(rows_of(r, step)).square().sum() for r in (0, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_with(kind: type, place: Place, middle: nn.Module) -> None:
    paceline.replicate(middle, group=_group(place))
    table, head = Remote(place, "table"), Remote(place, "head")
    theirs = [
        each for name in ("table", "head") for each in rpc.rpc_sync(SERVER, parameters_of, args=(name,))
    ]
    optimizer = DistributedOptimizer(kind, [*theirs, *map(rpc.RRef, middle.parameters())], lr=0.01)
    for step in range(4):
        with autograd.context() as context:
            loss = head(middle(table(rows_of(place.rank, step)))).square().sum()
            autograd.backward(context, [loss])
            for turn in (0, 1):
                dist.barrier(_group(place))
                if turn == place.rank:
                    optimizer.step(context)
            dist.barrier(_group(place))
    with autograd.context() as context:
        before = [p.detach().clone() for p in middle.parameters()]
        with paceline.no_sync(middle):
            autograd.backward(context, [middle(mine(place)).sum()])
        own = DistributedOptimizer(kind, [rpc.RRef(p) for p in middle.parameters()], lr=0.01)
        with raises(paceline.UnsyncedGradients, "only this rank has: weight, bias", "inside no_sync()"):
            own.step(context)
        assert all(torch.equal(p, b) for p, b in zip(middle.parameters(), before, strict=True))


# ---- failures ---------------------------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """Raises in backward, if it is told to."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return inputs * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.how == "raises":
            raise ValueError("this server is out of order")
        return gradient * 2, None


def double(inputs: torch.Tensor, how: str) -> torch.Tensor:
    return Broken.apply(inputs, how)


@together
def a_remote_part_that_raises_in_backward_is_heard_of_on_every_trainer(place: Place) -> None:
    if place.rank == 2:
        return
    plain = layer(0)
    wanted = [2 * gradient for gradient in _gradients_of_sum(plain)]
    for key, wrap in DOORS.items():
        model = wrap(copy.deepcopy(plain).to(place.device), **{key: _group(place)})

        def run_pass(how: str, model: nn.Module = model) -> None:
            with autograd.context() as context:
                sent = model(mine(place)).to(place.notes["wire"])
                autograd.backward(context, [rpc.rpc_sync(SERVER, double, args=(sent, how)).sum()])
                inner = model.module if isinstance(model, Ours) else model
                assert_close(in_context(context, inner), wanted)

        run_pass("works")
        for _ in range(2):
            heard = (paceline.PeerFailed, "rank 0", "out of order")
            with raises(RuntimeError, "out of order") if place.rank == 0 else raises(*heard):
                run_pass("raises" if place.rank == 0 else "works")
        run_pass("works")


def _gradients_of_sum(plain: nn.Module) -> list[torch.Tensor]:
    alone = copy.deepcopy(plain)
    (sum(alone(batch(r)).sum() for r in (0, 1)) / 2).backward()
    return [p.grad for p in alone.parameters()]


@together
def an_ended_context_is_named_and_the_other_trainer_hears_of_it(place: Place) -> None:
    if place.rank == 2:
        return
    model = paceline.replicate(layer(0).to(place.device), group=_group(place))
    with autograd.context() as context:
        loss = model(mine(place)).sum()
        if place.rank == 1:
            with raises(paceline.PeerFailed, "rank 0", "of distributed autograd has ended"):
                autograd.backward(context, [loss])
    if place.rank == 0:
        with raises(RuntimeError, f"the context {context} of distributed autograd has ended"):
            autograd.backward(context, [loss])
    with autograd.context() as context:
        autograd.backward(context, [model(mine(place)).sum()])


# ---- several passes at once -------------------------------------------------------------------------


def run_both(*functions: Callable[[], None]) -> list[BaseException | None]:
    """Run functions on threads of their own, called first and second; return what they raise."""
    raised: list[BaseException | None] = [None] * len(functions)

    def run_one(number: int) -> None:
        try:
            functions[number]()
        except BaseException as error:
            raised[number] = error

    names = ("first", "second")
    threads = [threading.Thread(target=run_one, args=(n,), name=names[n]) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


class Turns:
    """Lets two threads go on by turns."""

    def __init__(self, *order: str) -> None:
        self._order = list(order)
        self._moved = threading.Condition()

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        with self._moved:
            assert self._moved.wait_for(lambda: self._order[0] == name, timeout=20)
            try:
                yield
            finally:
                self._order.pop(0)
                self._moved.notify_all()


def _show(raised: Sequence[BaseException | None]) -> None:
    for error in raised:
        if error is not None:
            raise error


@together
def passes_of_two_threads_that_take_turns_are_kept_apart(place: Place) -> None:
    if place.rank == 2:
        return
    plain = layer(0)
    for key, wrap in DOORS.items():
        model = wrap(copy.deepcopy(plain).to(place.device), **{key: _group(place)})
        inner = model.module if isinstance(model, Ours) else model
        turns = Turns("a0", "a1", "b0", "b1", "c1", "c0")
        got = {}

        def train(
            number: int, model: Any = model, turns: Any = turns, got: Any = got, inner: Any = inner
        ) -> None:
            with autograd.context() as context:
                with turns.of(f"a{number}"):
                    loss = model(mine(place, number)).square().sum()
                with turns.of(f"b{number}"):
                    autograd.backward(context, [loss])
                with turns.of(f"c{number}"):
                    got[number] = in_context(context, inner)

        _show(run_both(lambda t=train: t(0), lambda t=train: t(1)))
        for number in (0, 1):
            assert_close(got[number], reference([plain], [batch(0, number), batch(1, number)])[0])


@together
def passes_of_two_threads_in_different_orders_are_never_averaged(place: Place) -> None:
    if place.rank == 2:
        return
    model = paceline.replicate(layer(0).to(place.device), group=_group(place))
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in model.parameters()], lr=0.1)
    turns = Turns("a0", "a1", *(("b0", "b1") if place.rank == 0 else ("b1", "b0")))

    def train(number: int) -> None:
        with autograd.context() as context:
            with turns.of(f"a{number}"):
                loss = model(mine(place, number)).square().sum()
            with turns.of(f"b{number}"), raises(paceline.RanksDisagree, "thread first", "thread second"):
                autograd.backward(context, [loss])
            with raises(paceline.UnsyncedGradients, "has failed, or was never reduced"):
                optimizer.step(context)

    _show(run_both(lambda: train(0), lambda: train(1)))
    with autograd.context() as context:  # of one thread: said once, it is over
        autograd.backward(context, [model(mine(place)).square().sum()])
        assert_close(in_context(context, model), reference([layer(0)], [batch(0), batch(1)])[0])


class Gate:
    """On the server: lets the first pass on when the second has come as far on both trainers."""

    def __init__(self) -> None:
        self._came = threading.Semaphore(0)
        self.has_begun = threading.Event()

    def come(self) -> None:
        self._came.release()

    def wait(self) -> None:
        assert self._came.acquire(timeout=10)


gates: list[Gate] = []


def come_to_the_gate() -> None:
    gates[-1].come()


class Gated(torch.autograd.Function):
    """Computes its gradient in the first pass when the second has come; on a GPU the second comes by here."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, is_first: bool, tells: bool) -> torch.Tensor:
        ctx.is_first, ctx.tells = is_first, tells
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.is_first:
            gates[-1].wait()
        elif ctx.tells:
            gates[-1].come()
        return gradient, None, None


def pass_the_gate(inputs: torch.Tensor, is_first: bool, tells: bool) -> torch.Tensor:
    return Gated.apply(inputs, is_first, tells)


class Gapped(nn.Module):
    """A replica whose middle is on the server: its backward is open while it waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = layer(1), layer(2)

    def forward(self, inputs: torch.Tensor, is_first: bool) -> torch.Tensor:
        is_gpu = inputs.device.type == "cuda"
        hidden = self.lower(inputs)
        sent = hidden.cpu()
        back = rpc.rpc_sync(SERVER, pass_the_gate, args=(sent, is_first, is_gpu)).to(inputs.device)
        output = self.upper(back)
        if not is_first and not is_gpu:  # it waits in its first gradient: it comes no further than this
            output.register_hook(lambda _: rpc.rpc_async(SERVER, come_to_the_gate) and None)
        return output


def compute_gapped(inputs: torch.Tensor, is_first: bool) -> torch.Tensor:
    module = served["inner"]
    return module(inputs.to(next(module.parameters()).device), is_first).to(inputs.device)


@together
def a_pass_that_comes_while_another_is_open_waits_or_is_refused(place: Place) -> None:
    """On a CPU it waits for its turn; on a GPU, where both may need the same thread, both may be refused."""
    inner = Gapped()
    wanted = [
        [g for part in reference([inner.lower, inner.upper], [batch(0, n), batch(1, n)]) for g in part]
        for n in range(3)
    ]
    if place.rank < 2:
        served["inner"] = paceline.replicate(inner.to(place.device), group=_group(place))
    gates.append(Gate())
    dist.barrier()
    if place.rank < 2:
        return

    def train(number: int) -> None:
        with kept_context() as context:
            if number == 1:
                assert gates[-1].has_begun.wait(10)
            rows = [batch(r, number).to(place.notes["wire"]) for r in (0, 1)]
            calls = [rpc.rpc_async(f"worker{r}", compute_gapped, args=(rows[r], number == 0)) for r in (0, 1)]
            loss = sum(call.wait().square().sum() for call in calls)
            loss.register_hook(lambda _: gates[-1].has_begun.set())
            autograd.backward(context, [loss])
            for r in (0, 1):
                got = rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner"))
                assert_close(got, wanted[number])

    raised = run_both(lambda: train(0), lambda: train(1))
    print(f"       the first pass: {raised[0] or 'right'}; the second: {str(raised[1] or 'right')[:300]}")
    _show(raised if place.device.type == "cpu" else [error for error in raised if not is_refusal(error)])
    goes_on(lambda: _train_plainly(place, wanted[2]))


def is_refusal(error: BaseException | None) -> bool:
    """Tell whether a pass says clearly that it has met another one."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSED)


def goes_on(train: Callable[[], None]) -> None:
    """Run passes one at a time: at most two may still hear of what was under way, then all are right."""
    refused = 0
    for _ in range(6):
        try:
            train()
        except RuntimeError as error:
            refused += 1
            print(f"       one more: {str(error)[:300]}", flush=True)
    assert refused <= 2, f"{refused} of 6 passes were refused though no other one ran"
    for _ in range(2):
        train()


def _train_plainly(place: Place, wanted: Sequence[torch.Tensor]) -> None:
    with kept_context() as context:
        rows = [batch(r, 2).to(place.notes["wire"]) for r in (0, 1)]
        calls = [rpc.rpc_async(f"worker{r}", compute_gapped, args=(rows[r], False)) for r in (0, 1)]
        autograd.backward(context, [sum(call.wait().square().sum() for call in calls)])
        for r in (0, 1):
            assert_close(rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner")), wanted)


def _two_callers(place: Place, wanted: Sequence[Sequence[Sequence[torch.Tensor]]]) -> None:
    """Run passes from two threads; ``wanted`` are, of each one, the gradients on both trainers."""
    counts = {"right": 0, "refused": 0}

    def train(number: int) -> None:
        rows = [batch(r, number).to(place.notes["wire"]) for r in (0, 1)]
        with kept_context() as context:
            calls = [rpc.rpc_async(f"worker{r}", compute, args=("inner", rows[r])) for r in (0, 1)]
            autograd.backward(context, [sum(call.wait().square().sum() for call in calls)])
            for r in (0, 1):
                got = rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner"))
                assert_close(got, wanted[number][r])

    for number in range(0, len(wanted), 2):
        raised = run_both(functools.partial(train, number), functools.partial(train, number + 1))
        _show([error for error in raised if not is_refusal(error)])
        counts["refused"] += sum(map(is_refusal, raised))
        counts["right"] += raised.count(None)
    print(f"       two callers: {counts['right']} passes right, {counts['refused']} refused", flush=True)
    goes_on(lambda: train(0))


PAIRS = 10


@together
def passes_of_two_callers_at_once_are_right_or_refused(place: Place) -> None:
    """Nobody takes turns: each pass has the right gradients, or says why it has none."""
    inner = nn.Sequential(layer(1), layer(2))
    if place.rank < 2:
        served["inner"] = paceline.replicate(copy.deepcopy(inner).to(place.device), group=_group(place))
    dist.barrier()
    if place.rank == 2:
        means = [reference(list(inner), [batch(0, n), batch(1, n)]) for n in range(2 * PAIRS)]
        _two_callers(place, [[[g for part in mean for g in part]] * 2 for mean in means])


@together
def two_callers_at_once_without_a_replica(place: Place) -> None:
    """The same, of torch alone."""
    inner = nn.Sequential(layer(1), layer(2))
    if place.rank < 2:
        served["inner"] = copy.deepcopy(inner).to(place.device)
    dist.barrier()
    if place.rank == 2:
        own = [[reference(list(inner), [batch(r, n)]) for r in (0, 1)] for n in range(2 * PAIRS)]
        _two_callers(place, [[[g for part in parts for g in part] for parts in each] for each in own])


CHECKS = [
    a_replicated_part_has_the_gradient_of_everybodys_batch,
    replicas_that_another_process_calls_are_reduced_in_its_context,
    what_is_agreed_on_is_there_for_other_streams_and_threads,
    what_the_engine_can_do_it_does_in_contexts,
    a_sparse_gradient_of_a_replicated_table,
    trainers_with_different_numbers_of_batches_join,
    a_distributed_optimizer_takes_the_steps_of_one_process,
    a_remote_part_that_raises_in_backward_is_heard_of_on_every_trainer,
    an_ended_context_is_named_and_the_other_trainer_hears_of_it,
    passes_of_two_threads_that_take_turns_are_kept_apart,
    passes_of_two_threads_in_different_orders_are_never_averaged,
    a_pass_that_comes_while_another_is_open_waits_or_is_refused,
]

WITH_MAPS = [
    a_replicated_part_has_the_gradient_of_everybodys_batch,
    replicas_that_another_process_calls_are_reduced_in_its_context,
    a_distributed_optimizer_takes_the_steps_of_one_process,
    a_remote_part_that_raises_in_backward_is_heard_of_on_every_trainer,
]


def run_two_callers(device: str, setting: Any, title: str, deadline: Deadline) -> int:
    """Have two callers at once, by torch alone and with replicas; return how many checks of ours failed."""
    alone = run([two_callers_at_once_without_a_replica], 3, device, setting, title, deadline, "TORCH")
    word = "n/a" if alone else "FAILED"
    failed = run(
        [passes_of_two_callers_at_once_are_right_or_refused], 3, device, setting, title, deadline, word
    )
    if alone:
        print(
            "       torch alone fails with two callers at once: with replicas it does not count", flush=True
        )
    return 0 if alone else failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="", help="run the checks whose names hold this")
    parser.add_argument("--seconds", type=float, help="when to be over, whatever fails")
    args = parser.parse_args()
    is_gpu = args.device.startswith("cuda")
    deadline = Deadline(args.device, args.seconds or (SCRIPT_SECONDS if is_gpu else None))
    where, failed = "one GPU" if is_gpu else "CPU", 0
    for setting, checks, how in ((three, CHECKS, ""), (three_with_maps, WITH_MAPS, ", with device maps")):
        title = f"two trainers and a server, {where}{how}"
        chosen = [check for check in checks if args.only in check.__name__]
        failed += run(chosen, 3, args.device, setting, title, deadline)
        if args.only in "two_callers_at_once":
            failed += run_two_callers(args.device, setting, title, deadline)
    leave(failed)


if __name__ == "__main__":
    main()
