"""The KV pool under any order of operations, with one row and with several."""

import os
from collections.abc import Iterable
from unittest.mock import patch

import pytest
from helpers.pools import content, mark_, pool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specsot.ops.kv import pool as pool_file
from specsot.ops.kv.pool import UNKNOWN, PoolFullError

SPREAD = 4  # in the place of the pool's own, which is too large for such small ones


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations: every owner's history in every row keeps content, order and place;
    and what a forward reads of some roots holds all that they have, and little else."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = patch.object(pool_file, "SPREAD", SPREAD)
        self.spread.start()

    def teardown(self) -> None:
        self.spread.stop()

    @initialize(
        capacity=st.integers(6, 24), rows=st.sampled_from((1, 1, 2, 3)), size=st.integers(1, 5)
    )
    def begin(self, capacity: int, rows: int, size: int) -> None:
        self.kv = pool(capacity, rows, size)
        self.size = size if rows == 1 else capacity
        self.address = self.kv.data.data_ptr()
        self.held: dict[tuple[int, int], list[float]] = {}  # owner, row -> marks from position 0 on
        self.places: dict[tuple[int, int], list[int]] = {}  # and their slots
        self.root_of: dict[int, int] = {}
        self.next_owner, self.next_mark, self.copied = 0, 1.0, 0

    def free(self, row: int) -> int:
        return self.kv.capacity - sum(len(m) for (_, at), m in self.held.items() if at == row)

    def owners(self) -> list[int]:
        return sorted({owner for owner, _ in self.held})

    def hold(self, owner: int, row: int, marks: Iterable[float], slots: Iterable[int]) -> None:
        self.held.setdefault((owner, row), []).extend(marks)
        self.places.setdefault((owner, row), []).extend(int(slot) for slot in slots)

    @rule(data=st.data(), size=st.integers(0, 9))
    def open_root(self, data: st.DataObject, size: int) -> None:
        self.kv.open_(self.next_owner, size)
        self.root_of[self.next_owner] = self.next_owner
        self.hold(self.next_owner, data.draw(st.integers(0, self.kv.rows - 1)), (), ())
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.root_of[self.next_owner] = self.root_of[data.draw(st.sampled_from(self.owners()))]
        self.hold(self.next_owner, data.draw(st.integers(0, self.kv.rows - 1)), (), ())
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), size=st.integers(1, 6), shared=st.booleans())
    def commit_part_of_a_tree(self, data: st.DataObject, size: int, shared: bool) -> None:
        """Take `size` fresh slots, keep a path of them, give the others back. Shared ones are taken
        near anybody's, and turn out to be of this owner."""
        owner, row = data.draw(st.sampled_from(sorted(self.held)))
        near = self.root_of[data.draw(st.sampled_from(self.owners())) if shared else owner]
        whose = UNKNOWN if shared else owner
        if size > self.free(row):
            with pytest.raises(PoolFullError):
                self.kv.append_([whose] * size, [0] * size, row, near)
            return
        slots = self.kv.append_([whose] * size, [0] * size, row, near)
        kept = sorted(data.draw(st.sets(st.integers(0, size - 1))))
        first = len(self.held[owner, row])
        for node in kept:
            mark_(self.kv, int(slots[node]), self.next_mark)
            self.hold(owner, row, [self.next_mark], [slots[node]])
            self.next_mark += 1
        self.kv.release_([s for n, s in enumerate(slots) if n not in kept])
        positions = range(first, first + len(kept))
        if shared:
            self.kv.commit_(slots[kept], positions, owner, self.root_of[owner])
        else:
            self.kv.commit_(slots[kept], positions)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), into=st.integers(0, 2))
    def copy_into_another_row(self, data: st.DataObject, into: int) -> None:
        owner, row = data.draw(st.sampled_from(sorted(self.held)))
        marks = list(self.held[owner, row])
        taken = (owner, into) in self.held or into >= self.kv.rows
        if taken or len(marks) > self.free(into):
            return
        slots = self.kv.lowest_free(len(marks), into)
        self.kv.copy_rows_(owner, row, into, "fork")
        self.hold(owner, into, marks, slots)
        self.copied += len(marks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners()))
        own = [key for key in self.held if key[0] == owner]
        length = data.draw(st.integers(0, max(len(self.held[key]) for key in own)))
        self.kv.truncate_(owner, length)
        for key in own:
            del self.held[key][length:], self.places[key][length:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def relabel(self, data: st.DataObject) -> None:
        """A root stays what it is: others go on from it."""
        owner = data.draw(st.sampled_from(self.owners()))
        if self.root_of[owner] == owner:
            return
        self.kv.relabel_(owner, self.next_owner, self.root_of[owner])
        self.root_of[self.next_owner] = self.root_of[owner]
        for one, row in [key for key in self.held if key[0] == owner]:
            self.held[self.next_owner, row] = self.held.pop((one, row))
            self.places[self.next_owner, row] = self.places.pop((one, row))
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), everywhere=st.booleans())
    def retire(self, data: st.DataObject, everywhere: bool) -> None:
        owner, row = data.draw(st.sampled_from(sorted(self.held)))
        gone = [one for one in self.owners() if owner in (one, self.root_of[one])]
        self.kv.retire_(gone, None if everywhere else row)
        for key in [key for key in self.held if key[0] in gone and (everywhere or key[1] == row)]:
            del self.held[key], self.places[key]

    @invariant()
    def histories_are_whole(self) -> None:
        self.kv.check_integrity()
        for (owner, row), marks in self.held.items():
            slots = self.kv.slots_of(owner, row)
            assert [content(self.kv, int(s)) for s in slots] == marks
            assert slots.tolist() == self.places[owner, row], "what is committed stays where it is"
            assert (slots // self.kv.capacity == row).all()
        assert self.kv.current_length == sum(map(len, self.held.values()))
        assert self.kv.data.data_ptr() == self.address
        assert self.kv.ledger.bytes.total() == self.copied * self.kv.slot_bytes

    @invariant()
    def tables_name_the_blocks_of_a_segment(self) -> None:
        named: list[int] = []
        for owner in self.owners():
            slots = [s for (one, _), ss in self.places.items() if one == owner for s in ss]
            assert self.kv.blocks.table(owner) == sorted({slot // self.size for slot in slots})
            named += self.kv.blocks.table(owner)
        blocks = range(len(self.kv.blocks.references))
        assert self.kv.blocks.references.tolist() == [named.count(block) for block in blocks]
        assert self.kv.blocks.in_use == len(set(named)) <= self.kv.blocks.high_water

    @invariant()
    def extents_end_behind_the_last_slots(self) -> None:
        for row, extent in enumerate(self.kv.extents()):
            own = [s for (_, at), slots in self.places.items() if at == row for s in slots]
            assert extent == max((s % self.kv.capacity + 1 for s in own), default=0)

    @precondition(lambda self: self.held and self.kv.rows == 1)
    @rule(data=st.data())
    def read_some_roots(self, data: st.DataObject) -> None:
        open_roots = sorted({self.root_of[owner] for owner in self.owners()})
        roots = data.draw(st.lists(st.sampled_from(open_roots), min_size=1, unique=True))
        own = {s for (o, _), ss in self.places.items() if self.root_of[o] in roots for s in ss}
        keys = self.kv.keys_of(roots)
        if isinstance(keys, tuple):
            first, length = keys
            assert own <= set(range(first, first + length)) and first + length <= self.kv.capacity
            assert length <= 2 * len(own) + SPREAD
        else:
            assert keys.tolist() == sorted(own), "a list has nothing else"


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=int(os.environ.get("SPECSOT_TEST_EXAMPLES", "100")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
