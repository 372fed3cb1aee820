"""Every drafter, layout, policy, chunk size: whoever makes way writes what it would have.

pytest tests/full/test_preemption_grid.py
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from helpers.making_way import GRID, check_forced
from helpers.support import SEED, Graphs, Tiny, named

Make = Callable[..., Tiny]
CASES = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_whoever_makes_way_at_any_moment_writes_the_same(
    case: dict[str, Any], tiny: Make, graphs: Graphs
) -> None:
    check_forced(case, tiny("llama"), graphs, SEED)
