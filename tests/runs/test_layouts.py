"""``bim``, ``batching`` and ``paged`` are one algorithm: same tokens, same rounds, same states."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.axes import CHOICES, REJECTING, Case, Make, play, session_of, target_of
from helpers.support import Graphs

ROUNDS = Case(parts=5, max_num_branches=3, stops=(), budget=25)
DRAWN = replace(ROUNDS, temperature=1.0, dtype="float64", prefix_cache=False)
EAGLE = ("eagle3", 0)
TREES = (EAGLE, ("eagle2", 0), ("eagle1", 0), ("dflash", 0), ("dflash", 1), ("ngram", 1))
ROWS = (
    *(replace(ROUNDS, drafter=drafter) for drafter in CHOICES),
    *(replace(ROUNDS, drafter=drafter, rows_per_round=9) for drafter in TREES),
    *(replace(DRAWN, drafter=drafter, accept="rejection") for drafter in REJECTING),
    *(replace(ROUNDS, drafter=EAGLE, prompts=prompts) for prompts in ("one", "long")),
    *(replace(ROUNDS, drafter=EAGLE, chunk=9, work=work) for work in ("answer", "parts")),
    *(replace(ROUNDS, drafter=EAGLE, work=work) for work in ("written", "documents", "blended")),
    *(replace(ROUNDS, drafter=EAGLE, work=work) for work in ("combined", "folded", "attended")),
    replace(ROUNDS, drafter=EAGLE, max_num_branches=1, deps="chain", order="longest_first"),
    replace(ROUNDS, drafter=EAGLE, stops=(0, 2), max_num_branches=8, deps="fan"),
)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_layouts_accept_the_same_in_every_round(case: Case, tiny: Make, graphs: Graphs) -> None:
    made, found = target_of(case, tiny), list[Any]()
    for layout in ("bim", "batching", "paged"):
        case = replace(case, layout=layout)
        run, recorder = play(session_of(case, made, graphs), case)
        branches = [b for request in run.requests for b in request.all_branches()]
        ends = [(b.name, b.tokens, b.accepted, b.emitted, b.finish, b.note) for b in branches]
        found.append((ends, run.answers, recorder.meter.drafted, recorder.meter.accepted))
    assert found[0] == found[1] == found[2]
    assert found[0][-1] > 0 or case.drafter[0] in ("none", "ngram"), "nothing was accepted"
