"""Where a pool's bytes come from, and whether its table can be true."""

from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
import torch
from torch import Tensor

from .slots import Ints


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool's memory. On a CPU it comes from the system: pools come and go with runs, and malloc's
    heap would be left with holes of their size, one after another."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap(-1, prod(size) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def check_row(owner_K: Ints, position_K: Ints) -> None:
    """Every owner's committed positions in a row are consecutive, each held once."""
    pairs = np.stack([owner_K, position_K])
    assert np.unique(pairs, axis=1).shape[1] == pairs.shape[1], "a position is held twice"
    for owner in np.unique(owner_K):
        held = np.sort(position_K[owner_K == owner])
        assert held[-1] - held[0] + 1 == held.size, f"owner {owner} has a gap in its positions"
