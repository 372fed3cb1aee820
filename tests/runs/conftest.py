"""A part of every large grid of whole runs is drawn, unless all of them are asked for."""

import os
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from helpers.support import SEED

TESTS = Path(__file__).parents[1]
DRAWN = tuple(TESTS / room for room in ("runs", "engine/workers", "engine/run"))
FEW = 2  # cases of a test that are never left out
SHARE = 12  # one of so many is run
ALL = "SPECSOT_TEST_ALL"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get(ALL):
        return
    grids: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if any(item.path.is_relative_to(room) for room in DRAWN):
            grids[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for name, cases in grids.items():
        count = min(max(len(cases) // SHARE, FEW), len(cases))
        kept = Random(f"{SEED} {name}").sample(cases, count)
        left.update(set(cases) - set(kept))
    if left:
        config.hook.pytest_deselected(items=[one for one in items if one in left])
        items[:] = [one for one in items if one not in left]
