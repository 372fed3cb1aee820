"""Every drafter in both layouts, with 1 to 8 branches in every order, held to transformers.

    pytest tests/full/test_drafter_grid.py

Cases are drawn by SPECSOT_TEST_SEED from the factors of tests/test_drafters.py; in every draw any
two settings meet. The summary says how many tokens were compared: more than 50,000.
"""

from typing import Any

import pytest
from support import Graphs, many, named
from test_drafters import WHOLE, Make, check_case


@pytest.mark.parametrize("case", many(WHOLE, 1000), ids=named)
def test_every_drafter_is_lossless(case: dict[str, Any], tiny: Make, graphs: Graphs) -> None:
    check_case(case, tiny, graphs)
