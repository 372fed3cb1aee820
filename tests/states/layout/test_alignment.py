"""Left padding under ``batching``: the vectors of seed 000 section 5, by layout and manager."""

from collections.abc import Sequence

import pytest
import torch
from helpers.managers import admit_, fork_, open_requests_, tree_rows_

from specsot.ops.forward import HostReader
from specsot.ops.kv.pool import NO_SEGMENT, KVCache
from specsot.ops.types import (
    AlignmentState,
    ContinuousDecodingState,
    DraftRows,
    Proposal,
)
from specsot.ops.verify.verify import accept, root
from specsot.states.drafters.eagle import Eagle3Settings
from specsot.states.graph.graph import BatchingBlock
from specsot.states.manager import BranchStateManager
from specsot.states.request import Request
from specsot.states.request_table import RunLimits
from specsot.states.round import Batch, RoundSummary
from specsot.states.text.tokens import PromptTokens

VOCAB = 99

# -- a manager whose forwards are written by hand -----------------------------------------------


def manager(rows: int) -> BranchStateManager:
    """Pools of one layer and no models: what a forward says is said by the test."""
    kv, kv_draft = (KVCache(1, 1, 2, 400, rows) for _ in range(2))
    shape = BatchingBlock(kind="batching", max_num_branches=rows)
    limits = RunLimits(shape, Eagle3Settings(kind="eagle3", num_draft_tokens=2), True, 1000, 50)
    return BranchStateManager(kv, kv_draft, limits, lambda branch: branch.prompt)


def submit(book: BranchStateManager, key: str, prefix: int, tail: int) -> Request:
    ids = PromptTokens((1,) * prefix), PromptTokens(tuple(range(tail)))
    request = Request(key, 0, "", *ids, frozenset(), 20, 0)
    book.lifecycle.submit(request)
    return request


def chains(trees: int, nodes: int) -> Proposal:
    steps_SN = torch.arange(nodes).expand(trees, -1)
    valid_SN = torch.ones(trees, nodes, dtype=torch.bool)
    return Proposal(
        steps_SN + 30, steps_SN - 1, steps_SN + 1, valid_SN, torch.zeros(trees, nodes), nodes
    )


def commit(
    book: BranchStateManager,
    batch: Batch,
    tips: list[int],
    proposal: Proposal | None = None,
    kept: Sequence[int] = (),
) -> RoundSummary:
    """A forward in which the target confirms so that `kept` rows of each chain stay.

    Its own token behind tree i is 60 + i, those behind prompts are `tips`. Each row's feature says
    which row it is.
    """
    rows = batch.rows
    said = [
        30 + node if node + 1 < count else 60 + tree
        for tree, count in enumerate(kept)
        for node in range(rows.nodes_ST.shape[1])
    ]
    logits = torch.nn.functional.one_hot(torch.tensor([*said, *tips]), VOCAB).float()
    features = torch.arange(rows.tokens_BQ.numel())[:, None].float()
    accepted = None if proposal is None else accept(rows, logits, proposal)
    summary = book.committer.commit_(
        batch, host=HostReader(), features_QF=features, accepted=accepted, roots=root(rows, logits)
    )
    return summary


def opened(lengths: list[int], prefix: int = 0) -> BranchStateManager:
    book = manager(3)
    for i, length in enumerate(lengths):
        submit(book, str(i), prefix, length - prefix)
    commit(book, open_requests_(book), [7 + i for i in range(len(lengths))])
    assert [b.length for b in book.active] == lengths
    book.drafter.intake_()
    return book


# -- seed 000 section 5.2 -----------------------------------------------------------------------


@pytest.fixture
def unequal() -> DraftRows:
    book = opened([100, 98, 99])
    proposal = chains(3, 2)
    batch = tree_rows_(book, proposal)
    rows = batch.rows
    assert rows.alignment == AlignmentState((0, 0, 0), (3, 3, 3), (0, 0, 0)), "equal trees"
    assert rows.positions_BQ.tolist() == [[n, n + 1, n + 2] for n in (100, 98, 99)]
    summary = commit(book, batch, [], proposal, (3, 1, 2))
    assert summary.committed == (3, 1, 2) and summary.accepted == (2, 0, 1)
    assert [b.length for b in book.active] == [103, 99, 101]
    return book.drafter.intake_()


