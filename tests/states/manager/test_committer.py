"""What a forward brought is committed: slots, positions, tips and tokens, from made-up outcomes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.managers import (
    STOP,
    VOCABULARY,
    OddTokens,
    accepted,
    admit_,
    chain,
    commit_,
    manager,
    open_requests_,
    proposal,
    request,
    rows_of,
    running,
    tree_rows_,
)
from helpers.vanilla import cases

from specsot.ops.draft.proposals import share
from specsot.ops.kv.pool import FREE
from specsot.ops.types import Proposal
from specsot.ops.verify.verify import GrammarRows
from specsot.states.commit import append_tokens
from specsot.states.manager import BranchStateManager
from specsot.states.request import Branch, Finish, Request, Stage
from specsot.states.round import Batch, RoundSummary

LAYOUTS = pytest.mark.parametrize("layout", ["bim", "batching", "paged"])


def verify_(
    made: BranchStateManager, offer: Proposal, paths: Sequence[Sequence[int]], bonus: Sequence[int]
) -> tuple[Batch, RoundSummary]:
    batch = tree_rows_(made, offer)
    return batch, commit_(made, batch, outcome=accepted(batch, offer, paths, bonus))


def row_of(made: BranchStateManager, branch: Branch) -> int:
    return made.layout.rows_of(branch.owner)[0]


@LAYOUTS
def test_a_newcomer_gets_its_root_token_which_has_no_row_yet(layout: str) -> None:
    made, one = manager(layout), request(prefix=[5, 6, 7], tail=[8, 9])
    summary = commit_(made, open_requests_(made, one), [40])
    (branch,) = made.active
    assert (branch.tokens, branch.num_cached_tokens, branch.pending) == ([40], 0, [40])
    assert (branch.start, branch.length) == (3, 5)
    assert rows_of(made, one.prefix_owner) == [0, 1, 2]
    assert rows_of(made, branch.owner) == [3, 4]
    assert (summary.branches, summary.committed, summary.accepted) == (("a/1",), (1,), (-1,))
    assert (summary.rows, summary.target_length, summary.drafted) == (5, 5, 0)


def test_a_first_token_that_ends_an_answer_is_no_part_of_it() -> None:
    made, one = manager(), request(prefix=[5])
    commit_(made, open_requests_(made, one), [STOP])
    (branch,) = one.branches
    assert (branch.tokens, branch.finish) == ([], Finish.STOP)
    assert one.finished and not made.active and made.kv.needed_length == 0
    assert len(made.table.segments) == 0 and not made.kv.regions


@LAYOUTS
def test_an_accepted_path_stays_where_it_lies_and_the_rest_is_given_back(layout: str) -> None:
    made = manager(layout, "ngram")
    first, second = running(made, request("a", tail=[5, 6]), request("b", tail=[7]))
    offer = proposal(chain(50, 51, 52), [(60, -1), (61, -1), (62, 1)])
    batch, summary = verify_(made, offer, [[1, 2], [2, 3]], [90, 91])
    assert first.tokens == [20, 50, 51, 90] and second.tokens == [21, 61, 62, 91]
    assert (first.length, first.num_cached_tokens, first.pending) == (5, 3, [90])
    assert (second.length, second.num_cached_tokens, second.pending) == (4, 3, [91])
    for branch, slots, nodes in zip(
        (first, second), batch.rows.node_slots_ST, ([0, 1, 2], [0, 2, 3]), strict=True
    ):
        prompt = branch.length - 3
        assert made.kv.slots_of(branch.owner, row_of(made, branch)).tolist()[prompt:] == (
            slots[nodes].tolist()
        )
        assert rows_of(made, branch.owner, row_of(made, branch)) == list(range(branch.length))
        assert (made.kv.owner[np.delete(slots, nodes)] == FREE).all()
    assert (summary.committed, summary.accepted) == ((3, 3), (2, 2))
    assert summary.drafted == 6 and (first.accepted, first.emitted) == ([2], [3])
    made.kv.check_integrity()


@pytest.mark.parametrize(
    ("path", "bonus", "budget", "answer"),
    [
        ([1, 2, 3], 90, 10, [20, 50]),
        ([1], STOP, 10, [20, 50]),
        ([], STOP, 10, [20]),
        ([1, 2, 3], 90, 2, [20, 50]),
    ],
)
def test_a_stop_token_or_the_budget_ends_a_branch_wherever_it_stands(
    path: list[int], bonus: int, budget: int, answer: list[int]
) -> None:
    made, one = manager(drafter="ngram"), request(tail=[5, 6], budget=budget)
    (branch,) = running(made, one)
    _, summary = verify_(made, proposal(chain(50, STOP, 52)), [path], [bonus])
    assert branch.tokens == answer
    assert branch.finish is (Finish.LENGTH if budget == 2 else Finish.STOP)
    assert branch.num_cached_tokens == len(answer), (
        "all of its answer has rows, the stop token has none"
    )
    assert branch.length == 2 + len(answer)
    assert (summary.committed, summary.accepted) == ((len(answer) - 1,), (len(path),))
    assert one.finished and made.kv.needed_length == 0


def test_a_root_branch_that_ended_keeps_its_rows_for_the_prefix() -> None:
    made, one = manager(drafter="ngram"), request(prefix=[5], tail=[6], outline_budget=9)
    (root,) = running(made, one)
    verify_(made, proposal(chain(50, STOP, 52)), [[1, 2, 3]], [90])
    assert root.ended and rows_of(made, root.owner) == [1, 2, 3]
    assert made.kv.current_length == 4


def best(*rows: Sequence[int]) -> GrammarRows:
    scores_GV = torch.zeros(len(rows), VOCABULARY)
    for row in range(len(rows)):
        scores_GV[row, 71 + 2 * row] = 1.0
    return GrammarRows(torch.tensor(list(rows)), scores_GV)


def test_under_a_grammar_the_best_legal_token_is_taken_at_every_node() -> None:
    made = manager(drafter="ngram")
    free = running(made, request("a"))[0]
    some = [request(key, outline_budget=9, new_matcher=OddTokens) for key in "bc"]
    commit_(made, open_requests_(made, *some), [0, 0], bound=best([4, 33], [6, 8]))
    first, second = (one.root for one in some)
    assert first is not None and second is not None
    assert (first.tokens, second.tokens) == ([33], [73])
    offer = proposal(chain(60, 61), chain(51, 53), chain(51, 53))
    batch = tree_rows_(made, offer)
    bound = best([4, 51], [6, 8], [1, 3], [2, 4], [1, 3], [1, 3])
    commit_(made, batch, outcome=accepted(batch, offer, [[1], [], []], [90] * 3, bound=bound))
    assert free.tokens == [20, 60, 90]
    assert first.tokens == [33, 51, 73], "the draft is legal, and behind it only the second row"
    assert second.tokens == [73, 77], "its own row, the fourth; that token was not drafted"
    for root in (first, second):
        assert root.matcher.tokens == root.tokens  # type: ignore[union-attr]


@LAYOUTS
def test_trees_and_newcomers_are_committed_together(layout: str) -> None:
    made = manager(layout, "ngram")
    (old,) = running(made, request("a", tail=[5]))
    made.lifecycle.submit(request("b", prefix=[6], tail=[7, 7]))
    offer = proposal(chain(50))
    batch = admit_(made, offer)
    summary = commit_(made, batch, [33], accepted(batch, offer, [[1]], [90]))
    new = made.active[1]
    assert made.active == [old, new]
    assert (old.tokens, new.tokens) == ([20, 50, 90], [33])
    assert rows_of(made, new.owner, row_of(made, new)) == [1, 2]
    assert (summary.branches, summary.committed) == (("a/1", "b/1"), (2, 1))
    assert summary.accepted == (1, -1)


def test_rows_that_the_device_gave_out_become_those_of_their_branch() -> None:
    made = manager(drafter="ngram")
    first, second = running(made, request("a", tail=[5]), request("b", tail=[6]))
    whole = proposal(chain(50), [(60, -1), (61, 0), (62, 1)])
    whole.scores_SN[:] = torch.tensor([[-5.0, -9.0, -9.0], [-1.0, -2.0, -3.0]])
    offer = share(whole, 3)
    batch = tree_rows_(made, offer)
    assert batch.rows.node_rows_ST.ndim == 1
    commit_(made, batch, outcome=accepted(batch, offer, [[], [1, 2]], [90, 91]))
    assert first.tokens == [20, 90] and second.tokens == [21, 60, 61, 91]
    assert rows_of(made, first.owner) == [0, 1] and rows_of(made, second.owner) == [0, 1, 2, 3]
    slots = made.kv.slots_of(second.owner)
    assert (made.kv.home[slots] == second.request.prefix_owner).all()
    assert made.kv.current_length == 6
    made.kv.check_integrity()


@LAYOUTS
def test_what_a_round_committed_waits_for_the_drafter(layout: str) -> None:
    made = manager(layout, "vanilla")
    (branch,) = running(made, request(prefix=[5, 6], tail=[7]))
    verify_(made, proposal(chain(50, 51)), [[1]], [90])
    queued = [(one.owner, one.position, [*one.tokens]) for one in made.drafter.inbox]
    prefix = branch.request.prefix_owner
    assert queued == [(prefix, 0, [5, 6]), (branch.owner, 2, [7, 20]), (branch.owner, 4, [50, 90])]
    assert made.kv_draft is not None
    tips = [(branch.owner, branch.length, branch.tokens[-1])]
    rows = made.layout.place_draft_(made.kv_draft, made.drafter.inbox, tips)
    assert made.kv_draft.slots_of(branch.owner).size == 4
    assert rows.start_S.tolist() == [branch.length] and rows.root_S.tolist() == [90]


@pytest.mark.parametrize("case", cases("stop"))
def test_a_round_is_cut_where_the_vectors_say(case: Any) -> None:
    """The vectors keep the stop token; an answer does not hold it."""
    request = Request("r", 0, "", [], [], frozenset(case["stop"]), 99, 99)
    branch = Branch(request, 0, 1, budget=case["remaining"], stage=Stage.RUNNING)
    count = append_tokens(branch, case["emitted"])
    kept = case["kept"][:-1] if case["reason"] == "stop" else case["kept"]
    assert (branch.tokens, count) == (kept, len(kept))
    assert (branch.ended) == case["finished"]
    assert (branch.finish.value if branch.finish else None) == case["reason"]
