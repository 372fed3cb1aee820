"""What stands for nothing has no influence: padding, whatever it holds, rows without a branch."""

from typing import Any

import pytest
import torch
from helpers.support import (
    FIXED,
    Graphs,
    Make,
    Tiny,
    branches_of,
    check_lossless,
    drive,
    outline_of,
    outlined,
    start,
    tokens_of,
)

from specsot.engine.models import Models
from specsot.ops.kv.pool import NO_SEGMENT
from specsot.ops.types import AlignmentState, Rows
from specsot.states.layout import BatchingLayout


class Finite:
    """A target that insists on finite numbers, for padding too."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any, **named: Any) -> Any:
        output = self.inner.forward(*args, **named)
        assert torch.isfinite(output.logits_RV).all()
        assert output.taps_QF is None or torch.isfinite(output.taps_QF).all()
        return output


@pytest.mark.parametrize("graph", ["batching_plain", "batching_eagle"])
@pytest.mark.parametrize("fill", [0, 3])
def test_a_row_that_is_padding_throughout_changes_nothing(
    graph: str, fill: int, tiny: Make, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle branch ends early; padding holds id 0, or 3, the pad token: both are ordinary."""
    made, sets = tiny("llama"), FIXED if "eagle" in graph else ()
    free = outlined(graphs, made, graph, parts=3, budget=30, sets=sets)
    padded = _fill_padding(monkeypatch, fill)
    models = Models(Finite(made.models.target), made.models.drafter, None, (), *_place(made))
    book = made.book(stop_ids=())
    session = graphs.session(graph, models, book, outline=outline_of(3), budget=30, sets=sets)
    run = drive(start(session, ["hello"]), until=lambda run: run.state == "parallel_prefill")
    branches_of(run)[1].budget = 5
    padded.clear()
    drive(run)
    assert sum(lengths[1:] == (0, 1 + 6 * bool(sets)) for lengths in padded) > 3, padded
    expected = tokens_of(free)
    expected["0"][2] = expected["0"][2][:5]
    assert tokens_of(run) == expected
    check_lossless(run, book, made.reference, plain=False)
    for pool in (run.manager.kv, run.manager.kv_draft):
        assert pool is None or torch.isfinite(pool.data).all()


def _place(made: Tiny) -> tuple[torch.device, torch.dtype]:
    return made.models.device, made.models.dtype


def _fill_padding(monkeypatch: pytest.MonkeyPatch, token: int) -> list[tuple[int, ...]]:
    plain_, lengths = BatchingLayout._plain_rows, list[tuple[int, ...]]()
    place = BatchingLayout.place_

    def filled(layout: Any, *args: Any, **more: Any) -> Rows:
        rows = plain_(layout, *args, **more)
        rows.tokens_BQ.view(-1)[torch.from_numpy(rows.owner_N == NO_SEGMENT)] = token
        return rows

    def noted(layout: Any, *args: Any) -> Any:
        placed = place(layout, *args)
        if isinstance(placed.rows.alignment, AlignmentState):
            lengths.append(placed.rows.alignment.valid_lengths)
        return placed

    monkeypatch.setattr(BatchingLayout, "_plain_rows", filled)
    monkeypatch.setattr(BatchingLayout, "place_", noted)
    return lengths
