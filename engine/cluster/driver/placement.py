"""Where requests and branches go: host integers in, workers out, the same for everybody who asks.

Work is counted in tokens to be written; one to be read counts a sixteenth of that, as for the
policies of the scheduler. Nobody looks at all workers: heaps know those with the least to do, and
an index those who have the rows of a prompt's beginning.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

BLOCK = 64  # tokens of a prompt that are looked up as one
READ = 16  # tokens that are read in the time of one that is written
HOLDERS = 4  # workers that are remembered for a beginning: the latest
BEGINNINGS = 1 << 16  # that are remembered
NOBODY = -1


def prefix_keys(ids: Sequence[int], block: int = BLOCK) -> list[int]:
    """A key for each beginning of whole blocks, the shortest one first: equal for equal ids."""
    keys = list[int]()
    key = 0
    for end in range(block, len(ids) + 1, block):
        key = hash((key, tuple(ids[end - block : end])))
        keys.append(key)
    return keys


class Loads:
    """Tokens that workers have yet to write: a heap with entries that may have become wrong, which
    are dropped when they come up."""

    def __init__(self, workers: Iterable[int] = ()) -> None:
        self._tokens = dict.fromkeys(workers, 0)
        self._heap = [(0, worker) for worker in self._tokens]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, worker: int) -> bool:
        return worker in self._tokens

    def of(self, worker: int) -> int:
        """Tokens of one worker; KeyError if it is not attached."""
        return self._tokens[worker]

    def attach_(self, worker: int, tokens: int = 0) -> None:
        """A worker that is there from now on."""
        self._tokens[worker] = 0
        self.add_(worker, tokens)

    def detach_(self, worker: int) -> None:
        """A worker that gets nothing more; what it has, its caller drains or places again."""
        del self._tokens[worker]

    def add_(self, worker: int, tokens: int) -> None:
        """More to write, or less; nothing for a worker that is not attached any more."""
        if worker not in self._tokens:
            return
        self._tokens[worker] += tokens
        heappush(self._heap, (self._tokens[worker], worker))
        if len(self._heap) > 4 * len(self._tokens) + 64:
            self._heap = [(tokens, one) for one, tokens in self._tokens.items()]
            heapify(self._heap)

    def least(self, count: int) -> list[int]:
        """Those with the least to do, in this order; fewer if there are no more."""
        found = dict[int, int]()
        while self._heap and len(found) < count:
            tokens, worker = heappop(self._heap)
            if self._tokens.get(worker) == tokens:
                found[worker] = tokens
        for worker, tokens in found.items():
            heappush(self._heap, (tokens, worker))
        return list(found)


class Holders(NamedTuple):
    """Who has the rows of a prompt's first so many tokens, the latest first."""

    tokens: int
    workers: tuple[int, ...]


class PrefixIndex:
    """Which workers have read which beginnings last; what nobody asks for any more is forgotten."""

    def __init__(self, block: int = BLOCK, size: int = BEGINNINGS) -> None:
        self.block = block
        self.size = size
        self._workers = OrderedDict[int, tuple[int, ...]]()

    def note_(self, keys: Sequence[int], worker: int) -> None:
        """A worker reads a prompt of these `prefix_keys`."""
        for key in keys:
            others = (one for one in self._workers.pop(key, ()) if one != worker)
            self._workers[key] = (worker, *others)[:HOLDERS]
        while len(self._workers) > self.size:
            self._workers.popitem(last=False)

    def find(self, keys: Sequence[int]) -> Holders:
        """Whoever has the longest beginning of such a prompt."""
        low = 0
        high = len(keys)
        while low < high:  # who has a beginning has all that are shorter, or had them
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in self._workers else (low, middle)
        return Holders(low * self.block, self._workers[keys[low - 1]] if low else ())


def route(prompt: int, found: Holders, loads: Loads) -> int:
    """The worker for a prompt of so many tokens: whoever would have read it first, among those who
    have its beginning and the one with the least to do.

    Raises:
        ValueError: no worker is attached.
    """
    (least,) = loads.least(1) or (None,)
    if least is None:
        raise ValueError("no worker is attached")
    waits = {least: loads.of(least) * READ + prompt}
    for worker in found.workers:
        if worker in loads:
            waits[worker] = loads.of(worker) * READ + max(prompt - found.tokens, 1)
    return min(waits, key=lambda worker: (waits[worker], worker))


def candidates(
    holders: Iterable[int], count: int, fee: int, loads: Loads, most: int = 0
) -> dict[int, int]:
    """Tokens that each worker would write before it could begin with a branch: of all who have its
    prefix, and of as many more as there are branches, to whom it is brought first.

    Args:
        fee: what bringing it costs, in tokens. most: of such workers (0: as many as branches).
    """
    found = {worker: loads.of(worker) for worker in holders if worker in loads}
    for worker in loads.least(min(count, most) if most else count):
        found.setdefault(worker, loads.of(worker) + fee)
    return found


def place_branches(
    lengths: Sequence[int], waits: Mapping[int, int], room: Mapping[int, int] | None = None
) -> list[int]:
    """A worker for each branch: the longest first, each to whoever is free first, of equals to the
    one with the smallest number; NOBODY for those that nobody has room for.

    Args:
        lengths: tokens that are expected of each. waits: `candidates`. room: branches that each can
            take; None for any number.

    Raises:
        ValueError: nobody is there to take them.
    """
    if not waits:
        raise ValueError("no worker is attached")
    left = None if room is None else dict(room)
    heap = [(tokens, worker) for worker, tokens in waits.items() if left is None or left[worker]]
    heapify(heap)
    placed = [NOBODY] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        if not heap:
            break
        tokens, worker = heappop(heap)
        placed[index] = worker
        if left is not None:
            left[worker] -= 1
        if left is None or left[worker]:
            heappush(heap, (tokens + lengths[index], worker))
    return placed
