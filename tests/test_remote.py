"""Models that are part data-parallel and part remote: passes of distributed autograd."""

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.errors import PeerFailed, RanksDisagree, UnsyncedGradients
from paceline.pass_gate import PassGate
from paceline.passes import Pass, Passes
from paceline.testing import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch scripts its optimizers, and says that one should not
    from torch.distributed.optim import DistributedOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def workers(
    rank: int, size: int, folder: Path, *, graceful: bool = True, ends: bool = True
) -> Iterator[None]:
    """Have the ranks, and more processes if there are any, call each other."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'rpc'}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    yield
    if ends:
        rpc.shutdown(graceful=graceful)


def layer(seed: int, inputs: int = 3, outputs: int = 3) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def in_context(context: int, module: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that a context holds of a module's parameters."""
    gradients = autograd.get_gradients(context)
    return [gradients[parameter].clone() for parameter in module.parameters()]


def reference(parts: Sequence[nn.Module], batches: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the gradients of each part, of the mean loss over all batches, in one process."""
    parts = copy.deepcopy(list(parts))
    loss = sum(nn.Sequential(*parts)(rows).square().sum() for rows in batches) / len(batches)
    loss.backward()
    return [[p.grad for p in part.parameters()] for part in parts]


# ---- what runs on a server --------------------------------------------------------------------------

served: dict[str, nn.Module] = {}


def serve(name: str, module: nn.Module) -> None:
    served[name] = module


def compute(name: str, inputs: torch.Tensor) -> torch.Tensor:
    return served[name](inputs)


def gradients_of(context: int, name: str) -> list[torch.Tensor]:
    return in_context(context, served[name])


def parameters_of(name: str) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in served[name].parameters()]


def values_of(name: str) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in served[name].parameters()]


class Remote(nn.Module):
    """A part of a model that another process holds."""

    def __init__(self, worker: str, name: str) -> None:
        super().__init__()
        self.worker, self.name = worker, name

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync(self.worker, compute, args=(self.name, inputs))


# ---- the gradients ----------------------------------------------------------------------------------

PLACES = {
    "before": ["local", "remote"],
    "after": ["remote", "local"],
    "between": ["remote", "local", "other"],
    "around": ["local", "remote", "again"],
    "alone": ["local"],
}


def parts_of(place: str) -> dict[str, nn.Module]:
    return {kind: layer(seed) for seed, kind in enumerate(PLACES[place])}


def assembled(parts: dict[str, nn.Module], server: str, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Put the parts together: those called local or again are this rank's, the others the server's."""
    return nn.Sequential(
        *[wrap(part) if kind in ("local", "again") else Remote(server, kind) for kind, part in parts.items()]
    )


@ranks(3, timeout=100)
@pytest.mark.parametrize("wrap", [paceline.replicate, Ours], ids=["replicate", "wrapper"])
@pytest.mark.parametrize("place", PLACES)
def test_a_replicated_part_has_the_gradient_of_everybodys_batch(
    rank: int, place: str, wrap: Callable[..., nn.Module], tmp_path: Path
) -> None:
    trainers = dist.new_group([0, 1])
    parts = parts_of(place)
    wanted = dict(zip(parts, reference(list(parts.values()), [batch(0), batch(1)]), strict=True))
    served.update(parts)
    with workers(rank, 3, tmp_path):
        if rank < 2:
            in_group = {"process_group" if wrap is Ours else "group": trainers}
            model = assembled(parts, "worker2", lambda part: wrap(part, **in_group))
            for _ in range(2):
                with autograd.context() as context:
                    autograd.backward(context, [model(batch(rank)).square().sum()])
                    for kind in {"local", "again"} & parts.keys():
                        torch.testing.assert_close(in_context(context, parts[kind]), wanted[kind])
                    assert all(p.grad is None for p in model.parameters())


def train_without(model: nn.Module, rank: int) -> list[torch.Tensor]:
    with autograd.context() as context:
        autograd.backward(context, [model(batch(rank)).square().sum()])
        return in_context(context, model[0])


@ranks(3, timeout=100)
def test_without_data_parallel_each_trainer_has_its_own_gradient(rank: int, tmp_path: Path) -> None:
    parts = parts_of("before")
    served.update(parts)
    with workers(rank, 3, tmp_path):
        if rank < 2:
            got = train_without(assembled(parts, "worker2", lambda part: part), rank)

            torch.testing.assert_close(got, reference(list(parts.values()), [batch(rank)])[0])


# ---- replicas that are called from other processes --------------------------------------------------


@ranks(3, timeout=100)
def test_replicas_that_another_process_calls_are_reduced_in_its_context(rank: int, tmp_path: Path) -> None:
    replicas = dist.new_group([0, 1])
    inner = layer(1)
    wanted = reference([inner], [batch(0), batch(1)])
    with workers(rank, 3, tmp_path):
        if rank < 2:
            serve("inner", paceline.replicate(inner, group=replicas))
        dist.barrier()
        if rank == 2:
            for _ in range(3):
                with autograd.context() as context:
                    calls = [rpc.rpc_async(f"worker{r}", compute, args=("inner", batch(r))) for r in (0, 1)]
                    autograd.backward(context, [sum(call.wait().square().sum() for call in calls)])
                    got = [rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner")) for r in (0, 1)]
                torch.testing.assert_close(got, [wanted[0], wanted[0]])


@ranks(4, timeout=100)
def test_each_trainer_may_call_a_replica_of_its_own(rank: int, tmp_path: Path) -> None:
    replicas = dist.new_group([2, 3])
    head, inner = layer(0), layer(1)
    wanted = reference([head, inner], [batch(0), batch(1)])
    with workers(rank, 4, tmp_path):
        if rank >= 2:
            serve("inner", paceline.replicate(inner, group=replicas))
        dist.barrier()
        if rank < 2:
            for _ in range(2):
                with autograd.context() as context:
                    model = nn.Sequential(head, Remote(f"worker{rank + 2}", "inner"))
                    autograd.backward(context, [model(batch(rank)).square().sum()])
                    got = rpc.rpc_sync(f"worker{rank + 2}", gradients_of, args=(context, "inner"))
                torch.testing.assert_close(got, wanted[1])


@ranks(3, timeout=100)
def test_a_replica_whose_output_goes_to_several_servers_waits_for_all_of_them(
    rank: int, tmp_path: Path
) -> None:
    trainers = dist.new_group([0, 1])
    local, left, right = layer(0), layer(1), layer(2)
    plain = copy.deepcopy(local)
    losses = [(left(plain(x)) * right(plain(x))).sum() for x in (batch(0), batch(1))]
    (sum(losses) / 2).backward()
    served.update(left=left, right=right)
    with workers(rank, 3, tmp_path):
        if rank < 2:
            paceline.replicate(local, group=trainers)
            for _ in range(5):
                with autograd.context() as context:
                    hidden = local(batch(rank))
                    calls = [
                        rpc.rpc_async(f"worker{to}", compute, args=(name, hidden))
                        for to, name in ((2, "left"), (1 - rank, "right"))
                    ]
                    autograd.backward(context, [(calls[0].wait() * calls[1].wait()).sum()])
                    torch.testing.assert_close(
                        in_context(context, local), [p.grad for p in plain.parameters()]
                    )


# ---- what surrounds a backward ----------------------------------------------------------------------


@ranks(2, timeout=60)
def test_what_the_engine_can_do_it_does_in_contexts(rank: int, tmp_path: Path) -> None:
    plain = layer(0)
    shares = [batch(0), batch(1)[:1]]
    (sum(plain(rows).square().sum() for rows in shares) / 5).backward()
    weighted = [p.grad for p in plain.parameters()]
    both = reference([plain], [torch.cat([batch(0), batch(0, 1)]), torch.cat([batch(1), batch(1, 1)])])[0]
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(copy.deepcopy(plain))

        with autograd.context() as context, paceline.weight(model, len(shares[rank])):
            autograd.backward(context, [model(shares[rank]).square().sum() / len(shares[rank])])
            torch.testing.assert_close(in_context(context, model), weighted)

        with autograd.context() as context:  # accumulated within one context
            with paceline.no_sync(model):
                autograd.backward(context, [model(batch(rank)).square().sum()])
            autograd.backward(context, [model(batch(rank, 1)).square().sum()])
            torch.testing.assert_close(in_context(context, model), both)

        with autograd.context() as context:  # an ordinary backward between a pass's forward and backward
            loss = model(batch(rank)).square().sum()
            model(batch(rank)).square().sum().backward()
            autograd.backward(context, [loss])
            wanted = reference([plain], [batch(0), batch(1)])[0]
            torch.testing.assert_close(in_context(context, model), wanted)
            torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
            model.zero_grad()

        for options in ({"deterministic": True}, {"bucket_mb": 1e-5}, {"hook": paceline.hooks.total}):
            again = paceline.replicate(copy.deepcopy(plain), **options)
            with autograd.context() as context:
                autograd.backward(context, [again(batch(rank)).square().sum()])
                factor = 2 if "hook" in options else 1
                torch.testing.assert_close(in_context(context, again), [factor * g for g in wanted])


@ranks(2, timeout=60)
def test_a_parameter_that_is_used_without_the_modules_forward_is_found_by_the_call(
    rank: int, tmp_path: Path
) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0))
        with autograd.context() as context:
            autograd.backward(context, [(model.weight * (rank + 1)).sum() + model.bias.sum()])

            assert torch.equal(in_context(context, model)[0], torch.full((3, 3), 1.5))


