"""A request that another engine has begun goes on behind what is written of it: the same tokens."""

import pytest
from helpers.clusters import BEES
from helpers.going_on import OBJECT, WARM, check_goes_on


@pytest.mark.parametrize(
    ("graph", "sets", "schema"),
    [("bim_eagle", WARM, None), ("paged_plain", (), None), ("dflash", (), OBJECT)],
)
def test_a_begun_request_goes_on(graph: str, sets: tuple[str, ...], schema: str | None) -> None:
    check_goes_on(graph, sets, BEES, schema)
