"""The link is checked before models are compared: what every rank is told, and what it costs."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import preflight as module
from paceline.comm import GroupComm, Pending, SoloComm
from paceline.preflight import preflight
from paceline.testing import ranks
from tests.promises.measure import gather

COLLECTIVES = ("gather_small", "gather", "total", "broadcast", "gather_bytes")


class Late(Pending):
    """A collective whose result is changed when it is there."""

    def __init__(self, inner: Pending, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner, self._change = inner, change

    def is_done(self) -> bool:
        return self._inner.is_done()

    def wait(self) -> torch.Tensor:
        return self._change(self._inner.wait())


@contextlib.contextmanager
def wrong(collective: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change what a collective returns on this rank."""
    right = getattr(GroupComm, collective)

    def changed(self: GroupComm, *args: Any) -> Any:
        result = right(self, *args)
        return Late(result, change) if isinstance(result, Pending) else change(result)

    with mock.patch.object(GroupComm, collective, changed):
        yield


def garble(result: Any) -> Any:
    """Flip the last thing that came."""
    if isinstance(result, list):
        return [*result[:-1], result[-1][:-1] + b"!"]
    result.view(-1)[-1] += 1
    return result


def refusal(**arguments: Any) -> paceline.CommunicationFault:
    """Replicate a model, which has to fail in the same words on every rank; return the exception."""
    with pytest.raises(paceline.CommunicationFault) as caught:
        paceline.replicate(nn.Linear(3, 3), **arguments)
    texts = gather(str(caught.value))
    assert len(set(texts)) == 1, texts
    return caught.value


@pytest.mark.parametrize("collective", COLLECTIVES)
@ranks(3)
def test_wrong_data_on_one_rank_is_told_on_every_rank(rank: int, collective: str) -> None:
    with wrong(collective, garble) if rank == 1 else contextlib.nullcontext():
        fault = refusal()

    name = "gather_bytes" if collective == "gather_small" else collective
    assert fault.collective == name
    assert fault.ranks == (1,)
    assert f"{name} by gloo on cpu returned wrong data on rank 1: " in str(fault)
    assert "at fault, not the model" in str(fault)


@ranks(2)
def test_the_first_wrong_element_is_shown_with_what_it_has_to_be(rank: int) -> None:
    with wrong("total", garble):
        fault = refusal()

    # ranks 0 and 1 send 7 * place + 31 * rank + 53 * salt, modulo 251
    assert "returned wrong data on ranks 0, 1: element 0 of 1 is " in str(fault)
    got, _, right = str(fault).partition("element 0 of 1 is ")[2].partition(" and has to be ")
    assert float(got) == float(right.partition(" (on rank 0)")[0]) + 1
    assert fault.ranks == (0, 1)


def swapped(rows: torch.Tensor) -> torch.Tensor:
    return rows.flip(0)


@ranks(2)
def test_rows_in_the_wrong_order_are_wrong_data(rank: int) -> None:
    with wrong("gather", swapped):
        assert refusal().collective == "gather"


@ranks(2)
def test_what_an_earlier_collective_left_behind_is_wrong_data(rank: int) -> None:
    results: list[torch.Tensor] = []

    def stale(result: torch.Tensor) -> torch.Tensor:
        results.append(result.clone())
        return next((old for old in results[:-1] if old.shape == result.shape), result)

    with wrong("broadcast", stale):
        assert refusal().collective == "broadcast"


@ranks(2)
def test_the_places_of_the_ranks_are_told(rank: int) -> None:
    import socket

    with wrong("total", garble):
        fault = refusal()

    assert fault.backend == "gloo"
    assert list(fault.places) == [0, 1]
    assert f"rank 1 on {socket.gethostname()} (lo 127.0.0.1)" in str(fault)


@ranks(2)
def test_other_collectives_that_are_wrong_are_named(rank: int) -> None:
    with wrong("total", garble), wrong("broadcast", garble):
        assert "broadcast on cpu did not come through either." in str(refusal())


@ranks(2)
def test_a_collective_that_raises_is_told_with_the_words_of_the_transport(rank: int) -> None:
    def broken(self: GroupComm, flat: torch.Tensor) -> Pending:
        raise RuntimeError("NIC on fire\nstack of the transport")

    group = dist.new_group()  # it is of no use afterwards
    with mock.patch.object(GroupComm, "total", broken) if rank == 1 else contextlib.nullcontext():
        fault = refusal(group=group)

    assert "total by gloo on cpu broke off on rank 1: NIC on fire. " in str(fault)