@ranks(2, timeout=60)
@pytest.mark.parametrize("is_local", [True, False])
def test_an_ordinary_backward_is_not_taken_for_a_pass_that_comes_again(
    rank: int, is_local: bool, tmp_path: Path
) -> None:
    plain = layer(0)
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(copy.deepcopy(plain))
        with autograd.context() as context:
            with paceline.no_sync(model, is_local):
                autograd.backward(context, [model(batch(rank)).square().sum()])
            again = model(batch(rank, 1)).square().sum()

            model(batch(rank, 2)).square().sum().backward()
            wanted = reference([plain], [batch(0, 2), batch(1, 2)])[0]
            torch.testing.assert_close([p.grad for p in model.parameters()], wanted)

            autograd.backward(context, [again])
            both = reference([plain], [torch.cat([batch(r), batch(r, 1)]) for r in (0, 1)])[0]
            torch.testing.assert_close(in_context(context, model), both)
            torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


@ranks(2, timeout=60)
def test_weights_and_no_sync_exclude_each_other_in_a_context(rank: int, tmp_path: Path) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0))
        with autograd.context() as context, paceline.weight(model, 2), paceline.no_sync(model):
            with pytest.raises(ValueError, match=r"weight\(\) inside no_sync\(\)"):
                autograd.backward(context, [model(batch(rank)).sum()])


