"""Requests beside each other: under ``bim`` a forward is never more than under ``batching``."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.support import Graphs, TokenBook, tiny_models
from helpers.tiny import write_tiny_target

from specsot.engine.models import Models
from specsot.engine.prepare.inputs import Prompt
from specsot.states.machine import OpRan
from specsot.states.request import Request
from specsot.states.text.tokens import PromptTokens

ROOM, NEW = 64, 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target of one layer, no drafter."""
    folder = tmp_path_factory.mktemp("small")
    return tiny_models(write_tiny_target(folder, layers=1, hidden=16), None, ())


def forwards(layout: str, lengths: list[int], models: Models, graphs: Graphs) -> list[Any]:
    """For each forward of all requests together its rows, and its groups' slots and mask sizes."""
    capacity = ROOM * (len(lengths) if layout == "bim" else 1)
    sets = (f"layout.kind={layout}", f"layout.max_num_branches={len(lengths)}")
    book = TokenBook(models.target.vocab_size, "outline", ())
    session = graphs.session(
        "autoregressive", models, book, budget=NEW, sets=(*sets, f"layout.kv_slots={capacity}")
    )
    seen = []

    def sink(event: object) -> None:
        if isinstance(event, OpRan) and event.op == "mask.build":
            groups = run.board["attention"].groups
            rows = run.board["batch"].rows.tokens_BQ.numel()
            seen.append((rows, [(group.keys, tuple(group.mask_GqK.shape)) for group in groups]))

    run = session.start([], sink)
    for number, length in enumerate(lengths):
        run.manager.lifecycle.submit(_request(session.request(Prompt(str(number), "?")), length))
    while not run.finished:
        run.advance()
    run.close()
    return seen


def _request(one: Request, length: int) -> Request:
    tail = PromptTokens(tuple(range(3, 3 + length)))
    return replace(one, prefix=PromptTokens(), tail=tail, stop_ids=frozenset())


def entries(groups: list[Any]) -> int:
    """Of all masks of a forward."""
    return sum(g * q * k for _, (g, q, k) in groups)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_requests_of_one_length_are_the_same_forwards(
    count: int, small: Models, graphs: Graphs
) -> None:
    lengths = [20] * count
    bim = forwards("bim", lengths, small, graphs)
    assert bim == forwards("batching", lengths, small, graphs)
    assert [entries(groups) for _, groups in bim] == [
        count * 20 * 20,
        *(count * (20 + new) for new in range(1, NEW)),
    ], "every request costs its own context"


def test_requests_of_several_lengths_are_less(small: Models, graphs: Graphs) -> None:
    lengths = [3, 40, 11, 5]
    bim = forwards("bim", lengths, small, graphs)
    batching = forwards("batching", lengths, small, graphs)
    assert [rows for rows, _ in bim] == [sum(lengths), *[4] * (NEW - 1)]
    assert [rows for rows, _ in batching] == [4 * max(lengths), *[4] * (NEW - 1)]
    for (_, ours), (_, theirs) in zip(bim, batching, strict=True):
        assert entries(ours) <= entries(theirs)
