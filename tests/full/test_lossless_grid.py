"""The whole grid of tests/runs/test_lossless.py but for the order: eighteen thousand runs, by name.

    pytest tests/full/test_lossless_grid.py

takes most of an hour; SPECSOT_GRID_PART=2/8 runs the second of eight parts.
"""

import os
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from helpers.support import SEED, Graphs, Tiny, named
from runs.test_lossless import SINGLE, WHOLE, check_case


def whole(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every combination, each with one of the attention backends, drawn by the seed; settings that
    mean nothing for one are not repeated."""
    found, draw = {}, random.Random(SEED)
    others = {name: values for name, values in factors.items() if name != "attention"}
    for values in product(*others.values()):
        case = dict(zip(others, values, strict=True))
        if "eagle" not in case["graph"]:
            case["nodes"] = factors["nodes"][0]
        if case.get("parts", 2) < 2:
            case["deps"] = "none"
        found.setdefault(named(case), case | {"attention": draw.choice(factors["attention"])})
    return list(found.values())


def part(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th case, from the one that SPECSOT_GRID_PART names."""
    number, _, parts = os.environ.get("SPECSOT_GRID_PART", "1/1").partition("/")
    return cases[int(number) - 1 :: int(parts)]


@pytest.mark.parametrize(
    "case", part([*whole(WHOLE | {"order": ("fcfs",)}), *whole(SINGLE)]), ids=named
)
def test_the_whole_grid(case: dict[str, Any], tiny: Callable[..., Tiny], graphs: Graphs) -> None:
    check_case(case, tiny, graphs)
