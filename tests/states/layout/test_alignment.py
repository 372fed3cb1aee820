"""Left padding under ``batching``: the vectors of seed 000 section 5, by layout and manager."""

from helpers import managers

from specsot.ops.kv.pool import NO_SEGMENT
from specsot.ops.types import AlignmentState, ContinuousDecodingState, DraftRows
from specsot.states.text.tokens import PromptTokens

SLOTS = 400


def test_rows_of_unequal_acceptance_are_left_padded() -> None:
    """Section 5.2: 3, 1 and 2 rows of three chains stay. The drafter's row j is for token j + 1:
    the accepted drafts, then the target's own token."""
    made = managers.manager("batching", "eagle3", capacity=SLOTS, most=3)
    branches = managers.running(
        made, *(managers.request(str(n), tail=range(n)) for n in (100, 98, 99)), first=7
    )
    assert [branch.length for branch in branches] == [100, 98, 99]
    made.drafter.intake_()
    offer = managers.proposal(*[managers.chain(30, 31)] * 3)
    batch = managers.tree_rows_(made, offer)
    rows = batch.rows
    assert rows.alignment == AlignmentState((0, 0, 0), (3, 3, 3), (0, 0, 0)), "equal trees"
    assert rows.positions_BQ.tolist() == [[n, n + 1, n + 2] for n in (100, 98, 99)]
    outcome = managers.accepted(batch, offer, [[1, 2], [], [1]], [60, 61, 62])
    summary = managers.commit_(made, batch, outcome=outcome)
    assert summary.committed == (3, 1, 2) and summary.accepted == (2, 0, 1)
    assert [branch.length for branch in made.active] == [103, 99, 101]
    unequal = made.drafter.intake_()
    assert isinstance(unequal, DraftRows)
    rows = unequal.rows
    is_padding_N = rows.owner_N == NO_SEGMENT
    assert (~is_padding_N).reshape(3, 3).astype(int).tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert rows.positions_BQ.tolist() == [[100, 101, 102], [0, 0, 98], [0, 99, 100]]
    assert unequal.position_S.tolist() == [103, 99, 101]
    assert rows.tokens_BQ.tolist() == [[30, 31, 60], [0, 0, 61], [0, 30, 62]]
    assert unequal.index_N.tolist() == [0, 1, 2, 5, 7, 8]
    assert unequal.features_NF is not None
    assert unequal.features_NF[:, 0].tolist() == [0, 1, 2, 3, 6, 7], "of the nodes that stay"
    assert rows.tips_R.tolist() == [2, 5, 8]
    scratch = 3 * SLOTS
    assert rows.slots_BQ.tolist() == [
        [100, 101, 102],
        [scratch, scratch, SLOTS + 98],
        [scratch, 2 * SLOTS + 99, 2 * SLOTS + 100],
    ]
    assert (rows.owner_N[~is_padding_N] >= 0).all()
    assert (rows.segment_N[is_padding_N] == len(rows.visibility.ids_S)).all(), "which sees nothing"
    assert len(set(rows.owner_N.tolist())) == 4


def test_a_newcomers_prompt_rides_beside_the_running_rows() -> None:
    """Section 5.3."""
    made = managers.manager("batching", "eagle3", capacity=SLOTS, most=3)
    one = managers.request("0", prefix=[1] * 50, tail=range(100))
    managers.running(made, one, first=7)
    for index, size in ((1, 100), (2, 200)):
        branch = made.table.new_branch(one, index, 10)
        branch.prompt = PromptTokens(tuple(range(size)))
        one.branches.append(branch)
        if index == 1:
            managers.commit_(made, managers.fork_(made), [8])
    assert [branch.length for branch in made.active] == [150, 150]
    made.drafter.intake_()
    offer = managers.proposal(managers.chain(30), managers.chain(30))
    batch = managers.admit_(made, offer)
    rows = batch.rows
    state = rows.alignment
    assert isinstance(state, ContinuousDecodingState)
    assert rows.tokens_BQ.shape == (3, 200)
    assert state.input_lengths == (2, 2, 200)
    assert state.is_prefill == (False, False, True)
    assert state.valid_lengths == (152, 152, 250)
    assert state.cache_length == 250
    is_valid_BQ = (rows.owner_N != NO_SEGMENT).reshape(3, 200)
    assert is_valid_BQ.sum(1).tolist() == [2, 2, 200]
    assert is_valid_BQ[:2, -2:].all() and not is_valid_BQ[:2, :-2].any()
    for old in (0, 1):
        assert rows.positions_BQ[old, -2:].tolist() == [150, 151]
        assert rows.tokens_BQ[old, -2:].tolist() == [7 + old, 30]
        assert (rows.slots_BQ[old, :-2] == 3 * SLOTS).all(), "padding writes to the scratch slot"
    assert rows.positions_BQ[2].tolist() == list(range(50, 250))
    assert rows.tokens_BQ[2].tolist() == list(range(200))
    first = 2 * SLOTS + 50
    assert rows.slots_BQ[2].tolist() == list(range(first, first + 200)), "after its prefix's copy"
    assert rows.nodes_ST.tolist() == [[198, 199], [398, 399]]
    assert rows.tips_R.tolist() == [599]
    managers.commit_(made, batch, [5], managers.accepted(batch, offer, [[1], [1]], [60, 61]))
    owner_BK = made.kv.owner[: 3 * SLOTS].reshape(3, SLOTS)
    assert (owner_BK >= 0).sum(1).tolist() == [152, 152, 250] == [b.length for b in made.active]
    assert [b.tokens for b in made.active] == [[7, 30, 60], [8, 30, 61], [5]]
    made.kv.check_integrity()
