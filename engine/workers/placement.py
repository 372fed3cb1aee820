"""Placement of requests and branches on workers, as functions of host integers. Work is counted in
tokens to be written. No function looks at all workers: heaps hold those with the least work, and an
index those that have the rows of a prompt's beginning."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ...states.request import Branch

BLOCK = 64  # tokens of a prompt that are looked up as one
TOKENS_READ_PER_WRITTEN = 16  # in the same time
MAX_HOLDERS = 4  # workers that are remembered for a beginning: the latest
MAX_BEGINNINGS = 1 << 16
Worker = TypeVar("Worker")


def prefix_keys(ids: Sequence[int], block: int = BLOCK) -> list[int]:
    """A key for each beginning of whole blocks, the shortest first: equal for equal ids."""
    blocks = (tuple(ids[end - block : end]) for end in range(block, len(ids) + 1, block))
    return list(accumulate(blocks, lambda key, ids: hash((key, ids)), initial=0))[1:]


class Loads:
    """Tokens that each worker will write, as a heap with outdated entries. tokens: by worker."""

    def __init__(self, workers: int) -> None:
        self.tokens = [0] * workers
        self._heap = [(0, worker) for worker in range(workers)]

    def add_(self, worker: int, tokens: int) -> None:
        """Add tokens to a worker's work, or subtract them."""
        self.tokens[worker] += tokens
        heappush(self._heap, (self.tokens[worker], worker))
        if len(self._heap) > 4 * len(self.tokens) + 64:
            self._heap = [(tokens, worker) for worker, tokens in enumerate(self.tokens)]
            heapify(self._heap)

    def least(self, count: int) -> list[int]:
        """The `count` workers with the least work, in this order; fewer if there are fewer."""
        loads = dict[int, int]()
        while self._heap and len(loads) < count:
            tokens, worker = heappop(self._heap)
            if self.tokens[worker] == tokens:
                loads[worker] = tokens
        for worker, tokens in loads.items():
            heappush(self._heap, (tokens, worker))
        return list(loads)


class Holders(NamedTuple):
    """Workers that have the rows of a prompt's first `tokens` tokens, the latest first."""

    tokens: int
    workers: tuple[Any, ...]


@dataclass(eq=False)
class PrefixIndex:
    """Which workers have read which beginnings last; the least recently used are forgotten."""

    block: int = BLOCK
    size: int = MAX_BEGINNINGS
    _workers: OrderedDict[int, tuple[Any, ...]] = field(default_factory=OrderedDict)

    def note_(self, keys: Sequence[int], worker: Any) -> None:
        """A worker reads a prompt of these `prefix_keys`."""
        for key in keys:
            others = (other for other in self._workers.pop(key, ()) if other != worker)
            self._workers[key] = (worker, *others)[:MAX_HOLDERS]
        while len(self._workers) > self.size:
            self._workers.popitem(last=False)

    def find(self, keys: Sequence[int]) -> Holders:
        """The holders of the longest known beginning of a prompt."""
        # A worker with a beginning has, or had, all shorter ones.
        count = bisect_left(keys, True, key=lambda key: key not in self._workers)
        return Holders(count * self.block, self._workers[keys[count - 1]] if count else ())


def route(prompt: int, holders: Holders, loads: Loads) -> int:
    """The worker that reads `prompt` tokens first: one with the beginning, or the least loaded."""
    unread = dict.fromkeys(loads.least(1), prompt)
    unread |= dict.fromkeys(holders.workers, max(prompt - holders.tokens, 1))
    ratio = TOKENS_READ_PER_WRITTEN
    return min(unread, key=lambda worker: (loads.tokens[worker] * ratio + unread[worker], worker))


def candidates(holders: Iterable[int], count: int, fee: int, loads: Loads) -> dict[int, int]:
    """Tokens that each worker would write before it could start a branch, by number: holders of its
    prefix, and `count` others, which receive the prefix first, at a cost of `fee` tokens."""
    waits = {worker: loads.tokens[worker] + fee for worker in loads.least(count)}
    waits |= {worker: loads.tokens[worker] for worker in holders}
    return dict(sorted(waits.items()))


def place_branches(
    lengths: Sequence[int],
    waits: Mapping[Worker, int],
    capacity: Mapping[Worker, int] | None = None,
) -> list[Worker | None]:
    """A worker for each branch: the longest first, each to the worker that is free first, the first
    one of equals; None where all are full. lengths: expected tokens of each branch. waits: see
    `candidates`. capacity: branches that each worker can take; None for any number."""
    workers = [*waits]
    free = [len(lengths) if capacity is None else capacity[worker] for worker in workers]
    heap = [(waits[one], place) for place, one in enumerate(workers) if free[place] > 0]
    heapify(heap)
    placed: list[Worker | None] = [None] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if heap:
            tokens, place = heappop(heap)
            placed[index] = workers[place]
            free[place] -= 1
            if free[place]:
                heappush(heap, (tokens + lengths[index], place))
    return placed


def expected_length(branch: Branch) -> int:
    """Tokens that a branch is expected to write still: as the outline says, else its budget."""
    whole = branch.point.length if branch.point is not None else branch.budget
    return max(min(whole, branch.budget) - len(branch.tokens), 1)


def assign_branches(
    branches: Sequence[Branch],
    loads: Mapping[Worker, int],
    capacity: Mapping[Worker, int],
    holders: Collection[Worker],
) -> list[tuple[Branch, Worker]]:
    """Branches with their workers, as far as these have capacity; holders of the prefix first."""
    waits = dict(sorted(loads.items(), key=lambda item: item[0] not in holders))
    workers = place_branches([expected_length(branch) for branch in branches], waits, capacity)
    pairs = zip(branches, workers, strict=True)
    return [(branch, worker) for branch, worker in pairs if worker is not None]
