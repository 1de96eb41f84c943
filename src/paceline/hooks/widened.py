"""In which dtype a hook computes."""

import torch


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return a floating dtype itself, but 32 bits for the small ones: sums and squares need them."""
    return torch.float32 if dtype.itemsize < 4 else dtype
