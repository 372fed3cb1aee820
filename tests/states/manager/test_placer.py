"""Which rows a forward gets: prompts, forks behind a shared text, trees and newcomers together."""

from itertools import pairwise

import numpy as np
import pytest
from helpers.managers import (
    OddTokens,
    admit_,
    chain,
    commit_,
    fanned_out,
    fork_,
    manager,
    open_requests_,
    proposal,
    request,
    running,
    tree_rows_,
)

from specsot.ops.kv.pool import FREE
from specsot.states.request import Finish, Stage
from specsot.states.round import Batch

LAYOUTS = pytest.mark.parametrize("layout", ["bim", "batching", "paged"])


def spans(batch: Batch) -> list[tuple[int, int, list[int], bool]]:
    """(owner, position, tokens, whether a root token is drawn behind it)."""
    return [(s.owner, s.position, list(s.tokens), s.draws) for s in batch.spans]


def tokens_at(batch: Batch, rows: np.ndarray) -> list[int]:
    found: list[int] = batch.rows.tokens_BQ.view(-1)[rows.astype(np.int64)].tolist()
    return found


@LAYOUTS
def test_a_prompt_is_the_shared_prefix_and_the_first_branch_behind_it(layout: str) -> None:
    made, one = manager(layout), request(prefix=[5, 6, 7], tail=[8, 9])
    batch = open_requests_(made, one)
    (branch,) = one.branches
    assert (batch.ran, batch.newcomers) == ((), (branch,)) and one.stage is not Stage.WAITING
    assert batch.branches == (branch,)
    assert spans(batch) == [
        (one.prefix_owner, 0, [5, 6, 7], False),
        (branch.owner, 3, [8, 9], True),
    ]
    assert [span.request for span in batch.spans] == [one.prefix_owner] * 2
    assert batch.rows.tokens_BQ.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.rows.positions_BQ.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.rows.tips_R.tolist() == [4]
    assert batch.rows.owner_N.tolist() == [one.prefix_owner] * 3 + [branch.owner] * 2
    assert (branch.stage, branch.start, branch.length) == (Stage.RUNNING, 3, 3)
    assert (one.prefix_length, one.context) == (3, [5, 6, 7])
    assert made.table.segments.path(branch.owner) == [branch.owner, one.prefix_owner]
    assert not made.kv.committed.any(), "nothing is history before it was computed"


def test_two_requests_begin_in_one_forward_padded_on_the_left_in_rows_of_their_own() -> None:
    made = manager()
    batch = open_requests_(made, request("a", tail=[5, 6, 7]), request("b", tail=[8]))
    assert [branch.name for branch in batch.newcomers] == ["a/1", "b/1"]
    assert [*made.table.open.values()] == made.requests and not made.table.waiting
    assert batch.rows.tokens_BQ.tolist() == [[5, 6, 7, 8]]
    assert [m.rows.tolist() for m in batch.rows.sequences] == [[0, 1, 2], [3]]
    assert [m.homes for m in batch.rows.sequences] == [(r.prefix_owner,) for r in made.requests]
    made = manager("batching")
    batch = open_requests_(made, request("a", tail=[5, 6, 7]), request("b", tail=[8]))
    assert batch.rows.tokens_BQ.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.rows.slots_BQ[1].tolist() == [made.kv.scratch] * 2 + [made.kv.capacity]
    assert batch.placed.paddings == (0, 2)
    assert batch.rows.tips_R.tolist() == [2, 5]


def test_an_outline_is_written_by_a_root_branch_under_its_grammar() -> None:
    made = manager()
    one = request(prefix=[5], outline_budget=6, new_matcher=OddTokens)
    batch = open_requests_(made, one)
    assert one.stage is Stage.OUTLINE and one.root is not None and not one.branches
    assert batch.newcomers == (one.root,)
    assert (one.root.index, one.root.budget) == (-1, 6)
    assert batch.spans[-1].bound and batch.rows.bound_tips == (0,)


def test_a_given_outline_is_read_and_nothing_is_drawn_behind_it() -> None:
    made = manager()
    one = request(prefix=[5], tail=[6], outline_budget=6, given_outline=object(), given_ids=[7, 7])
    batch = open_requests_(made, one)
    assert spans(batch)[-1][2:] == ([6, 7, 7], False)
    assert batch.rows.tips_R.tolist() == []


