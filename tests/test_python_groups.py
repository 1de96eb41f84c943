"""Process groups that are written in Python, and offer no more than torch's DistributedDataParallel uses."""

import copy
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from paceline import DistributedDataParallel as Ours
from paceline.comm import comm_over
from paceline.control import GroupControl, control_over, wiring
from paceline.hooks import in_dtype, local_sgd, powersgd, quantized
from paceline.python_groups import PythonWork
from paceline.testing import ranks

STEPS = 3


class Told(dist.Work):
    """A work that has a future and a wait(), and nothing else that tells anything."""

    def __init__(self, inner: dist.Work, tensors: object) -> None:
        super().__init__()
        self._inner = inner
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._finish, args=(tensors,), daemon=True).start()

    def _finish(self, tensors: object) -> None:
        try:
            self._inner.wait()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(tensors)

    def wait(self, timeout: timedelta) -> bool:
        assert timeout == timedelta(0), "a limit would break some groups"
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class WaitOnly(dist.Work):
    """A work that can only be waited for."""

    def __init__(self, inner: dist.Work, tensors: object) -> None:
        super().__init__()
        self._inner = inner

    def wait(self, timeout: timedelta) -> bool:
        return bool(self._inner.wait())


class FutureOnly(dist.Work):
    """A work that has only a future."""

    def __init__(self, inner: dist.Work, tensors: object) -> None:
        super().__init__()
        self._told = Told(inner, tensors)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._told.get_future()


def as_it_is(work: dist.Work, tensors: object) -> dist.Work:
    return work


class Forwarding(dist.ProcessGroup):
    """A user's own group, whose collectives go over one that torch does not tell us of."""

    def __init__(self, make: Callable[[dist.Work, object], dist.Work] = Told, inner: Any = None) -> None:
        self._inner = inner or dist.new_group(backend="gloo")
        super().__init__(self._inner.rank(), self._inner.size())
        self._make = make
        self.calls: list[str] = []

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
        self.calls.append("allreduce")
        return self._make(self._inner.allreduce(tensors, options), tensors)

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
        self.calls.append("broadcast")
        return self._make(self._inner.broadcast(tensors, options), tensors)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: object
    ) -> dist.Work:
        self.calls.append("allgather")
        return self._make(self._inner.allgather(outputs, inputs), outputs)

    def barrier(self, options: object) -> dist.Work:
        return self._inner.barrier()

    def getBackendName(self) -> str:
        return "forwarding"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, mine: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(mine(batch(step))).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def by_itself() -> list[torch.Tensor]:
    return trained(net(), lambda whole: whole)


def replicated(module: nn.Module, group: dist.ProcessGroup, **kwargs: Any) -> nn.Module:
    return paceline.replicate(module, group=group, **kwargs)


