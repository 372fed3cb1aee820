"""Room for branches that share a round's drafted tokens: each has a root, all have the nodes."""

from collections.abc import Callable
from functools import partial

import pytest
from helpers.sharing import LAYOUTS, LONG, PARTS, session_of
from helpers.support import Graphs, Tiny, branches_of, requests_of, run_all, start, tokens_of

from specsot.states.admission import PROMPT_ESTIMATE, request_slots
from specsot.states.machine import Run
from specsot.states.request import Finish

Make = Callable[..., Tiny]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_that_is_exactly_full_runs_all_branches_at_once(
    layout: str, tiny: Make, graphs: Graphs
) -> None:
    """In one sequence: every branch's rows, a root for each, and the shared nodes once."""
    one = partial(session_of, "eagle3", layout, tiny("llama"), graphs, LONG, outline=PARTS)
    free = run_all(one(), ["hello"], check=False)
    (request,) = requests_of(free)
    own = [len(branch.prompt) + branch.budget for branch in request.branches]
    rows = max(own) + 1 if layout == "batching" else sum(own) + 3
    nodes = 36 if layout == "paged" else 12  # there each tree has room for all of them
    needed = request.prefix_length + rows + nodes
    assert needed > request_slots(request) + nodes + 1, "the request was meant to open"
    for less in (0, 1):
        run, most = start(one(sets=[f"layout.kv_slots={needed - less}"]), ["hello"]), 0
        while not run.finished:
            run.advance()
            most = max(most, len(run.board["branches"].active))
        if less and layout == "batching":  # nor would it fit alone
            assert {branch.finish for branch in branches_of(run)} == {Finish.REFUSED}
        else:
            assert tokens_of(run) == tokens_of(free)
            assert most == 3 - less


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("nodes", "most"), [(6, 4), (4, 6)])
def test_one_branch_needs_room_for_its_own_tree_or_the_whole_round(
    layout: str, nodes: int, most: int, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    book = made.book(stop_ids=())
    needed = len(book.plain("hello")) + 20 + min(nodes, most) + 1
    for capacity in (needed, needed - 1):
        sets = [
            f"layout.kind={layout}",
            f"layout.kv_slots={capacity}",
            f"drafter.num_draft_tokens={nodes}",
        ]
        sets += [
            f"drafter.rows_per_round={most}",
            "drafter.draft_depth=3",
            "layout.max_num_branches=1",
        ]
        session = graphs.session("eagle", made.models, book, budget=20, sets=sets)
        (branch,) = branches_of(run_all(session, ["hello"]))
        if capacity == needed:
            assert branch.finish is Finish.LENGTH
        else:
            assert branch.note == f"needs {needed} slots, the pool has {capacity}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whoever_starts_has_room_to_the_end(layout: str, tiny: Make, graphs: Graphs) -> None:
    """Pools of many sizes, with requests whose branches come and go."""
    one = partial(session_of, "eagle3", layout, tiny("llama"), graphs, LONG, outline=PARTS)
    one = partial(one, budget=8)
    wide, full = run_all(one(), ["hello"]), 0.0
    need = request_slots(requests_of(wide)[0]) + LONG.hoist + 13 + 90 - PROMPT_ESTIMATE
    for capacity in range(need, need + 220, 43):
        run: Run = run_all(one(sets=[f"layout.kv_slots={capacity}"]), ["hello", "another"])
        assert tokens_of(run)["0"] == tokens_of(wide)["0"]
        full = max(full, run.board["kv"].peak_length / run.board["kv"].slots)
    assert full > 0.75, "the pools were meant to be used up"
