"""A few of the odd graphs, inputs and streams that tests/full tries by hundreds."""

from pathlib import Path
from random import Random

import pytest
from helpers.fuzz import MAKERS, try_graphs, try_inputs
from helpers.fuzz_streams import ANSWER, run_cases, stream_cases
from helpers.support import SEED

pytestmark = pytest.mark.usefixtures("here")


def test_a_few_odd_graphs_and_an_odd_input_of_each_kind() -> None:
    for attempt, count in ((try_graphs, 6), (try_inputs, len(MAKERS))):
        tally = attempt(range(1000, 1000 + count), SEED)
        assert not tally.faults and tally.ended.total() == count


def test_a_few_odd_streams(tmp_path: Path) -> None:
    draw = Random(SEED)
    cases = draw.sample([one for one in stream_cases(draw) if one.words[:6] == ANSWER], 3)
    codes, faults = run_cases(cases, tmp_path)
    assert not faults and len(codes) == 3