@ranks(3, timeout=100)
def test_trainers_with_different_numbers_of_batches_join(rank: int, tmp_path: Path) -> None:
    trainers = dist.new_group([0, 1])
    parts = parts_of("between")
    alone = reference(list(parts.values()), [batch(1, 2)])[1]
    served.update(parts)
    with workers(rank, 3, tmp_path):
        if rank < 2:
            model = assembled(parts, "worker2", lambda part: paceline.replicate(part, group=trainers))
            got = []
            with paceline.join(parts["local"]):
                for step in range(2 + rank):
                    with autograd.context() as context:
                        autograd.backward(context, [model(batch(rank, step)).square().sum()])
                        got.append(in_context(context, parts["local"]))
            both = [reference(list(parts.values()), [batch(0, s), batch(1, s)])[1] for s in (0, 1)]
            torch.testing.assert_close(got[:2], both)
            assert rank == 0 or len(got) == 3
            if rank == 1:
                torch.testing.assert_close(got[2], alone)


# ---- optimizers -------------------------------------------------------------------------------------


class Plain(torch.optim.SGD):
    """An optimizer that torch has no script for."""


each_kind = pytest.mark.parametrize("kind", [torch.optim.SGD, Plain], ids=["scripted", "plain"])


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(6, (4, 2), generator=torch.Generator().manual_seed(10 * step + rank))


