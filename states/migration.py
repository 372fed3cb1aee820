"""A request that others have begun, or of which one engine does a part: the outline, branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.kv.pool import KVCache
from .manager import BranchStateManager
from .prefix_cache import PrefixCache
from .request import Branch, Request
from .text.prompt_tokens import PromptTokens


@dataclass(frozen=True, slots=True)
class HandedBranch:
    """A branch that goes on here: its number, its own prompt behind the prefix, what is written of
    it, and how much it may write in all."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What one of several engines does of a request.

    Attributes:
        branches: those that it goes on with, all of them behind `prefix`; none: it writes the
            outline and nothing else. outline: what is written of that.
        arrival: number of the request among all that were submitted anywhere; below 0: it arrives
            with this part of it.
    """

    prefix: tuple[int, ...] = ()
    branches: tuple[HandedBranch, ...] = ()
    outline: tuple[int, ...] = ()
    arrival: int = -1


def hand_over_(request: Request, handed: HandedOver) -> None:
    """Leave of a request that has not begun what is to be done here."""
    request.arrival = handed.arrival
    if not handed.branches:
        request.budget = 0
        if handed.outline:
            request.root = _first(request, -1, handed.outline, request.outline_budget)
        return
    request.prefix = PromptTokens(handed.prefix)
    request.tail = PromptTokens()
    request.opening = PromptTokens()
    request.given = None
    request.given_ids = []
    request.branches = [_branch(request, one) for one in handed.branches]


def go_on_(request: Request, begun: Mapping[int, Sequence[int]]) -> None:
    """Let a request that has not begun here go on behind what is written of it.

    Args:
        begun: tokens of branches by index, the outline's at -1; they may end anywhere.
    """
    request.begun = {index: tuple(tokens) for index, tokens in begun.items()}
    outlined = request.outline_budget > 0
    index, budget = (-1, request.outline_budget) if outlined else (0, request.budget)
    if tokens := request.begun.pop(index, ())[: budget - 1]:
        first = _first(request, index, tokens, budget)
        request.root, request.branches = (first, []) if outlined else (None, [first])


def _first(request: Request, index: int, tokens: tuple[int, ...], budget: int) -> Branch:
    """The branch that stands behind a request's own prompt, held to its grammar if there is one."""
    branch = _branch(request, HandedBranch(index, request.tail.ids, tokens, budget))
    if request.new_matcher is not None:
        branch.matcher = request.new_matcher()
        for token in tokens:
            branch.matcher.advance(token)
    return branch


def _branch(request: Request, handed: HandedBranch) -> Branch:
    """The last token that is written has no row yet, as of every branch that runs."""
    kept = max(len(handed.tokens) - 1, 0)
    branch = Branch(request, handed.index, -1, handed.budget, prompt=PromptTokens(handed.prompt))
    branch.tokens = list(handed.tokens)
    branch.kept = kept
    return branch


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


def bytes_of(branches: BranchStateManager, rows: Sequence[int]) -> int:
    """The same in bytes."""
    both = zip(travelling_pools(branches), rows, strict=True)
    return sum(count * pool.slot_bytes for pool, count in both)


def take_out(
    branches: BranchStateManager, ids: Sequence[int], rows: Sequence[int], salt: str = ""
) -> list[Tensor]:
    """Copies of the first rows that are kept of `ids`, [layers, 2, kv_heads, R, head_dim] of each
    pool.

    Raises:
        LookupError: they are not kept any more.
    """
    cache = _cache(branches)
    path, covered = cache.match(np.asarray(ids, np.int32), salt)
    parts = []
    for pool, count in zip(travelling_pools(branches), rows, strict=True):
        slots = np.concatenate([np.zeros(0, np.int32), *(pool.slots_of(one) for one in path)])
        slots = slots[pool.position[slots] < count]
        if slots.size != count or covered < rows[0]:
            raise LookupError(f"{count} rows are wanted, {slots.size} are kept")
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
    """Keep rows that were taken out elsewhere; ids: exactly those of the target's rows.

    Args:
        parts: of each pool, as `take_out` gives them.

    Returns:
        False where there was no room, or nothing new in them; then nothing has changed.
    """
    cache = _cache(branches)
    ids_T = np.asarray(ids, np.int32)
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
    pools = travelling_pools(branches)
    for pool, count, part in zip(pools, rows, parts, strict=True):
        pool.put_in_(part[:, :, :, start:], np.arange(min(start, count), count), segment, CAUSE)
    cache.release_(segment)
    return cache.keep_(segment, ids_T[start:], start, salt)


def _unclaimed(branches: BranchStateManager, cache: PrefixCache) -> int:
    """Slots that nobody holds or has reserved."""
    slots = cache.pools[0].slots
    if cache.pools[0] is not branches.kv:  # pools of its own
        return slots - cache.pinned
    running = branches.table.open.values()
    return slots - branches.admission.claimed(running, len(branches.active), ())


def _cache(branches: BranchStateManager) -> PrefixCache:
    if branches.prefixes is None:
        raise LookupError("this graph keeps no rows")
    return branches.prefixes


def travelling_pools(branches: BranchStateManager) -> list[KVCache]:
    return [pool for pool in _cache(branches).pools if isinstance(pool, KVCache)]
