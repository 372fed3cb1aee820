"""Where a round's tokens end an answer; what is committed of its rows: tests/runs."""

from typing import Any

import pytest
from helpers.vanilla import cases

from specsot.states.commit import append_tokens
from specsot.states.request import Branch, Request, Stage


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