@ranks(4, timeout=100)
@each_kind
def test_a_distributed_optimizer_takes_the_steps_of_one_process(
    rank: int, kind: type, tmp_path: Path
) -> None:
    trainers = dist.new_group([0, 1])
    torch.manual_seed(0)
    table, middle, head = nn.EmbeddingBag(6, 3, sparse=True, mode="sum"), layer(1), layer(2)
    alone = copy.deepcopy(nn.Sequential(table, middle, head))
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
    served.update(table=table, head=head)
    with workers(rank, 4, tmp_path):
        dist.barrier()
        if rank < 2:
            paceline.replicate(middle, group=trainers)
            model = nn.Sequential(Remote("worker2", "table"), middle, Remote("worker3", "head"))
            theirs = [
                reference
                for worker, name in ((2, "table"), (3, "head"))
                for reference in rpc.rpc_sync(f"worker{worker}", parameters_of, args=(name,))
            ]
            mine = [rpc.RRef(parameter) for parameter in middle.parameters()]
            both = DistributedOptimizer(kind, [*theirs, *mine], lr=0.01)
            for step in range(4):
                with autograd.context() as context:
                    autograd.backward(context, [model(rows_of(rank, step)).square().sum()])
                    for turn in (0, 1):
                        dist.barrier(trainers)
                        if turn == rank:
                            both.step(context)
                    dist.barrier(trainers)
            torch.testing.assert_close(middle.state_dict(), alone[1].state_dict())
            got = rpc.rpc_sync("worker2", values_of, args=("table",))
            got += rpc.rpc_sync("worker3", values_of, args=("head",))
            torch.testing.assert_close(got, [p.detach() for n in (0, 2) for p in alone[n].parameters()])


def step_for(owner: str, kind: type, context: int, references: Sequence[rpc.RRef]) -> str:
    """Step parameters that another process owns; return what that raises."""
    try:
        DistributedOptimizer(kind, references, lr=0.1).step(context)
    except UnsyncedGradients as error:
        return str(error)
    return ""


@ranks(2, timeout=100)
@each_kind
def test_a_step_on_gradients_that_only_this_rank_has_is_refused(
    rank: int, kind: type, tmp_path: Path
) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0))
        other = layer(1)
        optimizer = DistributedOptimizer(kind, [rpc.RRef(p) for p in model.parameters()], lr=0.1)
        elsewhere = DistributedOptimizer(kind, [rpc.RRef(p) for p in other.parameters()], lr=0.1)
        before = copy.deepcopy(model.state_dict())

        with autograd.context() as context:
            with paceline.no_sync(model):
                autograd.backward(context, [other(model(batch(rank))).sum()])
            elsewhere.step(context)  # nobody has replicated these
            with pytest.raises(
                UnsyncedGradients, match=r"only this rank has: weight, bias. They were"
            ) as info:
                optimizer.step(context)
            assert "inside no_sync()" in str(info.value)
            torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)

            autograd.backward(context, [model(batch(rank)).sum()])
            optimizer.step(context)
            assert not torch.equal(model.weight, before["weight"])


@ranks(3, timeout=100)
@each_kind
def test_the_process_that_owns_the_parameters_refuses_a_step_from_elsewhere(
    rank: int, kind: type, tmp_path: Path
) -> None:
    replicas = dist.new_group([0, 1])
    with workers(rank, 3, tmp_path):
        if rank < 2:
            serve("inner", paceline.replicate(layer(1), group=replicas))
            paceline.replica(served["inner"]).reducer.around.sync = False  # as inside no_sync()
        dist.barrier()
        if rank == 2:
            references = [
                ref for r in (0, 1) for ref in rpc.rpc_sync(f"worker{r}", parameters_of, args=("inner",))
            ]
            optimizer = DistributedOptimizer(kind, references, lr=0.1)
            with autograd.context() as context:
                loss = sum(
                    rpc.rpc_sync(f"worker{r}", compute, args=("inner", batch(r))).sum() for r in (0, 1)
                )
                autograd.backward(context, [loss])
                with pytest.raises(
                    RuntimeError, match=r"UnsyncedGradients: step 0: Distributed.* only this rank"
                ):
                    optimizer.step(context)
        dist.barrier()


# ---- several passes at once -------------------------------------------------------------------------


@ranks(2, timeout=60)
def test_a_replica_may_be_collected_while_another_one_has_its_pass(rank: int, tmp_path: Path) -> None:
    with workers(rank, 2, tmp_path):
        model, garbage = paceline.replicate(layer(0)), [paceline.replicate(layer(1))]
        gone = weakref.ref(paceline.replica(garbage[0]).reducer)

        def collect(_: torch.Tensor) -> None:
            garbage.clear()
            gc.collect()

        for _ in range(2):
            with autograd.context() as context:
                output = model(batch(rank))
                output.register_hook(collect)
                autograd.backward(context, [output.square().sum()])
                wanted = reference([layer(0)], [batch(0), batch(1)])[0]
                torch.testing.assert_close(in_context(context, model), wanted)

        gc.collect()
        assert gone() is None


