"""Gradients leave a compiled backward where they are complete: one graph, whatever the buckets are."""

import contextlib
import copy
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import paceline
from paceline.compile import arrivals, in_graph
from paceline.hooks import average, in_dtype, powersgd, quantized
from paceline.reducer import Reducer
from paceline.testing import ranks
from tests.compile.models import Block, batch, check_gradients, loss_of, made, reference

NORM = "convnet with BatchNorm"

# Dynamo looks at ``.grad`` of whatever a graph is given.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


class Seen:
    """What was taken out of compiled backwards, and how many graphs were made."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.graphs = 0

    def backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@contextlib.contextmanager
def watching() -> Iterator[Seen]:
    torch._dynamo.reset()
    seen = Seen()
    take = Reducer.take

    def note_and_take(reducer: Reducer, indices: Any, gradients: Any) -> None:
        seen.taken.append(len(indices))
        take(reducer, indices, gradients)

    with mock.patch.object(Reducer, "take", note_and_take), mock.patch.object(in_graph, "SMALLEST_NBYTES", 1):
        yield seen


def deep(layers: int = 15, width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    parts = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    return nn.Sequential(nn.Linear(6, width), *parts)


def references(model: nn.Module, step: int = 0) -> list[torch.Tensor | None]:
    return reference(model, [batch(rank, step) for rank in range(2)])


@ranks(2)
@pytest.mark.parametrize(("bucket_mb", "buckets"), [(1.0, 1), (0.0013, 4), (0.0003, 16)])
def test_one_graph_whatever_the_number_of_buckets(rank: int, bucket_mb: float, buckets: int) -> None:
    model = deep()
    want = references(model)
    paceline.replicate(model, bucket_mb=bucket_mb, first_bucket_mb=bucket_mb)
    with watching() as seen:
        compiled = torch.compile(model, backend=seen.backend, fullgraph=True)
        for _ in range(3):
            model.zero_grad()
            loss_of(compiled(batch(rank))).backward()
            check_gradients(model, want)

    assert len(paceline.replica(model).stats().bucket_nbytes) == buckets
    assert seen.graphs == 1
    assert sum(seen.taken) == 3 * len(list(model.parameters()))


@ranks(2)
def test_other_buckets_need_no_other_graph(rank: int) -> None:
    model = deep()
    want = references(model)
    paceline.replicate(model)
    with watching() as seen:
        compiled = torch.compile(model, backend=seen.backend, fullgraph=True)
        for bucket_mb, buckets in ((1.0, 1), (0.0013, 4), (0.0003, 16)):
            paceline.replica(model).set_buckets(bucket_mb, first_bucket_mb=bucket_mb)
            model.zero_grad()
            loss_of(compiled(batch(rank))).backward()
            check_gradients(model, want)
            assert len(paceline.replica(model).stats().bucket_nbytes) == buckets

    assert seen.graphs == 1
    assert sum(seen.taken) == 3 * len(list(model.parameters()))


@ranks(2)
def test_buckets_go_out_while_the_compiled_backward_still_runs(rank: int) -> None:
    model = paceline.replicate(deep(), bucket_mb=0.0003, first_bucket_mb=0.0003)
    events: list[str] = []

    def noting(bucket: Any, comm: Any) -> Any:
        events.append("bucket")
        return average(bucket, comm)

    paceline.replica(model).set_hook(noting)
    leave = arrivals.Delivery.run

    def run_and_note(delivery: Any, function: Any, arguments: Any) -> Any:
        out = leave(delivery, function, arguments)
        events.append("end of the graph")
        return out

    with watching(), mock.patch.object(arrivals.Delivery, "run", run_and_note):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            events.clear()
            loss_of(compiled(batch(rank))).backward()

    assert events.count("bucket") == len(paceline.replica(model).stats().bucket_nbytes) == 16
    early = [0, 0]
    dist.all_gather_object(early, events.index("end of the graph"))
    assert max(early) >= 14  # a rank that is ahead keeps its buckets until the other one has begun


@ranks(2, timeout=180)
def test_in_inductors_code_the_first_group_leaves_before_the_last_kernel(rank: int) -> None:
    model = paceline.replicate(deep())
    with watching():
        compiled = torch.compile(model, fullgraph=True)
        _, codes = torch._inductor.utils.run_and_get_code(lambda: loss_of(compiled(batch(rank))).backward())

    [code] = [code for code in codes if "paceline.arrived" in code]
    calls = re.findall(
        r"^\s+(?:buf\d+ = )?(torch\.ops\.paceline\.arrived|extern_kernels\.\w+|cpp_\w+)", code, re.M
    )
    points = [number for number, call in enumerate(calls) if "arrived" in call]
    assert len(points) > 8
    assert points[0] < len(calls) // 3
    assert any("arrived" not in call for call in calls[points[-2] :])


HOOKS: dict[str, Callable[[], Any]] = {
    "average": lambda: average,
    "in_dtype": lambda: in_dtype(torch.float64, average),
    "powersgd": lambda: powersgd(rank=8, start_step=1, min_compression=1),
    "quantized": lambda: quantized(bits=8),
}


@ranks(2)
def test_what_the_engine_can_do_it_does_in_compiled_backwards(rank: int) -> None:
    model = deep(3)
    want = references(model)
    replica = paceline.replica(paceline.replicate(model))
    with watching() as seen:
        compiled = torch.compile(model, backend=seen.backend, fullgraph=True)

        def backward() -> None:
            loss_of(compiled(batch(rank))).backward()

        def in_no_sync() -> None:
            with replica.no_sync():
                backward()
            backward()

        def in_accumulate() -> None:
            with replica.accumulate(3):
                for _ in range(3):
                    backward()

        def on_zeros() -> None:
            backward()
            model.zero_grad(set_to_none=False)
            backward()

        def on_top_of_agreed_ones() -> None:
            backward()
            backward()

        def weighted() -> None:
            with replica.weight(3):
                backward()

        def twice_in_one_backward() -> None:
            (loss_of(compiled(batch(rank))) + loss_of(compiled(batch(rank)))).backward()

        def with_an_eager_use() -> None:
            extra = sum(p.sum() - p.detach().sum() for p in model.parameters())
            (loss_of(compiled(batch(rank))) + 0 * extra).backward()

        for times, way in (
            (2, in_no_sync),
            (3, in_accumulate),
            (1, on_zeros),
            (2, on_top_of_agreed_ones),
            (1, weighted),
            (2, twice_in_one_backward),
            (2, twice_in_one_backward),
            (1, with_an_eager_use),
            (1, backward),
        ):
            model.zero_grad()
            way()
            check_gradients(model, want, times)

    assert seen.graphs == 1


@ranks(2)
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_works_in_compiled_backwards_as_in_eager_ones(rank: int, hook: str) -> None:
    gradients = []
    with watching() as seen:
        for is_compiled in (False, True):
            model = paceline.replicate(deep(2))
            paceline.replica(model).set_hook(HOOKS[hook]())
            forward = torch.compile(model, backend="aot_eager") if is_compiled else model
            for step in range(3):
                model.zero_grad()
                loss_of(forward(batch(rank, step))).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])

    assert seen.taken
    for eager, compiled in zip(*gradients, strict=True):
        # Which slots share a bucket, and so a scale, may differ.
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0.02 if hook == "quantized" else 1e-5)


@ranks(2)
def test_weights_that_differ_between_the_ranks(rank: int) -> None:
    model = deep(2)
    parts = [reference(model, [batch(each)]) for each in range(2)]
    paceline.replicate(model)
    with watching() as seen:
        compiled = torch.compile(model, backend="aot_eager")
        with paceline.weight(model, 3 if rank else 1):
            loss_of(compiled(batch(rank))).backward()
        check_gradients(model, [(a + 3 * b) / 4 for a, b in zip(*parts, strict=True)])
        model.zero_grad()
        with paceline.weight(model, rank):  # rank 0's does not count
            loss_of(compiled(batch(rank))).backward()
        check_gradients(model, parts[1])

    assert seen.taken


@ranks(2)
def test_shapes_may_change(rank: int) -> None:
    model = deep(2)
    paceline.replicate(model)
    with watching() as seen:
        compiled = torch.compile(model, backend=seen.backend, dynamic=True)
        for rows in (3, 5, 9):
            want = reference(nn.Sequential(*model), [batch(each, rows=rows) for each in range(2)])
            model.zero_grad()
            loss_of(compiled(batch(rank, rows=rows))).backward()
            check_gradients(model, want)

    assert seen.graphs == 1
    assert seen.taken


@ranks(2)
def test_gradients_that_are_asked_for_are_returned_and_nothing_is_reduced(rank: int) -> None:
    model = deep(2)
    mine = reference(model, [batch(rank)])
    paceline.replicate(model)
    with watching() as seen:
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled(batch(rank))).backward()
        model.zero_grad()
        seen.taken.clear()
        given = torch.autograd.grad(loss_of(compiled(batch(rank))), list(model.parameters()))

    assert not seen.taken
    assert all(p.grad is None for p in model.parameters())
    for gradient, want in zip(given, mine, strict=True):
        torch.testing.assert_close(gradient, want)


@ranks(2)
def test_a_backward_for_some_inputs_leaves_the_others_alone(rank: int) -> None:
    model = deep(2)
    want = references(model)
    paceline.replicate(model)
    some = [next(iter(model.parameters()))]
    with watching():
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled(batch(rank))).backward(inputs=some)

    torch.testing.assert_close(some[0].grad, want[0])
    assert all(p.grad is None for p in list(model.parameters())[1:])


@ranks(2)
def test_hooks_of_users_on_parameters_see_and_change_gradients_as_in_eager(rank: int) -> None:
    model = deep(2)
    want = references(model)
    paceline.replicate(model)
    calls = []
    first = next(iter(model.parameters()))
    with watching():
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled(batch(rank))).backward()
        model.zero_grad()
        first.register_hook(lambda gradient: gradient * 2)
        first.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
        loss_of(compiled(batch(rank))).backward()

    assert len(calls) == 1
    torch.testing.assert_close(first.grad, 2 * want[0])


@ranks(2)
def test_one_graph_serves_all_layers_of_a_kind(rank: int) -> None:
    """Regional compilation: the graph holds no parameter of any layer."""
    model = nn.Sequential(nn.Linear(6, 8), *(Block(8) for _ in range(4)))
    want = references(model)
    paceline.replicate(model)
    with watching() as seen:
        for layer in model[1:]:
            layer.compile(backend=seen.backend, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            loss_of(model(batch(rank))).backward()
            check_gradients(model, want)

    assert seen.graphs == 1
    assert sum(seen.taken) == 2 * 4 * 6


@ranks(2)
def test_two_replicas_in_one_graph(rank: int) -> None:
    first, second = nn.Linear(6, 6), deep(2)
    both = nn.Sequential(first, nn.ReLU(), second)
    want = references(both)
    paceline.replicate(first)
    paceline.replicate(second)
    with watching() as seen:
        compiled = torch.compile(lambda x: second(first(x).relu()), backend="aot_eager", fullgraph=True)
        for _ in range(2):
            both.zero_grad()
            loss_of(compiled(batch(rank))).backward()
            check_gradients(both, want)

    assert seen.taken


@ranks(2)
def test_a_rank_that_is_not_compiled_agrees_with_one_that_is(rank: int) -> None:
    model = deep(3)
    paceline.replicate(model)
    want = references(model)
    with watching():
        forward = torch.compile(model, backend="aot_eager") if rank else model
        for _ in range(3):
            model.zero_grad()
            loss_of(forward(batch(rank))).backward()
            check_gradients(model, want)


@ranks(2)
def test_a_failure_inside_a_compiled_backward_reaches_the_others(rank: int) -> None:
    model = paceline.replicate(deep(3))
    hurt = []

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if hurt and rank:
                raise ValueError("hurt")
            return gradient

    with watching():
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled(batch(rank))).backward()
        hurt.append(True)
        x = batch(rank).requires_grad_()
        with pytest.raises(ValueError if rank else paceline.PeerFailed, match="hurt"):
            loss_of(compiled(Fragile.apply(x))).backward()
        hurt.clear()
        model.zero_grad()
        want = references(nn.Sequential(*model))
        loss_of(compiled(batch(rank))).backward()
        check_gradients(model, want)


@ranks(2)
def test_a_disagreement_is_raised_out_of_the_compiled_backward_as_what_it_is(rank: int) -> None:
    model = paceline.replicate(deep(3))
    with watching():
        compiled = torch.compile(model, backend="aot_eager")
        loss_of(compiled(batch(rank))).backward()
        if rank:
            paceline.replica(model).reducer.step += 1
        with pytest.raises(paceline.RanksDisagree, match="step"):
            loss_of(compiled(batch(rank))).backward()


@ranks(2)
def test_graphs_without_replicas_are_left_alone(rank: int) -> None:
    model, other = paceline.replicate(deep(1)), deep(1)
    with watching() as seen:
        loss_of(torch.compile(other, backend="aot_eager")(batch(rank))).backward()

    assert not seen.taken
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())


@ranks(2)
def test_a_graph_made_for_a_replica_serves_a_plain_module_too(rank: int) -> None:
    model, other = deep(2), deep(2)
    paceline.replicate(model)
    mine = reference(other, [batch(rank)])
    with watching() as seen:

        def run(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return layers(x)

        compiled = torch.compile(run, backend=seen.backend)
        loss_of(compiled(model, batch(rank))).backward()
        loss_of(compiled(other, batch(rank))).backward()

    check_gradients(other, mine)


@ranks(2)
@pytest.mark.parametrize("options", [{"deterministic": True}, {"check_finite": True}, {"reduce": "sum"}])
def test_settings_hold_in_compiled_backwards(rank: int, options: dict[str, Any]) -> None:
    model = deep(2)
    want = references(model)
    paceline.replicate(model, **options)
    with watching():
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            loss_of(compiled(batch(rank))).backward()
            check_gradients(model, want, 2 if "reduce" in options else 1)


@ranks(2)
def test_an_optimizer_inside_backward_steps_in_compiled_backwards(rank: int) -> None:
    weights = []
    with watching() as seen:
        for is_compiled in (False, True):
            model = paceline.replicate(deep(2))
            paceline.replica(model).step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
            forward = torch.compile(model, backend="aot_eager") if is_compiled else model
            for step in range(3):
                loss_of(forward(batch(rank, step))).backward()
            weights.append([p.detach().clone() for p in model.parameters()])

    assert seen.taken
    for eager, compiled in zip(*weights, strict=True):
        torch.testing.assert_close(compiled, eager)


@ranks(2)
def test_mixed_precision_in_compiled_backwards(rank: int) -> None:
    gradients = []
    with watching():
        for is_compiled in (False, True):
            model = deep(2)
            paceline.replicate(model, precision=paceline.Precision(torch.bfloat16, reduce=torch.float32))
            forward = torch.compile(model, backend="aot_eager") if is_compiled else model
            loss_of(forward(batch(rank)).float()).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])

    for eager, compiled in zip(*gradients, strict=True):
        assert compiled.dtype is torch.float32
        torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.02)


@ranks(2)
def test_compiled_autograd_is_kept_away_from_replicas_and_left_to_others(rank: int) -> None:
    model, other = deep(2), deep(2)
    want, mine = references(model), reference(other, [batch(rank)])
    paceline.replicate(model)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with watching():
        compiled = torch.compile(model, backend="aot_eager")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            for forward in (model, compiled):
                model.zero_grad()
                loss_of(forward(batch(rank))).backward()
                check_gradients(model, want)
            assert not graphs
            loss_of(other(batch(rank))).backward()

    assert graphs
    check_gradients(other, mine)


@ranks(2)
def test_an_evaluation_by_one_rank_alone_changes_nothing_for_the_others(rank: int) -> None:
    torch._dynamo.reset()
    for model in (
        paceline.replicate(made(NORM), buffers="before_forward"),
        paceline.DistributedDataParallel(made(NORM)),
    ):
        if rank == 0:
            model.eval()
            with torch.no_grad():
                torch.compile(model, backend="aot_eager")(batch(0))
            model.train()
        for step in range(2):
            loss_of(model(batch(rank, step))).backward()


@ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_second_order_gradient_is_refused_as_torch_does(rank: int) -> None:
    model = paceline.replicate(deep(2))
    with watching() as seen:
        compiled = torch.compile(model, backend="aot_eager")
        loss = loss_of(compiled(batch(rank)))
        loss.backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        with pytest.raises(RuntimeError, match="double backward"):
            penalty.backward()

    assert not seen.taken


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(6, 6), nn.Linear(6, 3)


@ranks(2)
def test_a_sparse_gradient_that_comes_after_the_bucket_is_out(rank: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    alone = copy.deepcopy(model)
    paceline.replicate(model, bucket_mb=0.0001, first_bucket_mb=0.0001)
    rows = torch.tensor([1, 4])

    def run(net: nn.Module, forward: Any, x: torch.Tensor) -> torch.Tensor:
        eager = functional.embedding(rows, net.table.weight, sparse=True)
        return loss_of(forward(x)) + eager.sum()

    with watching() as seen:
        compiled = torch.compile(lambda x: model.out(x @ model.table.weight), backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            run(model, compiled, batch(rank)).backward()
            for each in range(2):
                (run(alone, lambda x: alone.out(x @ alone.table.weight), batch(each)) / 2).backward()
            check_gradients(model, [p.grad.to_dense() for p in alone.parameters()])
            alone.zero_grad()

    assert seen.taken


@ranks(2)
def test_compiled_code_keeps_no_model_alive(rank: int) -> None:
    with watching() as seen:
        model = paceline.replicate(deep(2))
        loss_of(torch.compile(model, backend="aot_eager")(batch(rank))).backward()
        watched = [
            weakref.ref(model),
            weakref.ref(model[0].weight),
            weakref.ref(paceline.replica(model).reducer),
        ]
        del model
        gc.collect()

    assert seen.taken
    assert [each() for each in watched] == [None] * 3


def test_ranks_that_are_threads_get_ready_to_compile_once() -> None:
    code = """
import torch, paceline
def step():
    model = paceline.replicate(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
paceline.rehearse(step, ranks=4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
