"""The rows of a prefix on their way from one engine to another: nothing is computed again.

What travels are kept rows: those of the target, and of every drafter as far as it has them. They
become kept rows where they arrive, and whoever begins with their tokens goes on behind them.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from ...ops.kv.pool import KVCache
from ..cache.prefix_cache import PrefixCache
from .manager import BranchStateManager

CAUSE = "regroup"  # in the ledger


def kept_rows(branches: BranchStateManager, ids: Sequence[int], salt: str = "") -> tuple[int, ...]:
    """How many rows can travel that are kept of what `ids` begin with, of each pool.

    Whoever goes on behind them needs as many of the target as of every drafter, but for what a
    drafter leaves out at the end; nothing where nothing is kept.
    """
    cache = branches.prefixes
    if cache is None:
        return ()
    path, covered = cache.match(np.asarray(ids, np.int32), salt)
    drafted = [cache.covered(pool, path) for pool in cache.pools[1:]]
    rows = min([covered, *(count + cache.back for count in drafted)])
    if rows < cache.shortest:
        return ()
    return (rows, *(min(rows, count) for count in drafted))


def size_of(branches: BranchStateManager, rows: Sequence[int]) -> int:
    """Numbers that so many rows of each pool are: keys and values of all layers and heads."""
    return sum(_sizes(_pools(branches), rows))


def bytes_of(branches: BranchStateManager, rows: Sequence[int]) -> int:
    """The same in bytes."""
    both = zip(_pools(branches), rows, strict=True)
    return sum(count * pool.slot_bytes for pool, count in both)


def take_out(
    branches: BranchStateManager, ids: Sequence[int], rows: Sequence[int], salt: str = ""
) -> Tensor:
    """[N] copies of the first rows that are kept of `ids`, one pool after the other.

    Raises:
        LookupError: they are not kept any more.
    """
    cache = _cache(branches)
    path, covered = cache.match(np.asarray(ids, np.int32), salt)
    parts = []
    for pool, count in zip(_pools(branches), rows, strict=True):
        slots = np.concatenate([np.zeros(0, np.int32), *(pool.slots_of(one) for one in path)])
        slots = slots[pool.position[slots] < count]
        if slots.size != count or covered < rows[0]:
            raise LookupError(f"{count} rows are wanted, {slots.size} are kept")
        index = torch.from_numpy(slots.astype(np.int64)).to(pool.data.device)
        parts.append(pool.data.index_select(3, index).flatten())
    return torch.cat(parts)


def put_in_(
    branches: BranchStateManager,
    ids: Sequence[int],
    rows: Sequence[int],
    data_N: Tensor,
    salt: str = "",
) -> bool:
    """Keep rows that were taken out elsewhere; ids: exactly those of the target's rows.

    Returns:
        False where there was no room, or nothing new in them; then nothing has changed.
    """
    cache, ids_T = _cache(branches), np.asarray(ids, np.int32)
    if kept_rows(branches, ids, salt) == tuple(rows):
        return False
    segment = cache.segments.add()
    start = cache.hang_(segment, ids_T, len(ids_T), salt)
    left = _unclaimed(branches, cache) - (len(ids_T) - start)
    if left < 0:
        cache.release_(segment)
        cache.segments.remove([segment])
        return False
    cache.make_room_(left)
    pools = _pools(branches)
    parts = torch.split(data_N, _sizes(pools, rows))
    for pool, count, part in zip(pools, rows, parts, strict=True):
        own = part.view(_shape(pool, count))[:, :, :, start:]
        pool.put_in_(own, np.arange(min(start, count), count), segment, CAUSE)
    cache.release_(segment)
    return cache.keep_(segment, ids_T[start:], start, salt)


def _unclaimed(branches: BranchStateManager, cache: PrefixCache) -> int:
    """Slots that nobody holds or has reserved."""
    slots = cache.pools[0].slots
    if cache.pools[0] is not branches.kv:  # pools of its own
        return slots - cache.pinned
    running = branches.table.open.values()
    return slots - branches.admission.claimed(running, len(branches.active), ())


def _sizes(pools: Sequence[KVCache], rows: Sequence[int]) -> list[int]:
    return [prod(_shape(pool, count)) for pool, count in zip(pools, rows, strict=True)]


def _shape(pool: KVCache, count: int) -> tuple[int, int, int, int, int]:
    layers, two, heads, _, dim = pool.data.shape
    return layers, two, heads, count, dim


def _cache(branches: BranchStateManager) -> PrefixCache:
    if branches.prefixes is None:
        raise LookupError("this graph keeps no rows")
    return branches.prefixes


def _pools(branches: BranchStateManager) -> list[KVCache]:
    return [pool for pool in _cache(branches).pools if isinstance(pool, KVCache)]