def test_a_given_outline_that_nobody_shares_is_not_read_at_all() -> None:
    made = manager(share_outline=False)
    one = request(prefix=[5], outline_budget=6, given_outline=object(), given_ids=[7, 7])
    batch = open_requests_(made, one)
    assert one.root is not None and one.root.finish is Finish.STOP
    assert batch.newcomers == () and one.prefix_owner in made.table.open
    assert spans(batch) == [(one.prefix_owner, 0, [5], False)]


@LAYOUTS
def test_branches_start_behind_what_all_their_prompts_begin_with(layout: str) -> None:
    made, one = manager(layout), request(prefix=[5, 6], tail=[7], outline_budget=4)
    first, second = fanned_out(made, one, [30, 40], [[41], [42, 43]])
    batch = fork_(made)
    assert batch.newcomers == (first, second)
    assert spans(batch) == [
        (one.prefix_owner, 3, [30, 40], False),
        (first.owner, 5, [41], True),
        (second.owner, 5, [42, 43], True),
    ]
    assert one.prefix_length == 5 and one.context == [5, 6, 7, 30, 40]
    assert not len(one.common_prompt), "it is a part of the prefix now"
    prefix, *own = batch.placed.spans
    copies = 2 if layout == "batching" else 1
    assert prefix.slots_Cn.shape == (copies, 2), "every row of the pool has it"
    rows = [1, 1, 2] if layout == "batching" else [1] * 3
    assert [len(s.slots_Cn) for s in (*own, prefix)] == [1, 1, rows[-1]]
    assert [tokens_at(batch, s.rows) for s in (prefix, *own)] == [[30, 40], [41], [42, 43]]
    for flat in prefix.flat_Cn:
        assert tokens_at(batch, flat) == [30, 40]
    assert made.kv.ledger.bytes["fork"] == (layout == "batching") * 3 * made.kv.slot_bytes


@LAYOUTS
def test_trees_and_newcomers_share_a_forward(layout: str) -> None:
    made = manager(layout, "ngram")
    old = running(made, request("a", tail=[5, 6]), request("b", tail=[5]))
    made.lifecycle.submit(request("c", tail=[8, 9, 9]))
    batch = admit_(made, proposal(chain(50, 51), [(60, -1), (61, -1)]))
    (new,) = batch.newcomers
    assert batch.ran == tuple(old) and new.request.prefix_owner in made.table.open
    assert batch.branches == (*old, new)
    assert [tokens_at(batch, rows) for rows in batch.rows.node_rows_ST] == [
        [20, 50, 51],
        [21, 60, 61],
    ]
    assert batch.rows.of_trees(batch.rows.positions_BQ).tolist() == [[2, 3, 4], [1, 2, 2]]
    assert tokens_at(batch, batch.placed.spans[0].rows) == [8, 9, 9]
    for branch, slots in zip(old, batch.rows.node_slots_ST, strict=True):
        assert (made.kv.owner[slots] == branch.owner).all() and not made.kv.committed[slots].any()
    rows = batch.rows.node_slots_ST[:, 0] // made.kv.capacity
    assert rows.tolist() == ([0, 1] if layout == "batching" else [0, 0])
    assert batch.rows.tokens_BQ.shape == ((1, 9) if layout == "bim" else (3, 3))


def test_a_forward_has_trees_or_prompts_as_its_op_says() -> None:
    made = manager(drafter="ngram")
    running(made, request("a"))
    made.lifecycle.submit(request("b"))
    batch = tree_rows_(made, proposal(chain(50)))
    assert [branch.name for branch in batch.ran] == ["a/1"]
    assert (batch.newcomers, batch.spans) == ((), ())
    batch = open_requests_(made)
    assert batch.ran == () and [branch.name for branch in batch.branches] == ["b/1"]


def test_a_budget_is_cut_to_what_the_model_can_hold() -> None:
    made, one = manager(max_positions=12), request(prefix=[5] * 4, tail=[6] * 3, budget=10)
    (branch,) = open_requests_(made, one).newcomers
    assert (branch.budget, branch.note) == (5, "cut to the model's 12")


def test_a_forward_that_nobody_starts_in_has_no_rows() -> None:
    made = manager()
    batch = open_requests_(made)
    assert batch.branches == () and batch.rows.tokens_BQ.numel() == 0
    assert (made.kv.owner == FREE).all()
    running(made, request())
    assert open_requests_(made).rows.tokens_BQ.numel() == 0, "nothing is committed twice"


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
    branches = fanned_out(made, one, [], [[40 + n] for n in range(BRANCHES)])
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
