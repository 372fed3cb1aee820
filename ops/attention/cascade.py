"""Cascade attention: what several branches see of the same segments is attended to once.

Segments that the same branches go on behind are a part of the pool. All rows below a part see it in
one group; what a row sees in its parts is put together by the log-sum-exps of the scores there.
Cf. "Cascade Inference" (FlashInfer) and Hydragen (Juravsky et al. 2024).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..kv.pool import KVCache
from ..kv.slots import Ints
from .stacks import Lineages, Member, Stack, reads, stacks

LEAST = 2000  # slots that are read less often: so many make up for merging (docs/memory.md)


class Plan(NamedTuple):
    """Groups of a forward, and whether rows are in several of them."""

    stacks: list[Stack]
    merged: bool


def plan(
    kv: KVCache,
    members: Sequence[Member],
    lineages: Lineages,
    segment_N: Ints,
    backend: str,
    *,
    even: bool = False,
    alone: int = 0,
) -> Plan:
    """The groups of a forward.

    Args:
        segment_N: number of each row's segment in `lineages`.
        backend: as for `stacks`; `cascade`, wherever anything is shared; `auto` chooses between
            that and `grouped`.
        even, alone: as for `stacks`; then nothing is split.
    """
    members = [one for one in members if len(one.rows)]
    least = 1 if backend == "cascade" else 2  # one sequence reads everything once
    can = backend in ("auto", "cascade") and kv.rows == 1 and not (even or alone)
    can = can and len(members) >= least
    levels = shared_parts(members, lineages, segment_N) if can else []
    if len(levels) > 1 and (backend == "cascade" or _is_worth_it(kv, members, levels)):
        return Plan([stack for level in levels for stack in stacks(kv, level, "grouped")], True)
    return Plan(stacks(kv, members, backend, even, alone), False)


def _is_worth_it(
    kv: KVCache, members: Sequence[Member], levels: Sequence[Sequence[Member]]
) -> bool:
    """Whether so much less is read that merging costs less."""
    whole = reads(kv, members)
    if sum(whole) - max(whole) < LEAST:  # together they read what one of them does, at least
        return False
    return sum(whole) - sum(sum(reads(kv, level)) for level in levels) >= LEAST


def shared_parts(
    members: Sequence[Member], lineages: Lineages, segment_N: Ints
) -> list[list[Member]]:
    """The rows below each part of the pool, in levels in which every row is once at most; the last
    one has what each segment sees alone, its own rows among it."""
    rows_M = np.sort(np.concatenate([member.rows for member in members]))
    segment_M = segment_N[rows_M]
    below: dict[int, list[int]] = {}
    for number in np.unique(segment_M).tolist():
        if number < len(lineages.ids_S):  # not padding
            for owner in lineages.path_SA[number].tolist():
                if owner >= 0:
                    below.setdefault(owner, []).append(number)
    parts: dict[tuple[int, ...], list[int]] = {}
    for owner, numbers in below.items():
        parts.setdefault(tuple(numbers), []).append(owner)
    levels: list[tuple[set[int], list[Member]]] = []
    own = list[Member]()
    for several in sorted(parts, key=len, reverse=True):
        rows = rows_M[np.isin(segment_M, several)]
        part = Member(rows, 0, (), tuple(parts[several]))
        if len(several) == 1:
            own.append(part)
            continue
        free = (level for level in levels if level[0].isdisjoint(several))
        taken, level = next(free, (set[int](), list[Member]()))
        if not level:
            levels.append((taken, level))
        taken.update(several)
        level.append(part)
    return [*(level for _, level in levels), own]
