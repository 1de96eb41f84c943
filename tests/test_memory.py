"""Flat buffers on a CPU: their pages are used again, also where the last buffer is let go of too late."""

import mmap
from typing import Any

import pytest
import torch

from paceline import memory
from paceline.memory import HUGE_NBYTES, HUGE_PAGE_NBYTES, SPARE, WORTHWHILE_NBYTES, Pages

NUMEL = WORTHWHILE_NBYTES // 4


class Mappings:
    """The blocks that were mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes: list[int] = []
        real = mmap.mmap

        def noting(file: int, nbytes: int, **kwargs: Any) -> mmap.mmap:
            self.nbytes.append(nbytes)
            return real(file, nbytes, **kwargs)

        monkeypatch.setattr(memory.mmap, "mmap", noting)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Mappings:
    return Mappings(monkeypatch)


def test_the_next_step_has_the_same_pages(mappings: Mappings) -> None:
    pages = Pages()
    for step in range(5):
        flat = pages.empty(NUMEL, torch.float32).fill_(step)
        view = flat[3:]
        del flat
        assert view[0] == step  # a gradient keeps the pages
        del view

    assert mappings.nbytes == [WORTHWHILE_NBYTES]


def test_a_buffer_that_is_let_go_of_too_late_costs_one_more_block_once(mappings: Mappings) -> None:
    pages = Pages()
    for step in range(6):
        flat = pages.empty(NUMEL, torch.float32).fill_(step)
        late = flat if step % 2 else None  # kept for a moment longer by a thread that moves data
        del flat
        flat = pages.empty(NUMEL, torch.float32).fill_(-step)
        assert late is None or bool((late == step).all())
        del late, flat

    assert len(mappings.nbytes) == SPARE


def test_no_more_blocks_are_kept_than_that(mappings: Mappings) -> None:
    pages = Pages()
    many = [pages.empty(NUMEL, torch.float32) for _ in range(5)]
    del many
    mappings.nbytes.clear()

    many = [pages.empty(NUMEL, torch.float32) for _ in range(5)]

    assert len(mappings.nbytes) == 5 - SPARE
    assert len({flat.data_ptr() for flat in many}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_large_buffer_lies_in_whole_huge_pages(mappings: Mappings, dtype: torch.dtype) -> None:
    numel = HUGE_NBYTES // dtype.itemsize + 5
    flat = Pages().empty(numel, dtype)

    assert flat.numel() == numel
    assert mappings.nbytes == [HUGE_NBYTES + HUGE_PAGE_NBYTES]


def test_a_small_buffer_is_the_allocators(mappings: Mappings) -> None:
    assert Pages().empty(NUMEL - 1, torch.float32).numel() == NUMEL - 1
    assert mappings.nbytes == []
