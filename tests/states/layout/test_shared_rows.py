"""The setting `rows_per_round` of a graph: which drafters have it, and which sizes fit."""

import pytest

from specsot.engine.prepare.files import open_graph
from specsot.ops.registry import OpTable
from specsot.states.graph.load import op_table
from specsot.states.yaml.source import GraphError

SMALL = (
    *("limits.max_new_tokens=1", "skeleton.max_tokens=1", "skeleton.direct_tokens=1"),
    *("layout.max_num_branches=8", "drafter.num_draft_tokens=10", "drafter.draft_depth=5"),
)


@pytest.fixture(scope="module")
def table() -> OpTable:
    return op_table()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["drafter.rows_per_round=0"], "drafter.rows_per_round: must be at least 1, not 0"),
        (["drafter.rows_per_round=true"], "drafter.rows_per_round: must be an integer, not true"),
        (["drafter.rows_per_round={1: 8}"], "drafter.rows_per_round: must be an integer"),
        (["drafter.kind=vanilla", "drafter.rows_per_round=8"], "belongs to"),
        (["drafter.kind=none", "drafter.rows_per_round=8"], "belongs to"),
        (
            [*SMALL, "drafter.rows_per_round=30", "layout.kv_slots=45"],
            "8 branches with 30 nodes together need 46 slots, layout.kv_slots is 45",
        ),
        (
            [*SMALL, "drafter.rows_per_round=90", "layout.kv_slots=45"],
            "8 branches with 10 nodes each need 96 slots, layout.kv_slots is 45",
        ),
        (
            [*SMALL, "drafter.rows_per_round=4", "layout.kv_slots=30", "limits.max_new_tokens=26"],
            "1 prompt token + 26 new ones + 4 nodes + 1 = 32 slots, but layout.kv_slots is 30",
        ),
    ],
)
def test_what_does_not_fit_is_said(sets: list[str], message: str, table: OpTable) -> None:
    with pytest.raises(GraphError) as caught:
        open_graph("bim_eagle", sets, table)
    assert message in str(caught.value)


def test_a_shared_budget_lets_more_branches_into_a_small_pool(table: OpTable) -> None:
    open_graph("bim_eagle", [*SMALL, "layout.kv_slots=46", "drafter.rows_per_round=30"], table)


def test_drafts_that_are_drawn_cannot_be_ranked_under_rejection(table: OpTable) -> None:
    sets = ["drafter.kind=dflash", "drafter.rows_per_round=8", "drafter.draws=sampled"]
    sets += ["sampling.accept=rejection"]
    with pytest.raises(GraphError, match="rows_per_round: under accept: rejection, drafts that"):
        open_graph("bim_eagle", sets, table)
    for more in ("drafter.draws=best", "sampling.accept=match"):
        open_graph("bim_eagle", [*sets, more], table)