def wrapped(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return Ours(module, process_group=group)


def check_training(
    rank: int,
    size: int,
    make: Callable[[dist.Work, object], dist.Work],
    door: Callable[[nn.Module, dist.ProcessGroup], nn.Module],
) -> None:
    module = net()
    if rank:  # these are to become rank 0's
        nn.init.zeros_(module[0].weight)

    got = trained(door(module, Forwarding(make)), lambda whole: whole.chunk(size)[rank])

    torch.testing.assert_close(got, by_itself())


DOORS = pytest.mark.parametrize("door", [replicated, wrapped])
WORKS = pytest.mark.parametrize("make", [Told, WaitOnly, FutureOnly, as_it_is])


@ranks(2)
@DOORS
@WORKS
def test_two_ranks_train_over_it_as_one_process_does(rank: int, make: Any, door: Any) -> None:
    check_training(rank, 2, make, door)


@ranks(3)
@DOORS
def test_three_ranks_train_over_it_as_one_process_does(rank: int, door: Any) -> None:
    check_training(rank, 3, Told, door)


@ranks(2)
def test_all_gradients_travel_over_it(rank: int) -> None:
    group = Forwarding()
    model = paceline.replicate(net(), group=group)
    before = group.calls.count("allreduce")

    model(batch(0)).sum().backward()

    assert group.calls.count("allreduce") == before + len(paceline.replica(model).plan.buckets)
    assert type(control_over(paceline.replica(model).comm)) is type(control_over(comm_over(None)))


@ranks(2)
def test_it_is_given_back_as_the_wrappers_group_and_named_in_what_is_explained(rank: int) -> None:
    group = Forwarding()
    model = wrapped(net(), group)

    assert model.process_group is group
    assert "forwarding" in str(paceline.replica(model).explain())


@ranks(2)
@pytest.mark.parametrize("kind", ["bf16", "powersgd", "int8"])
def test_hooks_reduce_over_it_as_they_do_over_gloo(rank: int, kind: str) -> None:
    def gradients(group: dist.ProcessGroup | None) -> list[torch.Tensor | None]:
        hook = {"bf16": lambda: in_dtype(torch.bfloat16), "powersgd": powersgd, "int8": quantized}[kind]()
        model = paceline.replicate(net(), group=group, hook=hook)
        model(batch(rank)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradients(Forwarding()), gradients(None))


@ranks(2)
def test_a_hook_in_torchs_form_reduces_over_it(rank: int) -> None:
    group = Forwarding()
    model = Ours(net(), process_group=group)
    model.register_comm_hook(group, allreduce_hook)

    got = trained(model, lambda whole: whole.chunk(2)[rank])

    torch.testing.assert_close(got, by_itself())


@ranks(2)
def test_ranks_with_different_numbers_of_batches_join_over_it_as_they_do_over_gloo(rank: int) -> None:
    def weights(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        model = paceline.replicate(net(), group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.join(model):
            for step in range(1 + rank):
                optimizer.zero_grad()
                model(batch(step)).sum().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    torch.testing.assert_close(weights(Forwarding()), weights(None))


@ranks(3)
def test_every_collective_does_over_it_what_it_does_over_gloo(rank: int) -> None:
    theirs, ours = comm_over(None), comm_over(Forwarding())
    flat = torch.arange(6.0) + 10 * rank

    for start in ("total", "average", "gather", "exchange"):
        got, right = (getattr(comm, start)(flat.clone()).wait() for comm in (ours, theirs))
        assert torch.equal(got, right), start
    assert torch.equal(ours.broadcast(flat.clone(), 2).wait(), torch.arange(6.0) + 20)
    assert torch.equal(ours.gather(flat * 1j).wait(), theirs.gather(flat * 1j).wait())
    assert ours.gather_bytes(b"x" * rank) == [b"", b"x", b"xx"]


@ranks(2)
def test_a_sum_in_a_fixed_order_and_buffers_and_sparse_rows_travel_over_it(rank: int) -> None:
    group = Forwarding()
    torch.manual_seed(rank)
    table = paceline.replicate(
        nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Flatten(), nn.BatchNorm1d(4)), group=group
    )
    for _ in range(2):
        table.zero_grad()
        table(torch.tensor([[rank, 1], [2, rank]])).square().sum().backward()
    fixed = paceline.replicate(net(), group=group, deterministic=True)
    fixed(batch(rank)).sum().backward()
    paceline.replica(table).sync_buffers()

    comm = comm_over(None)
    for tensor in (table[0].weight.grad.to_dense(), table[2].running_mean, fixed[0].weight.grad):
        rows = comm.gather(tensor.flatten()).wait()
        assert torch.equal(rows[0], rows[1])


@ranks(2)
def test_torch_may_have_made_it_for_a_backend_that_is_registered(rank: int) -> None:
    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return Forwarding(inner=dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("forwarding", create, devices=["cpu"])
    group = dist.new_group(backend="forwarding")
    assert isinstance(group, Forwarding)

    got = trained(replicated(net(), group), lambda whole: whole.chunk(2)[rank])

    assert list(comm_over(group).ranks) == [0, 1]
    torch.testing.assert_close(got, by_itself())


@ranks(2)
def test_a_copy_of_a_wrapper_on_it_is_on_it_too(rank: int) -> None:
    group = Forwarding()
    model = copy.deepcopy(wrapped(net(), group))

    model(batch(rank)).sum().backward()

    assert model.process_group is group


@ranks(2)
@DOORS
def test_what_it_lacks_is_named_on_every_rank(rank: int, door: Any) -> None:
    class Poor(dist.ProcessGroup):
        def allreduce(self, tensors: list[torch.Tensor], options: object) -> None:
            raise AssertionError("nothing is sent")

    with pytest.raises(TypeError) as caught:
        door(net(), Poor(rank, 2))

    assert str(caught.value) == (
        "the process group Poor is written in Python and has no broadcast(), allgather(). Gradients and "
        "messages travel by allreduce, broadcast and allgather: write the missing methods, as "
        "torch.distributed.ProcessGroup declares them."
    )


class Nothing(dist.Work):
    def __init__(self, inner: dist.Work, tensors: object) -> None:
        super().__init__()
        inner.wait()


@ranks(2)
def test_a_work_that_cannot_be_waited_for_is_named_on_every_rank(rank: int) -> None:
    with pytest.raises(
        paceline.CommunicationFault, match=r"a Nothing, which has neither wait\(\) nor get_future"
    ):
        replicated(net(), Forwarding(Nothing))


@ranks(2)
def test_frames_go_over_a_twin_of_it_if_the_ranks_cannot_reach_each_other(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "MOST_RANKS", 0)
    monkeypatch.setattr(wiring, "this_host", lambda: f"host {rank}")
    model = replicated(net(), Forwarding())

    got = trained(model, lambda whole: whole.chunk(2)[rank])

    assert isinstance(control_over(paceline.replica(model).comm), GroupControl)
    torch.testing.assert_close(got, by_itself())


@ranks(2)
def test_ranks_that_torch_numbers_otherwise_are_told_to_be_numbered_alike(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "MOST_RANKS", 0)
    monkeypatch.setattr(wiring, "this_host", lambda: f"host {rank}")
    group = Forwarding()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)  # each is the first of a default group of its own

    with pytest.raises(ValueError, match=r"its ranks have the numbers \[0, 0\] \(-1: there is none\)"):
        replicated(net(), group)


@ranks(4)
def test_a_hierarchy_of_its_ranks_is_made_of_new_groups(rank: int) -> None:
    hook = local_sgd(hierarchy={1: 2, 2: 4})
    model = replicated(net(), Forwarding(), hook=hook)

    trained(model, lambda whole: whole[rank : rank + 1])

    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rows = comm_over(None).gather(flat).wait()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[2], rows[3])
    assert not torch.equal(rows[0], rows[2])  # the last of three steps has averaged pairs only


@ranks(2)
def test_a_rank_that_fails_is_heard_of(rank: int) -> None:
    model = replicated(net(), Forwarding())
    if rank:
        with pytest.raises(ZeroDivisionError):
            loss = model(batch(0)).sum()
            loss.register_hook(lambda _: 1 / 0)
            loss.backward()
    else:
        with pytest.raises(paceline.PeerFailed, match="ZeroDivisionError"):
            model(batch(0)).sum().backward()


class Promise(dist.Work):
    """A work that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[None] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[None]:
        return self.future


def test_a_wait_with_a_limit_ends_there_and_the_work_goes_on() -> None:
    promise = Promise()
    work = PythonWork(promise)

    with pytest.raises(RuntimeError, match="not yet"):
        work.wait(timedelta(milliseconds=1))
    assert not work.is_completed()

    promise.future.set_result(None)
    work.wait(timedelta(seconds=10))
    assert work.is_completed()


def test_what_breaks_off_is_raised_by_the_wait_without_a_limit() -> None:
    promise = Promise()
    work = PythonWork(promise)
    promise.future.set_exception(RuntimeError("the wire was cut"))

    work.wait(timedelta(seconds=10))

    assert work.is_completed()
    with pytest.raises(RuntimeError, match="the wire was cut"):
        work.wait()


@ranks(2)
def test_a_rank_that_does_not_come_is_missed_in_time(rank: int) -> None:
    comm = comm_over(Forwarding())
    comm.set_patience(0.2, 10.0)
    if rank == 0:
        with pytest.raises(paceline.PeerTimeout, match="rank 1 is missing"):
            comm.total(torch.ones(3)).wait()
    dist.barrier()
    if rank == 1:  # the collective has to end before the group can
        comm.total(torch.ones(3)).wait()
