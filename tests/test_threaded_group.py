"""Ranks that are threads of one process, over torch's threaded process group, as in torch's own tests."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import paceline
from paceline.errors import RanksDisagree

SIZE = 4
SECONDS = 30.0


def on_thread_ranks(act: Callable[[int], Any]) -> list[Any]:
    """Run a function on each rank of a threaded group; what it returns, or raises, by rank."""
    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    together = threading.Barrier(SIZE)

    def run(rank: int) -> Any:
        dist.init_process_group("threaded", rank=rank, world_size=SIZE, store=store)
        try:
            return act(rank)
        except Exception as error:
            return error
        finally:
            together.wait(SECONDS)
            dist.destroy_process_group()

    try:
        with ThreadPoolExecutor(SIZE) as threads:
            return [ran.result(SECONDS) for ran in [threads.submit(run, rank) for rank in range(SIZE)]]
    finally:
        threaded._uninstall_threaded_pg()
        _set_thread_isolation_mode(False)


@pytest.mark.parametrize("wrap", [paceline.replicate, paceline.DistributedDataParallel])
def test_threads_over_torchs_group_train_as_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    weights, rows = torch.randn(2, 3), torch.randn(SIZE, 3)

    def train(rank: int) -> torch.Tensor:
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(weights + rank)
        wrapped = wrap(model)
        wrapped(rows[rank][None]).square().sum().backward()
        return model.weight.grad.clone()

    got = on_thread_ranks(train)

    for gradient in got:
        assert isinstance(gradient, torch.Tensor), gradient
        torch.testing.assert_close(gradient, got[0], rtol=0, atol=0)


def test_threads_that_hold_different_models_hear_the_same_of_it() -> None:
    def replicate(rank: int) -> None:
        paceline.replicate(nn.Linear(3, 2 + rank // 3))

    got = on_thread_ranks(replicate)

    assert [type(error) for error in got] == [RanksDisagree] * SIZE
    assert len({str(error) for error in got}) == 1