def test_two_threads_may_forget_an_ended_pass_at_once() -> None:
    passes = Passes()

    class Forgotten(Pass):
        @property
        def is_live(self) -> bool:
            passes._known.pop(5, None)  # as the other thread does
            return False

    passes._known[5] = Forgotten(None)

    assert passes._known_or_new(6) is passes.get(6)
    assert passes.get(5) is None


def run_both(*functions: Callable[[], None]) -> list[BaseException | None]:
    """Run functions on threads of their own, called first and second; return what they raise."""
    raised: list[BaseException | None] = [None] * len(functions)

    def run(place: int) -> None:
        try:
            functions[place]()
        except BaseException as error:
            raised[place] = error

    names = ("first", "second")
    threads = [threading.Thread(target=run, args=(n,), name=names[n]) for n in range(len(functions))]
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

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        with self._moved:
            self._moved.wait_for(lambda: self._order[0] == name, timeout=30)
            try:
                yield
            finally:
                self._order.pop(0)
                self._moved.notify_all()


@ranks(2, timeout=60)
@pytest.mark.parametrize("wrap", [paceline.replicate, Ours], ids=["replicate", "wrapper"])
def test_passes_of_two_threads_that_take_turns_are_kept_apart(
    rank: int, wrap: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain = layer(0)
    with workers(rank, 2, tmp_path):
        model = wrap(copy.deepcopy(plain))
        turns = Turns("a0", "a1", "b0", "b1", "c1", "c0")
        got = {}

        def train(number: int) -> None:
            with autograd.context() as context:
                with turns.of(f"a{number}"):
                    loss = model(batch(rank, number)).square().sum()
                with turns.of(f"b{number}"):
                    autograd.backward(context, [loss])
                with turns.of(f"c{number}"):
                    got[number] = in_context(context, model)

        assert run_both(lambda: train(0), lambda: train(1)) == [None, None]
        for number in (0, 1):
            wanted = reference([plain], [batch(0, number), batch(1, number)])[0]
            torch.testing.assert_close(got[number], wanted)


@ranks(2, timeout=60)
def test_a_pass_inside_an_ordinary_backward_is_never_taken_for_it(rank: int, tmp_path: Path) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0))
        raised = []

        def run_a_pass(_: torch.Tensor) -> None:
            def run() -> None:
                with autograd.context() as context:
                    try:
                        autograd.backward(context, [model(batch(rank)).sum()])
                    except RuntimeError as error:
                        raised.append(str(error))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        inputs = batch(rank).requires_grad_()
        inputs.register_hook(run_a_pass)
        model(inputs).square().sum().backward()

        assert [text.partition(",")[0] for text in raised] == [
            "two backwards run at once through one replica"
        ]
        wanted = reference([layer(0)], [batch(0), batch(1)])[0]
        torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


@ranks(2, timeout=60)
def test_passes_of_two_threads_in_different_orders_are_never_averaged(rank: int, tmp_path: Path) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0))
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in model.parameters()], lr=0.1)
        turns = Turns("a0", "a1", *(("b0", "b1") if rank == 0 else ("b1", "b0")))

        def train(number: int) -> None:
            with autograd.context() as context:
                with turns.of(f"a{number}"):
                    loss = model(batch(rank, number)).square().sum()
                with turns.of(f"b{number}"), pytest.raises(RanksDisagree) as info:
                    autograd.backward(context, [loss])
                assert "rank 0 that of thread first, rank 1 that of thread second" in str(info.value) or (
                    "rank 0 that of thread second, rank 1 that of thread first" in str(info.value)
                )
                with pytest.raises(UnsyncedGradients, match="has failed, or was never reduced"):
                    optimizer.step(context)

        assert run_both(lambda: train(0), lambda: train(1)) == [None, None]
        with autograd.context() as context:  # of one thread: said once, it is over
            autograd.backward(context, [model(batch(rank)).sum()])


second_has_come = threading.Event()


