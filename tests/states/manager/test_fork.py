"""Eight branches behind 2 000 shared rows: where the pool is shared, a fork is eight entries."""

from itertools import pairwise

import pytest
from helpers.managers import commit_, fan_out_, fork_, manager, request, running

from specsot.states.request import Finish

SHARED, BRANCHES = 2_000, 8


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("drafter", ["none", "vanilla"])
@pytest.mark.parametrize("layout", ["bim", "paged"])
def test_eight_branches_begin_behind_shared_rows_and_nothing_moves(
    layout: str, drafter: str, block_size: int
) -> None:
    more = {"capacity": 4096, "most": BRANCHES, "max_positions": 5000, "block_size": block_size}
    made = manager(layout, drafter, **more)
    one = request(prefix=[5] * (SHARED - 1), tail=[7], outline_budget=4)
    (root,) = running(made, one, first=30)
    root.end(Finish.STOP)
    branches = fan_out_(made, one, [], [[40 + n] for n in range(BRANCHES)])
    address, shared = made.kv.data.data_ptr(), made.kv.slots_of(one.prefix_owner)
    assert len(shared) == SHARED
    made.kv.data.normal_()
    data, owner = made.kv.data.clone(), made.kv.owner.copy()
    tables = {key: dict(table) for key, table in made.kv.blocks.tables.items()}
    batch = fork_(made)
    assert batch.newcomers == tuple(branches)
    assert made.kv.data.equal(data), "placing rows writes none"
    assert made.kv.data.data_ptr() == address and not made.kv.ledger.bytes
    assert made.kv.blocks.tables.items() >= tables.items(), "the tables of others stay"
    assert (made.kv.owner[shared] == owner[shared]).all()
    assert made.kv.current_length == SHARED + BRANCHES, "a row for each branch's own prompt"
    commit_(made, batch, range(50, 50 + BRANCHES))
    made.kv.check_integrity()
    own = [made.kv.slots_of(branch.owner).tolist() for branch in branches]
    assert [len(slots) for slots in own] == [1] * BRANCHES
    if block_size > 1:
        firsts = [slots[0] for slots in own]
        assert [b - a for a, b in pairwise(firsts)] == [block_size] * (BRANCHES - 1)
        assert all(slot % block_size == 0 for slot in firsts), "each in a fresh block"
