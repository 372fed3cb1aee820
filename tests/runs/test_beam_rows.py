"""Beam search in the pool: few rows, nothing copied, and enough of them known before the start."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.beams import LAYOUTS, PROMPTS, Rig, check_beams, finish, rigs
from helpers.pool_watch import permute_, watched
from helpers.support import Graphs, branches_of, requests_of, tokens_of

from specsot.engine.record.recorder import Recorder
from specsot.engine.record.run_view import BRANCH, TREE, slot_codes
from specsot.states.request import Finish


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, graphs: Graphs) -> Callable[..., Rig]:
    return rigs(tmp_path_factory, graphs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_copied_and_slot_order_never_matters(layout: str, rig: Any) -> None:
    made: Rig = rig()
    plain = made.start(["a", "b", "c"], layout=layout, stops=1)
    watch = watched(plain)
    assert not watch.copied and watch.attended and not plain.board["kv"].ledger.bytes
    for every in (1, 4):
        run = made.start(["a", "b", "c"], layout=layout, stops=1)
        while not run.finished:
            run.advance()
            check_beams(run)
            if run.steps % every == 0 and run.state == "select_beams":
                permute_(run.board["kv"], run.steps)
        assert tokens_of(run) == tokens_of(plain)


def test_dead_beams_give_their_rows_back(rig: Any) -> None:
    """Far fewer rows than beams times tokens: they share what they have in common."""
    run = finish(rig().start(["c"], stops=0, budget=60, num_beams=5))
    rows = run.board["kv"].peak_length - PROMPTS["c"]
    assert 60 < rows < 5 * 60 / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_that_is_just_large_enough(layout: str, rig: Any) -> None:
    """What a search may need is known before it starts: every beam its own rows to the end."""
    made: Rig = rig()
    needed = PROMPTS["b"] + 3 * 10 + 1
    case = {"layout": layout, "num_beams": 3, "budget": 10, "stops": 0}
    run = finish(made.start(["b"], kv_slots=needed, **case))
    assert len(branches_of(run)[0].tokens) == 10
    run = finish(made.start(["b"], kv_slots=needed - 1, **case))
    (branch,) = branches_of(run)
    assert branch.finish is Finish.REFUSED
    assert branch.note == f"needs {needed} slots, the pool has {needed - 1}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_searches_that_do_not_fit_side_by_side_wait(layout: str, rig: Any) -> None:
    """What the first may still need is not given away; under batching it has a row of its own."""
    made: Rig = rig()
    case = {"layout": layout, "num_beams": 3, "budget": 10, "stops": 0}
    both = PROMPTS["b"] + PROMPTS["c"] + 2 * (3 * 10 + 1)
    for capacity, together in ((both, 2), (both - 1, 2 if layout == "batching" else 1)):
        run, most = made.start(["b", "c"], kv_slots=capacity, **case), set()
        while not run.finished:
            run.advance()
            most.add(len(run.board["branches"].active))
        assert max(most) == together
        assert [len(branch.tokens) for branch in branches_of(run)] == [10, 10]


def test_a_search_at_the_models_last_position(rig: Any) -> None:
    """The budget is cut to what the model takes, and the score is told all the same."""
    made: Rig = rig(max_positions=30)
    run = finish(made.start(["c"], stops=0))
    (branch,) = branches_of(run)
    assert len(branch.tokens) == 6 and branch.finish is Finish.LENGTH
    assert branch.note.startswith("cut to the model's 30; score -")
    case = {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False, "stops": 0}
    assert branch.tokens == made.expected("c", budget=6, **case)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_live_view_tells_what_is_shared(layout: str, rig: Any) -> None:
    """Rows that all beams share are the branch's, other ones a tree's; none is shown as free."""
    run, seen = rig().start(["a", "b"], layout=layout, stops=0), set()
    while not run.finished:
        run.advance()
        pool, requests = run.board["kv"], requests_of(run)
        used = slot_codes(pool, requests)[pool.owner >= 0].tolist()
        seen |= set(used)
        assert used.count(BRANCH) + used.count(TREE) == len(used)
    assert seen == {BRANCH, TREE}


def test_what_is_counted_is_what_was_answered(rig: Any) -> None:
    """Every token once, whatever the beams did; a round for every step behind the prefill."""
    run = rig().start(["a", "b", "c"], stops=2, length_penalty=2.0)
    recorder = Recorder(str)
    run.sink = recorder
    recorder.attach(run)
    while not run.finished:
        run.advance()
        recorder.snapshot_requested = True
    meter, branches = recorder.meter, branches_of(run)
    assert meter.tokens == sum(len(branch.tokens) for branch in branches)
    assert min(meter.lengths) == 0 and meter.accepted == meter.drafted == 0
    assert meter.forwards == run.board["host"].reads == meter.rounds + 1
    assert recorder.snapshot is not None and recorder.snapshot.state == "done"
    assert [view.tokens for view in recorder.snapshot.branches] == [len(b.tokens) for b in branches]