class Slow(torch.autograd.Function):
    """Computes its gradient when another pass has come as far."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, is_first: bool) -> torch.Tensor:
        ctx.is_first = is_first
        return inputs.clone()

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.is_first:
            assert second_has_come.wait(10)
        return gradients[0], None


def compute_slowly(inputs: torch.Tensor, is_first: bool) -> torch.Tensor:
    lower, upper = served["inner"]
    output = upper(Slow.apply(lower(inputs), is_first))
    if not is_first:
        output.register_hook(lambda _: second_has_come.set())
    return output


class Both(nn.Sequential):
    """Two layers, called through the module so that its forward is seen."""

    def forward(self, inputs: torch.Tensor, is_first: bool) -> torch.Tensor:
        return compute_slowly(inputs, is_first)


def compute_both(inputs: torch.Tensor, is_first: bool) -> torch.Tensor:
    return served["inner"](inputs, is_first)


@ranks(3, timeout=100)
def test_a_pass_that_comes_while_another_is_open_waits_for_its_turn(rank: int, tmp_path: Path) -> None:
    replicas = dist.new_group([0, 1])
    inner = Both(layer(1), layer(2))
    wanted = [
        [gradient for part in reference(list(inner), [batch(0, n), batch(1, n)]) for gradient in part]
        for n in range(2)
    ]
    with workers(rank, 3, tmp_path):
        if rank < 2:
            serve("inner", paceline.replicate(inner, group=replicas))
        dist.barrier()
        has_begun = threading.Event()

        def train(number: int) -> None:
            with autograd.context() as context:
                if number == 1:
                    assert has_begun.wait(10)
                calls = [
                    rpc.rpc_async(f"worker{r}", compute_both, args=(batch(r, number), number == 0))
                    for r in (0, 1)
                ]
                loss = sum(call.wait().square().sum() for call in calls)
                loss.register_hook(lambda _: has_begun.set())
                autograd.backward(context, [loss])
                for r in (0, 1):
                    got = rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner"))
                    torch.testing.assert_close(got, wanted[number])

        if rank == 2:
            assert run_both(lambda: train(0), lambda: train(1)) == [None, None]
        dist.barrier()


class Late(torch.autograd.Function):
    """Takes some time in backward, and may raise then."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, seconds: float, words: str) -> torch.Tensor:
        ctx.seconds, ctx.words = seconds, words
        return inputs.clone()

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        if ctx.words:
            raise ValueError(ctx.words)
        return gradients[0], None, None


def pass_late(inputs: torch.Tensor, seconds: float, words: str) -> torch.Tensor:
    return Late.apply(inputs, seconds, words)


@ranks(3, timeout=60)
def test_a_part_that_fails_late_harms_no_later_pass(rank: int, tmp_path: Path) -> None:
    """Without us it does: most of these passes fail with the error of the one before, or the process dies."""

    def run(*parts: tuple[float, str]) -> None:
        with autograd.context() as context:
            inputs = torch.ones(3, requires_grad=True)
            calls = [(f"worker{to}", (inputs, *part)) for to, part in enumerate(parts, 1)]
            outputs = [rpc.rpc_sync(worker, pass_late, args=sent) for worker, sent in calls]
            autograd.backward(context, [sum(outputs).sum()])

    model = paceline.replicate(layer(0))  # it is here, but none of these passes comes to it
    with workers(rank, 3, tmp_path, ends=False):
        dist.barrier()
        if rank == 0:
            for _ in range(10):
                with pytest.raises(RuntimeError, match="out of order"):
                    run((0.0, "out of order"), (0.03, "out of order, too"))
                run((0.1, ""))
        dist.barrier()
        del model


kept: list[object] = []


@contextmanager
def kept_context() -> Iterator[int]:
    """Keep a context in memory for good. torch writes to it when it hears late that a part has failed: to
    memory that is another context by then, so that an innocent pass fails, or the process dies.
    """
    with autograd.context() as context:
        kept.append(autograd._retrieve_context(context))
        yield context


def run_pass(number: int, wanted: Sequence[torch.Tensor], calls: Sequence[Callable[..., object]]) -> None:
    """Run a pass through the replicas of two trainers, and look at what each of them has."""
    with kept_context() as context:
        outputs = [
            rpc.rpc_async(f"worker{r}", call, args=("inner", batch(r, number)))
            for r, call in enumerate(calls)
        ]
        autograd.backward(context, [sum(output.wait().square().sum() for output in outputs)])
        for r in (0, 1):
            got = rpc.rpc_sync(f"worker{r}", gradients_of, args=(context, "inner"))
            torch.testing.assert_close(got, wanted)


def count_refused(number: int, wanted: Sequence[torch.Tensor], *, of: int) -> int:
    """Run passes one after the other, and count how many fail before the others are right."""
    refused = 0
    for _ in range(of):
        try:
            run_pass(number, wanted, [compute, compute])
        except RuntimeError:
            refused += 1
    return refused


