"""Where a pool's bytes come from."""

from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool's memory. On a CPU it comes from the system: pools come and go with runs, and malloc's
    heap would be left with holes of their size, one after another."""
    if device.type != "cpu" or not prod(size):
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap(-1, prod(size) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)
