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
    """The number of cached rows of a prefix of `ids` that can be moved, for each pool.

    A request that continues after them needs the same rows of the target and of every drafter,
    except for the last rows that a drafter does not have. Empty if nothing is cached.
    """
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
    """Bytes of these rows of each pool."""
    pairs = zip(cached_pools(branches), rows, strict=True)
    return sum(count * pool.slot_bytes for pool, count in pairs)


def take_out(
    branches: BranchStateManager, ids: Sequence[int], rows: Sequence[int], salt: str = ""
) -> list[Tensor]:
    """Copies of the first cached rows of `ids`, [layers, 2, kv_heads, R, head_dim] of each pool.

    Raises:
        LookupError: they are not cached any more.
    """
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
    """Cache rows that were taken out elsewhere; ids: exactly those of the target's rows.

    Args:
        parts: of each pool, as `take_out` returns them.

    Returns:
        False if there are too few free slots or the rows are cached already; then nothing changes.
    """
    cache = _cache(branches)
    ids_T = np.asarray(ids, np.int32)
    if movable_rows(branches, ids, salt) == tuple(rows):
        return False
    segment = cache.segments.add()
    start = cache.attach_(segment, ids_T, len(ids_T), salt, counted=False)
    free = _unclaimed(branches, cache) - (len(ids_T) - start)
    if free < 0:
        cache.detach_(segment)
        cache.segments.remove([segment])
        return False
    cache.evict_to_(free)
    pools = cached_pools(branches)
    for pool, count, part in zip(pools, rows, parts, strict=True):
        pool.put_in_(part[:, :, :, start:], np.arange(min(start, count), count), segment, CAUSE)
    cache.detach_(segment)
    return cache.insert_(segment, ids_T[start:], start, salt)


def _unclaimed(branches: BranchStateManager, cache: PrefixCache) -> int:
    """Slots that are neither in use nor reserved."""
    slots = cache.pools[0].slots
    if cache.pools[0] is not branches.kv:  # the cache has pools of its own
        return slots - cache.pinned
    running = branches.table.open.values()
    return slots - branches.admission.claimed(running, len(branches.active), ())


def _cache(branches: BranchStateManager) -> PrefixCache:
    if branches.prefixes is None:
        raise LookupError("this graph has no prefix cache")
    return branches.prefixes


def cached_pools(branches: BranchStateManager) -> list[KVCache]:
    return [pool for pool in _cache(branches).pools if isinstance(pool, KVCache)]
