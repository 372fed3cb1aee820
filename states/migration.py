"""Move the cached rows of a prefix between engines: out of one prefix cache, into another."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..ops.kv.pool import KVCache
from .manager import BranchStateManager
from .prefix_cache import PrefixCache

CAUSE = "regroup"  # in the ledger


def movable_rows(
    branches: BranchStateManager, ids: Sequence[int], salt: str = ""
) -> tuple[int, ...]:
    """The number of cached rows of a prefix that can be moved, for each pool: the same of all, but
    for the last rows, which a drafter may lack; () if nothing is cached."""
    cache = branches.prefixes
    if cache is None:
        return ()
    path, covered = cache.match(np.asarray(ids, np.int32), salt)
    drafted = [cache.covered(pool, path) for pool in cache.pools[1:]]
    rows = min([covered, *(count + cache.lookback for count in drafted)])
    if rows < cache.min_match:
        return ()
    return (rows, *(min(rows, count) for count in drafted))


def bytes_of(branches: BranchStateManager, rows: Sequence[int]) -> int:
    pairs = zip(cached_pools(branches), rows, strict=True)
    return sum(count * pool.slot_bytes for pool, count in pairs)


def take_out(
    branches: BranchStateManager, ids: Sequence[int], rows: Sequence[int], salt: str = ""
) -> list[Tensor]:
    """Copies of the first cached rows of `ids`, [layers, 2, kv_heads, R, head_dim] of each pool.
    Raises LookupError if they are not cached any more."""
    cache = _cache(branches)
    path, covered = cache.match(np.asarray(ids, np.int32), salt)
    parts = []
    for pool, count in zip(cached_pools(branches), rows, strict=True):
        slots = np.concatenate(
            [np.zeros(0, np.int32), *(pool.slots_of(segment) for segment in path)]
        )
        slots = slots[pool.position[slots] < count]
        if slots.size != count or covered < rows[0]:
            raise LookupError(f"{count} rows are needed, {slots.size} are cached")
        index = torch.from_numpy(slots.astype(np.int64)).to(pool.data.device)
        parts.append(pool.data.index_select(3, index))
    return parts


def put_in_(
    branches: BranchStateManager,
    ids: Sequence[int],
    rows: Sequence[int],
    parts: Sequence[Tensor],
    salt: str = "",
) -> bool:
    """Cache rows that `take_out` returned elsewhere; False if too few slots are free or they are
    cached already."""
    cache = _cache(branches)
    if movable_rows(branches, ids, salt) == tuple(rows):
        return False
    claimed = 0
    if cache.pools[0] is branches.kv:  # otherwise the cache has pools of its own
        running = branches.table.open.values()
        claimed = branches.admission.claimed(running, len(branches.active), ()) - cache.pinned

    def write_(segment: int, start: int) -> None:
        for pool, count, part in zip(cached_pools(branches), rows, parts, strict=True):
            positions = np.arange(min(start, count), count)
            pool.put_in_(part[:, :, :, start:], positions, segment, CAUSE)

    return cache.store_(np.asarray(ids, np.int32), salt, write_, claimed)


def _cache(branches: BranchStateManager) -> PrefixCache:
    if branches.prefixes is None:
        raise LookupError("this graph has no prefix cache")
    return branches.prefixes


def cached_pools(branches: BranchStateManager) -> list[KVCache]:
    return [pool for pool in _cache(branches).pools if isinstance(pool, KVCache)]
