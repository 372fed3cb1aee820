"""A million random operations on blocks and radix tree, held to a plain list of who wrote what.

    pytest tests/full/test_random_operations.py -s

Requests are submitted, fork, grow, have rows rejected, finish, are cancelled, are preempted and
begin again; rows are published and evicted. `memory` is what a pool's bytes would be: for each slot
the hash of the whole text that its row stands behind. Every tenth operation somebody who runs is
looked at, every 2 000th everybody: every row of a text is there once, with its own content.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from helpers.support import SEED

from specsot.ops.kv.pool import KVCache
from specsot.states.prefix_cache import PrefixCache
from specsot.states.request_table import SegmentTree

OPERATIONS = int(os.environ.get("SPECSOT_TEST_OPERATIONS", 1_000_000))
SLOTS, MIN_MATCH = 1500, 16
STEM = tuple(range(100, 260))
WEIGHTS = {"submit": 12, "grow": 60, "finish": 8, "cancel": 3, "preempt": 3, "publish": 4}
WEIGHTS |= {"evict": 4, "clear": 2, "retire_branch": 4}


@dataclass
class Text:
    """Token ids, and for each of them what stands for all up to it."""

    ids: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def extend(self, ids: list[int]) -> None:
        for token in ids:
            before = self.hashes[-1] if self.hashes else 0
            self.ids.append(token)
            self.hashes.append(hash((before, token)) & 0x7FFFFFFF)

    def copy(self) -> "Text":
        return Text([*self.ids], [*self.hashes])


@dataclass
class Branch:
    owner: int
    start: int
    text: Text


@dataclass
class Request:
    prefix: int
    text: Text
    shared: int
    branches: list[Branch] = field(default_factory=list)


class Engine:
    """Requests over one pool; `held` is the plain model: for every segment its slots."""

    def __init__(self, draw: Random, size: int, apart: bool) -> None:
        self.draw, self.tree = draw, SegmentTree(separate_homes=apart)
        self.pool = KVCache(1, 1, 1, SLOTS, block_size=size)
        self.cache = PrefixCache([self.pool], self.tree, 0, MIN_MATCH)
        self.memory = np.zeros(SLOTS, np.int64)
        self.live: list[Request] = []
        self.finished: list[Text] = []
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        name = self.draw.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
        getattr(self, name)()
        self.done[name] += 1
        if self.live and self.draw.random() < 0.1:
            one = self.draw.choice(self.live)
            self.check(self.draw.choice(one.branches))

    def room(self, count: int) -> bool:
        left = SLOTS - self.pool.needed_length - count
        if left >= 0:
            self.cache.evict_to_(left)
        return left >= 0

    def write(self, owner: int, text: Text, first: int, rejected: int = 0) -> None:
        """Rows of a text from position `first` on, among others that are given back."""
        count = len(text.ids) - first
        slots = self.pool.append_([owner] * (count + rejected), 0, home=self.tree.home[owner])
        assert len(set(slots.tolist())) == len(slots), "a slot is handed out twice"
        kept = np.sort(np.array(self.draw.sample(range(len(slots)), count), np.int64))
        self.pool.commit_(slots[kept], range(first, len(text.ids)))
        self.pool.release_(np.delete(slots, kept))
        self.memory[slots[kept]] = text.hashes[first:]

    # -- operations -------------------------------------------------------------------------------

    def submit(self, text: Text | None = None) -> None:
        draw = self.draw
        if text is None:
            text = Text()
            if self.finished and draw.random() < 0.4:
                text = draw.choice(self.finished).copy()
            else:
                text.extend([*STEM[: draw.randrange(len(STEM))]])
            text.extend([draw.randrange(3) for _ in range(draw.randint(2, 30))])
        if len(text.ids) > 400 or len(self.live) > 8:
            return
        prefix = self.tree.add()
        ids = np.array(text.ids, np.int32)
        shared = self.cache.attach_(prefix, ids, len(ids))
        self.pool.open_(prefix, draw.choice([0, 64, 200]))
        if not self.room(len(ids) - shared + 8):
            self.cache.detach_(prefix)
            self.give_back(prefix)
            return
        self.write(prefix, text, shared)
        one = Request(prefix, text, shared)
        for _ in range(draw.choice([1, 1, 2, 5])):
            owner = self.tree.add(prefix)
            if self.tree.apart:
                self.pool.near_(owner, prefix)
            one.branches.append(Branch(owner, len(ids), text.copy()))
        self.live.append(one)

    def grow(self) -> None:
        if not self.live:
            return
        branch = self.draw.choice(self.draw.choice(self.live).branches)
        kept, rejected = self.draw.randint(0, 3), self.draw.randint(0, 6)
        if self.room(kept + rejected) and kept + rejected:
            first = len(branch.text.ids)
            branch.text.extend([self.draw.randrange(3) for _ in range(kept)])
            self.write(branch.owner, branch.text, first, rejected)

    def taken(self) -> Request | None:
        return self.live.pop(self.draw.randrange(len(self.live))) if self.live else None

    def finish(self) -> None:
        if (one := self.taken()) is not None:
            self.end(one)

    def end(self, one: Request) -> None:
        self.share(one, len(one.text.ids))
        for branch in one.branches:
            self.keep(one, branch)
        self.cache.detach_(one.prefix)
        self.give_back(one.prefix)

    def keep(self, one: Request, branch: Branch) -> None:
        self.tree.set_parent(branch.owner, self.tree.parent[one.prefix])
        tokens = np.array(branch.text.ids[branch.start :], np.int32)
        if not self.cache.insert_(branch.owner, tokens, branch.start):
            self.give_back(branch.owner)
        self.finished = [*self.finished[-50:], branch.text]

    def retire_branch(self) -> None:
        if not self.live or len((one := self.draw.choice(self.live)).branches) < 2:
            return
        branch = one.branches.pop()
        self.share(one, len(one.text.ids))
        self.keep(one, branch)

    def cancel(self) -> None:
        if (one := self.taken()) is not None:
            for branch in one.branches:
                self.give_back(branch.owner)
            self.cache.detach_(one.prefix)
            self.give_back(one.prefix)

    def preempt(self) -> None:
        if (one := self.taken()) is not None:
            self.end(one)
            again = one.branches[0].text.copy()
            again.extend([1])
            self.submit(again)

    def publish(self) -> None:
        if self.live:
            one = self.draw.choice(self.live)
            self.share(one, self.draw.randint(one.shared, len(one.text.ids)))

    def share(self, one: Request, end: int) -> None:
        if end > one.shared:
            tokens = np.array(one.text.ids[one.shared : end], np.int32)
            self.cache.publish_(one.prefix, [], tokens, one.shared)
            one.shared = end

    def evict(self) -> None:
        self.cache.evict_to_(self.draw.randrange(SLOTS))

    def clear(self) -> None:
        first = self.draw.randrange(SLOTS)
        self.cache.evict_slots_(first, first + 100)

    def give_back(self, owner: int) -> None:
        self.pool.retire_([owner])
        self.tree.remove([owner])

    # -- what holds -------------------------------------------------------------------------------

    def check(self, branch: Branch) -> None:
        path = self.tree.path(branch.owner)
        slots = np.concatenate([self.pool.slots_of(segment) for segment in path[::-1]])
        assert self.pool.position[slots].tolist() == list(range(len(branch.text.ids)))
        assert self.memory[slots].tolist() == branch.text.hashes, "a row of another text"

    def check_all(self) -> None:
        self.pool.check_integrity()
        self.cache.check_integrity()
        for branch in (branch for one in self.live for branch in one.branches):
            self.check(branch)
        live = {owner for r in self.live for owner in (r.prefix, *(b.owner for b in r.branches))}
        assert set(self.pool.blocks.tables) <= live | set(self.cache.nodes), "blocks of nobody"

    def close(self) -> None:
        while self.live:
            self.finish()
        self.cache.evict_to_(0)
        self.check_all()
        assert self.pool.current_length == self.pool.blocks.in_use == len(self.tree) == 0
        assert not self.pool.regions, "regions of nobody"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_random_operations(size: int, apart: bool) -> None:
    draw = Random(f"{SEED} {size} {apart}")
    engine = Engine(draw, size, apart)
    for number in range(OPERATIONS // 6 + 1):
        engine.step()
        if number % 2000 == 0:
            engine.check_all()
    engine.close()
    figures = engine.cache.figures
    assert figures.splits > 100 and figures.evicted > 100 and figures.reused > 10_000
    print(f"\nblocks of {size}: {engine.done.total()} operations, {dict(engine.done)}; {figures}")