@ranks(3, timeout=60)
def test_a_pass_that_one_rank_refuses_is_heard_of_on_the_others_and_harms_no_other_one(
    rank: int, tmp_path: Path
) -> None:
    replicas = dist.new_group([0, 1])
    inner = layer(1)
    wanted = reference([inner], [batch(0), batch(1)])[0]
    with workers(rank, 3, tmp_path, ends=False):
        if rank < 2:
            serve("inner", paceline.replicate(inner, group=replicas))
        dist.barrier()
        if rank == 2:
            for calls in ([multiply, compute], [compute, multiply], [multiply, multiply]):
                with pytest.raises(RuntimeError, match="this process has not heard of"):
                    run_pass(0, wanted, calls)
                assert count_refused(0, wanted, of=2) == 0
        dist.barrier()


def compute_and_raise(name: str, inputs: torch.Tensor) -> torch.Tensor:
    """Have the backward of a pass raise before it comes to the replica."""
    return Broken.apply(compute(name, inputs), "raises")


@ranks(3, timeout=60)
def test_a_pass_that_never_comes_to_one_rank_harms_only_the_next_one(rank: int, tmp_path: Path) -> None:
    replicas = dist.new_group([0, 1])
    inner = layer(1)
    wanted = reference([inner], [batch(0), batch(1)])[0]
    with workers(rank, 3, tmp_path, ends=False):  # torch may wait for what belongs to a pass that has failed
        if rank < 2:
            serve("inner", paceline.replicate(inner, group=replicas))
        dist.barrier()
        if rank == 2:
            assert count_refused(0, wanted, of=1) == 0
            for calls in ([compute_and_raise, compute], [compute, compute_and_raise]):
                with pytest.raises(RuntimeError, match="this server is out of order"):
                    run_pass(0, wanted, calls)
                assert count_refused(0, wanted, of=3) <= 1
        dist.barrier()