@ranks(2)
def test_a_collective_that_hangs_is_told_although_every_rank_is_there(rank: int) -> None:
    def lost(self: GroupComm, flat: torch.Tensor) -> Pending:
        return Pending(flat, mock.Mock(is_completed=lambda: False))

    module.PATIENCE_SECONDS = 0.5
    with mock.patch.object(GroupComm, "total", lost):
        fault = refusal(group=dist.new_group())

    assert "total by gloo on cpu did not end on ranks 0, 1: not within 0.5 s, although" in str(fault)


@ranks(2)
def test_a_rank_that_has_left_is_a_lost_peer_and_not_a_fault_of_the_link(rank: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(paceline.PeerLost, match="rank 1 did not come to replicate the model: "):
        paceline.replicate(nn.Linear(3, 3))


@ranks(2)
def test_a_group_is_checked_once(rank: int) -> None:
    paceline.replicate(nn.Linear(3, 3))
    with wrong("total", garble), wrong("gather", garble):
        again = paceline.replicate(nn.Linear(2, 2))
        paceline.DistributedDataParallel(nn.Linear(2, 2))

    assert paceline.replica(again).size == 2
    with wrong("total", garble):
        refusal(group=dist.new_group())


@ranks(2)
def test_a_second_look_starts_no_collective_and_asks_no_store(rank: int) -> None:
    comm = GroupComm(dist.group.WORLD)
    preflight(comm, nn.Linear(1, 1))

    with mock.patch.object(module, "_Preflight", side_effect=AssertionError):
        preflight(GroupComm(dist.group.WORLD), nn.Linear(1, 1))


@ranks(2)
def test_after_a_fault_the_next_attempt_checks_again(rank: int) -> None:
    with wrong("total", garble):
        refusal()
    model = paceline.replicate(nn.Linear(3, 3))
    model(torch.ones(1, 3) * (rank + 1)).sum().backward()

    one, two = gather(model.weight.grad)
    assert torch.equal(one, two)


@ranks(2)
def test_a_refused_argument_on_one_rank_leaves_the_check_matched(rank: int) -> None:
    kind = TypeError if rank == 1 else paceline.PeerFailed
    with pytest.raises(kind, match="takes a torch.nn.Module, got int"):
        paceline.replicate(7 if rank == 1 else nn.Linear(3, 3))

    with wrong("total", garble):  # the link was found right before the arguments were read
        paceline.replicate(nn.Linear(3, 3))


@ranks(2)
def test_a_change_of_the_group_is_checked(rank: int) -> None:
    model = paceline.replicate(nn.Linear(3, 3))
    other = dist.new_group()
    with wrong("total", garble), pytest.raises(paceline.CommunicationFault):
        paceline.replica(model).change_group(other)

    paceline.replica(model).change_group(other)
    assert paceline.replica(model).comm.group is other


@ranks(2)
def test_without_a_store_the_verdict_goes_over_the_group(rank: int) -> None:
    with mock.patch("paceline.board.store_of", return_value=None):
        with wrong("total", garble) if rank == 1 else contextlib.nullcontext():
            fault = None
            try:
                paceline.replicate(nn.Linear(3, 3))
            except paceline.CommunicationFault as error:
                fault = error

    assert fault is not None
    assert fault.ranks == (1,)


def test_a_process_alone_has_no_link() -> None:
    with mock.patch.object(module, "_Preflight", side_effect=AssertionError):
        preflight(SoloComm(), nn.Linear(1, 1))


def test_every_rank_place_and_collective_has_other_values() -> None:
    sent = [module._values(rank, 100, salt) for rank, salt in itertools.product(range(8), range(1, 20))]

    assert all(not torch.equal(a, b) for a, b in itertools.combinations(sent, 2))
    assert all(len(values.unique()) == 100 for values in sent)


@ranks(2)
@pytest.mark.parametrize("door", [paceline.replicate, paceline.DistributedDataParallel])
def test_a_group_that_moves_nothing_is_refused_in_favour_of_check(rank: int, door: Any) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend known

    group = dist.new_group(backend="fake")

    with pytest.raises(ValueError) as caught:
        door(nn.Linear(2, 2), **{"group" if door is paceline.replicate else "process_group": group})

    assert str(caught.value) == (
        'the process group is of torch\'s "fake" backend, which moves nothing: what comes back is not what '
        "the other ranks have sent. Leave init_process_group() out and call paceline.check(step, ranks=2), "
        "which makes such a group itself and compares what each rank would send"
    )
