"""A drafter that does not help is told, with what may be wrong."""

from typing import Any

import pytest

from specsot.engine.record.metrics import ENOUGH, doubts


def metrics(tau: float, *, draft: float = 1.0, rounds: int = ENOUGH, drafted: int = 9) -> Any:
    states = {name: {"milliseconds": ms} for name, ms in (("grow_tree", draft), ("verify", 10.0))}
    return {"tau_step": tau, "branch_rounds": rounds, "drafted": drafted, "states": states}


def test_drafts_that_are_never_accepted() -> None:
    (line,) = doubts(metrics(1.05), "eagle3")
    assert "tau_step 1.05 in 24 rounds" in line and "another model" in line
    (line,) = doubts(metrics(1.0), "ngram")
    assert "repeats nothing" in line


@pytest.mark.parametrize(("tau", "draft", "told"), [(1.5, 4.9, 0), (1.5, 5.1, 1), (3.0, 5.1, 0)])
def test_drafts_that_cost_more_than_they_save(tau: float, draft: float, told: int) -> None:
    lines = doubts(metrics(tau, draft=draft), "eagle3")
    assert len(lines) == told and all("smaller tree" in line for line in lines)


def test_too_few_rounds_and_no_drafts_say_nothing() -> None:
    assert doubts(metrics(1.0, rounds=ENOUGH - 1), "eagle3") == []
    assert doubts(metrics(1.0, drafted=0), "none") == []
