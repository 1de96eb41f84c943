"""Worker threads come to rest before the interpreter ends."""

import time

import torch
import torch.distributed as dist

from paceline import quiet
from paceline.quiet import wait_for_workers
from paceline.testing import ranks


def pauses(monkeypatch, states: list[list[str]]) -> int:
    """Return how often wait_for_workers slept while the workers went through some states."""
    slept: list[float] = []
    monkeypatch.setattr(quiet, "_worker_states", lambda: iter(states[min(len(slept), len(states) - 1)]))
    monkeypatch.setattr(quiet.time, "sleep", slept.append)
    wait_for_workers(5)
    return len(slept)


def test_without_workers_there_is_nothing_to_wait_for(monkeypatch):
    assert pauses(monkeypatch, [[]]) == 0


def test_workers_have_to_rest_for_some_pauses_in_a_row(monkeypatch):
    assert pauses(monkeypatch, [["S", "S"]]) == 3
    assert pauses(monkeypatch, [["S", "S"], ["S", "R"], ["R", "S"], ["S", "S"]]) == 6


def test_a_worker_that_never_rests_is_given_up(monkeypatch):
    monkeypatch.setattr(quiet, "_worker_states", lambda: iter(["R"]))
    start = time.monotonic()

    wait_for_workers(0.05)

    assert time.monotonic() - start < 5


@ranks(2)
def test_the_workers_of_a_group_are_seen():
    dist.all_reduce(torch.ones(1))

    assert len(list(quiet._worker_states())) == 2
