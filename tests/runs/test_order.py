"""Which waiting branch starts next: by the outline's expected lengths, and never another token."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.support import FULL, GOLDEN, Graphs, Make, branches_of, drive, start, tokens_of

from specsot.engine.run.core import EngineCore
from specsot.states.text.outline import Outline, Point

LENGTHS = (40, 90, 40, 10, 75, 90)
STARTS = {
    "fcfs": [0, 1, 2, 3, 4, 5],
    "longest_first": [1, 5, 4, 0, 2, 3],  # equal ones in reading order
    "shortest_first": [3, 0, 2, 4, 1, 5],
}
ONE_DEVICE = [
    case
    for case in json.loads((GOLDEN / "specsot" / "scheduler.json").read_text())
    if len(case["compute"]) == 1
]


def expecting(lengths: Sequence[int], deps: dict[int, tuple[int, ...]] | None = None) -> Outline:
    points = [
        Point(i, length, None, (deps or {}).get(i, ()), f"Part {i}")
        for i, length in enumerate(lengths, 1)
    ]
    return Outline("plan", tuple(points), (), "ok")


def started(run: EngineCore) -> list[int]:
    """Branches in the order in which they began to run; of one round, in the order of its rows."""
    order: list[int] = []

    def note(run: EngineCore) -> bool:
        book = run.manager
        order.extend(b.index for b in book.active if not b.is_root and b.index not in order)
        return False

    drive(run, until=note)
    assert all(b.ended for b in branches_of(run))
    return order


def run_of(graph: str, outline: Outline, tiny: Make, graphs: Graphs, **layout: Any) -> EngineCore:
    made = tiny("llama")
    sets = [f"layout.{key}={value}" for key, value in layout.items()]
    book = made.book(stop_ids=())
    return start(graphs.session(graph, made.models, book, outline=outline, sets=sets), ["hello"])


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_branches_start_in_the_order_asked_for_and_no_token_changes(
    graph: str, most: int, tiny: Make, graphs: Graphs
) -> None:
    found = []
    for order, expected in STARTS.items():
        run = run_of(graph, expecting(LENGTHS), tiny, graphs, max_num_branches=most, order=order)
        assert started(run) == expected, order
        found.append(tokens_of(run))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("graph", ["bim_plain", "batching_plain"])
def test_a_branch_that_is_not_ready_lets_others_go_first(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    """The longest needs the shortest: it starts once that is done, before whoever still waits."""
    outline = expecting((20, 90, 50, 10, 5), {2: (4,)})
    run = run_of(graph, outline, tiny, graphs, max_num_branches=1, order="longest_first")
    assert started(run) == [2, 0, 3, 1, 4]


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("case", ONE_DEVICE, ids=lambda case: f"{case['predicted']}")
def test_one_device_starts_the_schedulers_batches(
    layout: str, case: dict[str, Any], tiny: Make, graphs: Graphs
) -> None:
    """Longest first, as many side by side as a batch of the scheduler holds; also backwards."""
    predicted, batches = case["predicted"], case["lpt"]["0"]["batches"]
    most = {"max_num_branches": case["max_parallel"], "order": "longest_first"}
    run = run_of(f"{layout}_plain", expecting(predicted), tiny, graphs, **most)
    drive(run, until=lambda run: run.state == "parallel_prefill")
    assert [b.index for b in run.branches] == batches[0]
    assert started(run) == [index for batch in batches for index in batch]
    last = len(predicted) - 1
    back = run_of(f"{layout}_plain", expecting(predicted[::-1]), tiny, graphs, **most)
    assert [last - index for index in started(back)] == case["lpt"]["0"]["assigned"]
