"""Memory for flat buffers on a CPU: pages that nobody holds on to, and that need not be faulted in anew.

A buffer that is allocated for a step and freed by ``zero_grad()`` goes back to the kernel, and the next
step pays for every page of it again, which costs more than copying the gradients. So the pages of a freed
buffer are kept, but those of a large one are declared free (``MADV_FREE``): the kernel takes them when
anybody needs memory, and else they are used again.
"""

import contextlib
import mmap
import weakref

import torch

WORTHWHILE_NBYTES = 64 * 1024  # below, the allocator's own free lists do the same

HUGE_NBYTES = 4 * 1024 * 1024  # below, declaring pages free costs more than they are worth: they are kept

HUGE_PAGE_NBYTES = 2 * 1024 * 1024

SPARE = 2  # a thread that moves data may hold a buffer for a moment longer, when the next step needs one

_CAN_DECLARE_FREE = hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MAP_PRIVATE")


class _Lease(weakref.ref[memoryview]):
    """A weak eye on what a tensor holds, and the pages below it."""

    __slots__ = ("block",)
    block: mmap.mmap


class Pages:
    """The memory of one flat buffer, step after step."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._leases: dict[int, _Lease] = {}  # a tensor of the last step may still be there

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor with arbitrary contents; its memory comes back here when the tensor dies."""
        nbytes = numel * dtype.itemsize
        if nbytes < WORTHWHILE_NBYTES or not _CAN_DECLARE_FREE:
            return torch.empty(numel, dtype=dtype, device="cpu")
        try:
            block = self._idle.pop()
        except IndexError:
            if nbytes >= HUGE_NBYTES:
                nbytes += -nbytes % HUGE_PAGE_NBYTES  # else a huge page at either end is split, or never made
            block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if nbytes >= HUGE_NBYTES:
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    block.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to look after
        view = memoryview(block)
        lease = _Lease(view, self._take_back)
        lease.block = block
        self._leases[id(lease)] = lease
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def _take_back(self, lease: "_Lease") -> None:
        """Declare the pages free. Called when the last tensor on them has died, by the thread that let go."""
        block = self._leases.pop(id(lease)).block
        if len(self._idle) >= SPARE:
            return
        if len(block) >= HUGE_NBYTES:
            block.madvise(mmap.MADV_FREE)
        self._idle.append(block)