@ranks(3, timeout=100)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_passes_of_two_callers_at_once_are_right_or_refused(
    rank: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "gpu":  # there none can wait for another: both may need the same thread
        monkeypatch.setattr(PassGate, "_let_others_go_first", lambda _: None)
    replicas = dist.new_group([0, 1])
    inner = nn.Sequential(layer(1), layer(2))
    wanted = [
        [gradient for part in reference(list(inner), [batch(0, n), batch(1, n)]) for gradient in part]
        for n in range(8)
    ]
    with workers(rank, 3, tmp_path, ends=False):
        if rank < 2:
            serve("inner", paceline.replicate(inner, group=replicas))
        dist.barrier()
        if rank == 2:
            for number in range(0, 8, 2):
                passes = [partial(run_pass, n, wanted[n], [compute, compute]) for n in (number, number + 1)]
                for error in run_both(*passes):
                    assert error is None or "several passes of distributed autograd" in str(error), error
            assert count_refused(0, wanted[0], of=6) <= 2  # what was under way may still be told
            run_pass(0, wanted[0], [compute, compute])
        dist.barrier()


# ---- bad input --------------------------------------------------------------------------------------


class Broken(torch.autograd.Function):
    """Raises in backward, or ends the process."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return inputs * 2

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.how == "dies":
            os._exit(9)
        if ctx.how == "raises":
            raise ValueError("this server is out of order")
        return gradients[0] * 2, None


def double(inputs: torch.Tensor, how: str) -> torch.Tensor:
    return Broken.apply(inputs, how)


@ranks(3, timeout=60)
@pytest.mark.parametrize("wrap", [paceline.replicate, Ours], ids=["replicate", "wrapper"])
def test_a_remote_part_that_raises_in_backward_is_heard_of_on_every_trainer(
    rank: int, wrap: Callable[..., nn.Module], tmp_path: Path
) -> None:
    trainers = dist.new_group([0, 1])
    with workers(rank, 3, tmp_path):
        if rank < 2:
            in_group = {"process_group" if wrap is Ours else "group": trainers}
            model = wrap(layer(0), **in_group)

            def run(how: str) -> None:
                with autograd.context() as context:
                    output = rpc.rpc_sync("worker2", double, args=(model(batch(rank)), how))
                    autograd.backward(context, [output.sum()])

            run("works")
            for _ in range(2):
                expected = pytest.raises(RuntimeError, match="out of order")
                with expected if rank == 0 else pytest.raises(PeerFailed, match="rank 0.*out of order"):
                    run("raises" if rank == 0 else "works")
            run("works")


@ranks(2, timeout=60)
def test_an_ended_context_is_named_and_the_others_hear_of_it(rank: int, tmp_path: Path) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0))
        with autograd.context() as context:
            loss = model(batch(rank)).sum()
            if rank == 1:
                with pytest.raises(PeerFailed, match="rank 0.*of distributed autograd has ended"):
                    autograd.backward(context, [loss])
        if rank == 0:
            with pytest.raises(
                RuntimeError, match=f"the context {context} of distributed autograd has ended"
            ):
                autograd.backward(context, [loss])

        with autograd.context() as context:
            autograd.backward(context, [model(batch(rank)).sum()])


SERVER = """
import os, sys, torch
from torch.distributed import rpc
sys.path.insert(0, {root!r})
import tests.test_remote
options = rpc.TensorPipeRpcBackendOptions(init_method="file://{folder}/rpc")
rpc.init_rpc("worker2", rank=2, world_size=3, rpc_backend_options=options)
rpc.shutdown()
"""


@ranks(2, timeout=90)
def test_a_server_that_dies_in_backward_is_heard_of_on_every_trainer(rank: int, tmp_path: Path) -> None:
    if rank == 0:
        code = SERVER.format(root=str(Path(__file__).parents[1]), folder=tmp_path)
        server = subprocess.Popen([sys.executable, "-c", code])
    with workers(rank, 3, tmp_path, graceful=False):
        model = paceline.replicate(layer(0))

        def run(worker: str, how: str) -> None:
            with autograd.context() as context:
                autograd.backward(
                    context, [rpc.rpc_sync(worker, double, args=(model(batch(rank)), how)).sum()]
                )

        run("worker2", "works")
        expected = pytest.raises(RuntimeError, match="eof|connection|closed")
        with expected if rank == 0 else pytest.raises(PeerFailed, match="rank 0 raised during its backward"):
            run("worker2" if rank == 0 else "worker1", "dies" if rank == 0 else "works")
        if rank == 0:
            assert server.wait(timeout=30) == 9
        run(f"worker{rank}", "works")  # what is left of the model trains on


TRAINER = """
import os, sys, torch, paceline
import torch.distributed as dist
from torch.distributed import autograd, rpc
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
model = paceline.replicate(torch.nn.Linear(3, 3))
with autograd.context() as context:
    output = model(torch.ones(2, 3))
    if rank == 1:
        output.register_hook(lambda _: os._exit(9))
    try:
        autograd.backward(context, [output.sum()])
    except paceline.PacelineError as error:
        print("heard", type(error).__name__, error, flush=True)
os._exit(0)
"""


def test_a_trainer_that_dies_in_backward_is_lost_to_the_others(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", TRAINER, str(rank), str(tmp_path)] for rank in (0, 1)]
    trainers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]

    said, _ = trainers[0].communicate(timeout=60)

    assert trainers[1].wait(timeout=60) == 9
    assert "heard PeerLost" in said, said


def multiply(name: str, inputs: torch.Tensor) -> torch.Tensor:
    return inputs @ served[name].weight  # not through the module's forward


@ranks(3, timeout=60)
def test_a_context_that_nobody_has_heard_of_is_refused(rank: int, tmp_path: Path) -> None:
    replicas = dist.new_group([0, 1])
    with workers(rank, 3, tmp_path):
        if rank < 2:
            serve("inner", paceline.replicate(layer(1), group=replicas))
        dist.barrier()
        if rank == 2:
            with autograd.context() as context:
                calls = [rpc.rpc_async(f"worker{r}", multiply, args=("inner", batch(r))) for r in (0, 1)]
                with pytest.raises(RuntimeError, match="autograd that this process has not heard of"):
                    autograd.backward(context, [sum(call.wait().sum() for call in calls)])
        dist.barrier()


@ranks(2, timeout=60)
def test_a_step_that_is_not_finite_leaves_zeros_in_its_context(rank: int, tmp_path: Path) -> None:
    with workers(rank, 2, tmp_path):
        model = paceline.replicate(layer(0), check_finite="skip")
        with autograd.context() as context:
            autograd.backward(context, [model(batch(rank)).sum() * (float("nan") if rank else 1.0)])

            assert all(not gradient.any() for gradient in in_context(context, model))