def test_rows_of_unequal_acceptance_are_left_padded(unequal: DraftRows) -> None:
    rows = unequal.rows
    is_valid_BQ = torch.from_numpy(rows.owner_N != NO_SEGMENT).view(3, 3)
    assert is_valid_BQ.int().tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert rows.positions_BQ.tolist() == [[100, 101, 102], [0, 0, 98], [0, 99, 100]]
    assert unequal.position_S.tolist() == [103, 99, 101]


def test_each_row_has_its_own_tokens_features_and_slots(unequal: DraftRows) -> None:
    """The drafter's row j is for token j + 1: the accepted drafts, then the target's own token."""
    rows = unequal.rows
    assert rows.tokens_BQ.tolist() == [[30, 31, 60], [0, 0, 61], [0, 30, 62]]
    assert unequal.index_N.tolist() == [0, 1, 2, 5, 7, 8]
    assert unequal.features_NF[:, 0].tolist() == [0, 1, 2, 3, 6, 7], "of the nodes that stay"
    assert rows.tips_R.tolist() == [2, 5, 8]
    scratch = 3 * 400
    assert rows.slots_BQ.tolist() == [
        [100, 101, 102],
        [scratch, scratch, 400 + 98],
        [scratch, 800 + 99, 800 + 100],
    ]
    padding_N = rows.owner_N == NO_SEGMENT
    assert (rows.owner_N[~padding_N] >= 0).all()
    assert (rows.segment_N[padding_N] == len(rows.visibility.ids_S)).all(), "which sees nothing"
    assert len(set(rows.owner_N.tolist())) == 4


# -- seed 000 section 5.3 -----------------------------------------------------------------------


@pytest.fixture
def joined() -> tuple[Batch, BranchStateManager]:
    book = manager(3)
    request = submit(book, "0", 50, 100)
    commit(book, open_requests_(book), [7])
    for index, size in ((1, 100), (2, 200)):
        branch = book.table.new_branch(request, index, 20)
        branch.prompt = PromptTokens(tuple(range(size)))
        request.branches.append(branch)
        if index == 1:
            commit(book, fork_(book), [8])
    assert [b.length for b in book.active] == [150, 150]
    book.drafter.intake_()
    return admit_(book, chains(2, 1)), book


def test_a_newcomers_prompt_rides_beside_the_running_rows(
    joined: tuple[Batch, BranchStateManager],
) -> None:
    rows = joined[0].rows
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


def test_each_row_keeps_its_own_positions(joined: tuple[Batch, BranchStateManager]) -> None:
    rows = joined[0].rows
    for old in (0, 1):
        assert rows.positions_BQ[old, -2:].tolist() == [150, 151]
        assert rows.tokens_BQ[old, -2:].tolist() == [7 + old, 30]
        assert (rows.slots_BQ[old, :-2] == 3 * 400).all(), "padding writes to the scratch slot"
    assert rows.positions_BQ[2].tolist() == list(range(50, 250))
    assert rows.tokens_BQ[2].tolist() == list(range(200))
    assert rows.slots_BQ[2].tolist() == list(range(850, 1050)), "behind its copy of the prefix"
    assert rows.nodes_ST.tolist() == [[198, 199], [398, 399]]
    assert rows.tips_R.tolist() == [599]


def test_the_valid_lengths_are_what_the_rows_hold_afterwards(
    joined: tuple[Batch, BranchStateManager],
) -> None:
    batch, book = joined
    commit(book, batch, [5], chains(2, 1), (2, 2))
    held = [int((book.kv.owner[r * 400 : r * 400 + 400] >= 0).sum()) for r in range(3)]
    assert held == [152, 152, 250] == [b.length for b in book.active]
    assert [b.tokens for b in book.active] == [[7, 30, 60], [8, 30, 61], [5]]
    book.kv.check_integrity()
