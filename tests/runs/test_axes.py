"""Every run is the target's own, whatever it is set to, and layouts are one algorithm: the table of
`helpers.axes`."""

from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from helpers import axes
from helpers.faults import FAULTS, Fault
from helpers.support import Make, branches_of, contexts, drive, start

from specsot.engine.record.recorder import Recorder
from specsot.ops.draft import kinds
from specsot.states.request import Finish, Stage

ROUNDS = axes.Case(parts=5, max_num_branches=3, stops=(), budget=25)
DRAWN = replace(ROUNDS, temperature=1.0, dtype="float64", prefix_cache=False)
EAGLE = ("eagle3", 0)
TREES = (
    EAGLE,
    ("eagle2", 0),
    ("eagle1", 0),
    ("dflash", 0),
    ("dflash", 1),
    ("ngram", 1),
    ("recycle", 0),
    ("suffix", 1),
    ("medusa", 0),
    ("mtp", 0),
)
ROWS = (
    *(replace(ROUNDS, drafter=drafter) for drafter in axes.CHOICES),
    *(replace(ROUNDS, drafter=drafter, rows_per_round=9) for drafter in TREES),
    *(replace(DRAWN, drafter=drafter, accept="rejection") for drafter in axes.REJECTING),
    *(replace(ROUNDS, drafter=EAGLE, prompts=prompts) for prompts in ("one", "long")),
    *(replace(ROUNDS, drafter=EAGLE, chunk=9, work=work) for work in ("answer", "parts")),
    *(replace(ROUNDS, drafter=EAGLE, work=work) for work in ("written", "documents", "blended")),
    *(replace(ROUNDS, drafter=EAGLE, work=work) for work in ("combined", "folded", "attended")),
    replace(ROUNDS, drafter=EAGLE, max_num_branches=1, deps="chain", order="longest_first"),
    replace(ROUNDS, drafter=EAGLE, stops=(0, 2), max_num_branches=8, deps="fan"),
)


@pytest.fixture(autouse=True)
def equal_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds take equally long, so that drafters take turns alike in all runs of a case."""
    monkeypatch.setattr(kinds, "perf_counter", count().__next__)


@pytest.mark.parametrize("case", axes.draw_cases(), ids=str)
def test_every_run_has_the_property(case: axes.Case, tiny: Make) -> None:
    axes.check_case(case, tiny)


def test_a_request_that_ends_between_its_match_and_its_start(tiny: Make) -> None:
    """Its prefix was matched in the cache, but no pool row was allocated for it yet."""
    case = axes.Case(
        family="qwen2",
        dtype="float64",
        work="documents",
        deps="chain",
        drafter=("ngram", 1),
        layout="batching",
        attention="dense",
        order="shortest_first",
        max_num_branches=2,
        kv_slots=360,
        admission="optimistic",
        chunk=7,
        arrivals="busy",
        requests=1,
        budget=1,
        temperature=2.0,
        rules="top_p",
    )
    axes.check_case(case, tiny)


@pytest.mark.parametrize("work", ["folded", "attended"])
def test_rows_wait_for_the_drafter_in_rounds_without_drafts(work: str, tiny: Make) -> None:
    case = axes.Case(work=work, drafter=("eagle2", 1), parts=5, deps="fan", stops=(), budget=16)
    run = axes.check_case(case, tiny)
    rounds = [count for branch in branches_of(run) for count in branch.accepted]
    assert max(rounds) > 0 and len(run.manager.drafter.parts) == 2


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("drafter", [EAGLE, ("eagle3", 3)], ids=str)
def test_an_outline_preempted_again_while_its_rows_are_read_keeps_its_tokens(
    drafter: tuple[str, int], layout: str, tiny: Make
) -> None:
    case = axes.Case(family="gemma3_text", work="written", drafter=drafter, layout=layout)
    case = replace(case, admission="optimistic", chunk=8, prefix_cache=False, requests=1)
    made = axes.target_of(case, tiny)
    session = axes.session_of(case, made)
    prompts, recorder = axes.prompts_of(case), Recorder(str, None)
    run = start(session, prompts, recorder)
    recorder.attach(run)
    (request,) = run.requests
    drive(run, until=lambda _: request.root is not None and len(request.root.tokens) > 4)
    root = request.root
    assert root is not None and not root.ended
    for _ in range(2):
        run.manager.lifecycle.preempt_(request)
        drive(run, until=lambda _: request.stage is Stage.PREFILL)
    drive(run)
    assert request.root is root and root.preempted == 1
    axes.check_counters(run, recorder, case)
    axes.check_request(request, session, made.reference, read=False)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_an_end_token_inside_an_accepted_path_ends_the_answer_there(
    layout: str, tiny: Make
) -> None:
    case = axes.Case(drafter=("eagle3", 0), layout=layout, stops=(0, 2, 3), budget=24, parts=8)
    ended = [b for b in branches_of(axes.check_case(case, tiny)) if b.finish is Finish.STOP]
    assert any(b.accepted and b.accepted[-1] > b.emitted[-1] for b in ended)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_is_found(
    fault: Fault, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [fault.case, *(replace(fault.case, family=family) for family in axes.FAMILIES)]
    with monkeypatch.context() as patch:
        fault.plant(patch)
        found = next(case for case in cases if _fails(case, tiny))
    axes.check_case(found, tiny)


def _fails(case: axes.Case, tiny: Make) -> bool:
    try:
        axes.check_case(case, tiny)
    except Exception:
        return True
    return False


@pytest.mark.parametrize("drafter", axes.CHOICES[1:], ids=str)
def test_drafts_are_accepted_and_refused_so_that_something_is_tested(
    drafter: tuple[str, int], tiny: Make
) -> None:
    case = axes.Case(family="qwen3", drafter=drafter, parts=4, stops=(), budget=30)
    branches = branches_of(axes.check_case(case, tiny))
    rounds = [count for branch in branches for count in branch.accepted]
    assert 0.05 < sum(rounds) / len(rounds) < 3.5 and len(set(rounds)) >= 2, rounds


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_layouts_accept_the_same_in_every_round(case: axes.Case, tiny: Make) -> None:
    made, found = axes.target_of(case, tiny), list[Any]()
    for layout in ("bim", "batching", "paged"):
        case = replace(case, layout=layout)
        run, recorder = axes.play(axes.session_of(case, made), case)
        branches = [b for request in run.requests for b in request.all_branches()]
        ends = [(b.name, b.tokens, b.accepted, b.emitted, b.finish, b.note) for b in branches]
        found.append((ends, run.answers, recorder.meter.drafted, recorder.meter.accepted))
    assert found[0] == found[1] == found[2]
    assert found[0][-1] > 0 or case.drafter[0] in ("none", "ngram"), "nothing was accepted"


@pytest.mark.parametrize("work", ["answer", "parts"])
@pytest.mark.parametrize("family", axes.FAMILIES)
def test_generate_of_transformers_itself_writes_the_same(
    work: str, family: str, tiny: Make
) -> None:
    case = axes.Case(family=family, work=work, drafter=("eagle3", 0), deps="chain", budget=14)
    made = axes.target_of(case, tiny)
    session = axes.session_of(case, made)
    run, _ = axes.play(session, case)
    for branch, context in contexts(run.requests[0], session.prompts, work == "answer"):
        written = made.reference.generate(context, case.stops, branch.budget)
        stopped = branch.finish is Finish.STOP
        assert written[: len(branch.tokens)] == branch.tokens
        assert (written[-1] in case.stops) == stopped
        assert len(written) == len(branch.tokens) + stopped
