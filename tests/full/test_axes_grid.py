"""Thousands of rows of the table of `helpers.axes`; every planted fault in rows drawn at random.

    pytest tests/full/test_axes_grid.py

SPECSOT_TEST_SEED draws the rows; in every draw any two values of two axes meet.
SPECSOT_GRID_PART=2/8 runs the second of eight parts."""

import os

import pytest
from helpers.axes import Case, check_case, draw_cases
from helpers.faults import FAULTS, Fault
from helpers.support import SEED, Make, many

ROWS = 5000
NUMBER, _, PARTS = os.environ.get("SPECSOT_GRID_PART", "1/1").partition("/")


@pytest.mark.parametrize(
    "case", many(draw_cases, ROWS, str)[int(NUMBER) - 1 :: int(PARTS)], ids=str
)
def test_every_run_has_the_property(case: Case, tiny: Make) -> None:
    check_case(case, tiny)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_drawn_grid_finds_every_planted_fault(
    fault: Fault, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.plant(monkeypatch)
    for case in draw_cases(SEED):
        try:
            check_case(case, tiny)
        except Exception:
            return
    raise AssertionError("a row that shows this fault is missing")
