"""Which device a rank gets, and which backend the world."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from paceline.launch import device as device_module
from paceline.launch.device import ON_CPU, ON_GPU, choose_backend, choose_device
from paceline.launch.place import Place


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that there are GPUs; the returned namespace says how many, and which one is current."""
    fake = SimpleNamespace(count=2, current=None, uuids=["a", "b"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: fake.count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: fake.count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(fake, "current", device))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=fake.uuids[device.index])
    )
    return fake


def place(rank=0, size=2, local_size=2):
    return Place(rank, size, rank, local_size, "127.0.0.1", 1234, True, "torchrun")


def test_without_gpus_it_is_the_cpu_and_gloo(gpus):
    gpus.count = 0

    chosen = choose_device(None, 0, None)

    assert chosen == torch.device("cpu")
    assert choose_backend(chosen, place(), HashStore()) == ON_CPU
    assert gpus.current is None


def test_each_local_rank_gets_its_gpu_and_makes_it_current(gpus):
    chosen = choose_device(None, 1, None)

    assert chosen == gpus.current == torch.device("cuda:1")
    assert choose_backend(chosen, place(), HashStore()) == ON_GPU


@pytest.mark.parametrize("asked", ["cuda:1", torch.device("cuda:1")])
def test_the_device_asked_for_is_taken(gpus, asked):
    assert choose_device(asked, 0, None) == gpus.current == torch.device("cuda:1")
    assert choose_device("cpu", 0, None) == torch.device("cpu")


def test_cuda_without_a_number_is_this_ranks_gpu(gpus):
    assert choose_device("cuda", 1, None) == torch.device("cuda:1")


def test_a_backend_for_the_cpu_alone_leaves_the_gpu_alone(gpus):
    assert choose_device(None, 0, "cpu:gloo") == torch.device("cpu")
    assert choose_device(None, 0, "gloo") == torch.device("cuda:0")
    assert gpus.current == torch.device("cuda:0")


def test_ranks_that_share_a_gpu_use_gloo(gpus):
    gpus.count = 1
    store = HashStore()
    store.set("gpu/1", f"{device_module.socket.gethostname()} a")

    chosen = choose_device(None, 1, None)

    assert chosen == torch.device("cuda:0")
    assert choose_backend(chosen, place(rank=0), store) == ON_CPU


def test_ranks_that_see_one_gpu_each_use_nccl(gpus):
    gpus.count = 1
    store = HashStore()
    store.set("gpu/1", f"{device_module.socket.gethostname()} another")

    assert choose_backend(torch.device("cuda:0"), place(rank=0), store) == ON_GPU
