"""The KV pool under any order of operations, with one row and with several."""

import numpy as np
import pytest
from helpers.pools import content, mark_, pool
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specsot.ops.kv.slots import PoolFullError


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations: every owner's history in every row keeps content and order."""

    @initialize(capacity=st.integers(6, 24), rows=st.integers(1, 3))
    def begin(self, capacity: int, rows: int) -> None:
        self.kv = pool(capacity, rows)
        self.address = self.kv.data.data_ptr()
        self.held: dict[tuple[int, int], list[float]] = {}  # owner, row -> marks from position 0 on
        self.next_owner, self.next_mark, self.moved = 0, 1.0, 0

    def free(self, row: int) -> int:
        return self.kv.capacity - sum(len(m) for (_, at), m in self.held.items() if at == row)

    def owners(self) -> list[int]:
        return sorted({owner for owner, _ in self.held})

    @rule(data=st.data())
    def open_owner(self, data: st.DataObject) -> None:
        self.held[self.next_owner, data.draw(st.integers(0, self.kv.rows - 1))] = []
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), size=st.integers(1, 6))
    def commit_part_of_a_tree(self, data: st.DataObject, size: int) -> None:
        """Take `size` fresh slots, keep a path of them, give the others back."""
        owner, row = data.draw(st.sampled_from(sorted(self.held)))
        if size > self.free(row):
            with pytest.raises(PoolFullError):
                self.kv.append_([owner] * size, [0] * size, row)
            return
        slots = self.kv.append_([owner] * size, [0] * size, row)
        kept = sorted(data.draw(st.sets(st.integers(0, size - 1))))
        marks = self.held[owner, row]
        for node in kept:
            mark_(self.kv, int(slots[node]), self.next_mark)
            marks.append(self.next_mark)
            self.next_mark += 1
        self.kv.release_([s for n, s in enumerate(slots) if n not in kept])
        self.kv.commit_(slots[kept], range(len(marks) - len(kept), len(marks)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), into=st.integers(0, 2))
    def copy_into_another_row(self, data: st.DataObject, into: int) -> None:
        owner, row = data.draw(st.sampled_from(sorted(self.held)))
        marks = self.held[owner, row]
        taken = (owner, into) in self.held or into >= self.kv.rows
        if taken or len(marks) > self.free(into):
            return
        slots = self.kv.lowest_free(len(marks), into)
        self.kv.copy_(self.kv.slots_of(owner, row), slots, "fork")
        self.held[owner, into] = list(marks)
        self.moved += len(marks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """In all rows that hold the owner."""
        owner = data.draw(st.sampled_from(self.owners()))
        own = [marks for (one, _), marks in self.held.items() if one == owner]
        length = data.draw(st.integers(0, max(map(len, own))))
        self.kv.truncate_(owner, length)
        for marks in own:
            del marks[length:]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def relabel(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners()))
        self.kv.relabel_(owner, self.next_owner)
        for one, row in [key for key in self.held if key[0] == owner]:
            self.held[self.next_owner, row] = self.held.pop((one, row))
        self.next_owner += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), everywhere=st.booleans())
    def retire(self, data: st.DataObject, everywhere: bool) -> None:
        owner, row = data.draw(st.sampled_from(sorted(self.held)))
        self.kv.retire_([owner], None if everywhere else row)
        for one, at in [key for key in self.held if key[0] == owner]:
            if everywhere or at == row:
                del self.held[one, at]

    @rule()
    def compact(self) -> None:
        self.moved += self.kv.compact_()
        assert self.kv.holes == 0
        assert self.kv.extent == max(self.kv.capacity - self.free(r) for r in range(self.kv.rows))

    @invariant()
    def histories_are_whole(self) -> None:
        self.kv.check_integrity()
        for (owner, row), marks in self.held.items():
            slots = self.kv.slots_of(owner, row)
            assert [content(self.kv, int(s)) for s in slots] == marks
            assert (np.asarray(slots) // self.kv.capacity == row).all()
        assert self.kv.current_length == sum(map(len, self.held.values()))
        assert self.kv.data.data_ptr() == self.address
        assert self.kv.ledger.bytes.total() == self.moved * self.kv.slot_bytes


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
