"""Small pools whose slots hold marks or change places, and every copy out of a pool."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.support import Tiny, drive, graphs, outline_of
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.kv.pool import FREE, BlockManager, KVCache, Region

LAYERS, HEADS, DIM = 2, 3, 4


def pool(capacity: int = 8, rows: int = 1, block_size: int = 1) -> KVCache:
    return KVCache(LAYERS, HEADS, DIM, capacity, rows, block_size=block_size)


def mark_(kv: KVCache, slot: int, value: float) -> None:
    for layer in range(LAYERS):
        row = torch.full((HEADS, 1, DIM), value + layer / 8)
        kv.write_(layer, torch.tensor([slot]), row, -row)


def content(kv: KVCache, slot: int) -> float:
    """The value that a row was marked with, once it is the same everywhere."""
    row = kv.data[:, :, :, slot].clone()
    value = float(row[0, 0, 0, 0])
    for layer in range(LAYERS):
        assert (row[layer, 0] == value + layer / 8).all()
        assert (row[layer, 1] == -value - layer / 8).all()
    return value


def commit(kv: KVCache, owner: int, positions: list[int], row: int = 0) -> list[int]:
    slots = kv.append_([owner] * len(positions), positions, row)
    kv.commit_(slots, positions)
    return slots.tolist()


# Reads of a pool whose results are no copies of its rows: attention, and its matrix products.
ATTENTION = ("aten._scaled_dot_product", "aten.bmm", "aten.mm", "aten.baddbmm")
GATHER = "aten.index_select.default"


def pools_of(run: EngineCore) -> list[KVCache]:
    return [run.board[key] for key in ("kv", "kv_draft") if run.board[key] is not None]


class PoolWatch(TorchDispatchMode):
    """Every op that reads a pool and gives back memory of its own: name -> bytes given back. It
    knows nothing of the ledger, only the storages of tensors. by_pool: the same bytes, by the
    pool's place in `pools_of`."""

    def __init__(self, run: EngineCore) -> None:
        super().__init__()
        pools = enumerate(pools_of(run))
        self.storages = {p.data.untyped_storage().data_ptr(): i for i, p in pools}
        self.copied: Counter[str] = Counter()
        self.by_pool: Counter[int] = Counter()
        self.written: Counter[str] = Counter()
        self.attended = 0

    def _pool(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor) or value.is_mkldnn:
            return None
        return self.storages.get(value.untyped_storage().data_ptr())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {self._pool(leaf) for leaf in tree_leaves((args, kwargs))} - {None}
        if read:
            name = str(func)
            fresh = [v for v in tree_leaves(out) if isinstance(v, torch.Tensor)]
            size = sum(v.numel() * v.element_size() for v in fresh if self._pool(v) is None)
            if name.startswith(ATTENTION):
                self.attended += 1
            elif size:
                self.copied[name] += size
                self.by_pool.update({pool: size for pool in read if pool is not None})
            elif name.split(".")[1].endswith("_"):
                self.written[name] += 1
        return out


def watched(run: EngineCore, until: Callable[[EngineCore], bool] | None = None) -> PoolWatch:
    with PoolWatch(run) as watch:
        drive(run, check=False, until=until)
    return watch


def branching(tiny: Callable[..., Tiny]) -> Callable[..., Session]:
    """make(graph, share, budget, parts): sessions whose last branch waits for the first."""

    def make(
        graph: str, share: str = "outline", budget: int = 14, parts: int = 4, **more: Any
    ) -> Session:
        made = tiny("llama")
        outline = outline_of(parts, {parts: (1,)} if parts > 1 else None)
        book = made.book(share, more.pop("stop_ids", ()))
        return graphs.session(graph, made.models, book, outline=outline, budget=budget, **more)

    return make


def permute_(pool: KVCache, seed: int) -> None:
    """A random slot map for each row: contents, owners, positions and flags move together."""
    draw = np.random.default_rng(seed)
    firsts = range(0, pool.slots, pool.capacity)
    order = np.concatenate([first + draw.permutation(pool.capacity) for first in firsts])
    pool.data[:, :, :, : pool.slots] = pool.data[:, :, :, order]
    pool.owner, pool.position = pool.owner[order], pool.position[order]
    pool.committed, pool.home = pool.committed[order], pool.home[order]
    pool.blocks = BlockManager(pool.slots, pool.blocks.size)
    used = np.flatnonzero(pool.owner != FREE)
    pool.blocks.enter_(pool.owner[used], used)
    for root in np.unique(pool.home[pool.owner != FREE]).tolist() if pool.rows == 1 else ():
        slots = np.flatnonzero(pool.home == root)
        pool.regions[root] = Region(low=int(slots[0]), high=int(slots[-1]) + 1)
