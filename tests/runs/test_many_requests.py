"""A long run holds no more than a short one: what ended and was handed over leaves nothing."""

import pytest
from helpers import folds
from helpers.drafters import drafting, settings_of
from helpers.many import check, serve, short, sizes
from helpers.support import Graphs, Make, TokenBook, outline_of, tiny_models
from helpers.tiny import write_tiny_target

from specsot.engine.models import Models
from specsot.engine.prepare.files import open_graph
from specsot.engine.run.session import Session

TEXTS = [f"text {number}" for number in range(40)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A target of one layer, no drafter."""
    folder = tmp_path_factory.mktemp("small")
    return tiny_models(write_tiny_target(folder, layers=1, hidden=16), None, ())


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_two_thousand_short_requests(layout: str, small: Models, graphs: Graphs) -> None:
    check(serve(short(layout, small, graphs), TEXTS, 50), 2000)


KINDS = [("eagle3", 0), ("eagle3", 1), ("dflash", 0), ("vanilla", 1), ("ngram", 0), ("ngram", 2)]


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_drafters_forget_whom_they_drafted_for(
    kind: str, number: int, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    session = graphs.session(
        "bim_plain",
        drafting(made, kind),
        made.book(stop_ids=()),
        outline=outline_of(3, {3: (1,)}),
        budget=5,
        sets=(*settings_of(kind, number), "scheduler.prefix_cache=false"),
    )
    check(serve(session, TEXTS[:4], 5), 20)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_that_were_kept_to_be_combined_are_forgotten(
    parts: int, tiny: Make, graphs: Graphs
) -> None:
    """One part alone is the answer already: what was kept of it is never asked for."""
    outline = outline_of(parts)
    session = folds.session(graphs, tiny("llama"), *folds.REUSED, outline=outline, budget=4)
    check(serve(session, TEXTS[:3], 5), 15)


def test_beams_are_forgotten(small: Models, graphs: Graphs) -> None:
    program = open_graph("beam", ("layout.kv_slots=2000", "beam.num_beams=3"), graphs.table)
    session = Session(program, small, max_new_tokens=4, prompts=TokenBook(130, "outline", ()))
    check(serve(session, TEXTS[:4], 5), 20)


def test_whatever_an_object_holds_is_seen(small: Models, graphs: Graphs) -> None:
    """The check above would notice a row of any table that nobody takes away."""
    manager = short("bim", small, graphs).board()["branches"]
    before = sizes(manager)
    manager.kv.regions[5] = None
    manager.samplers._counts[5] = None
    manager.table.segments.add()
    found = {path.split(".", 1)[1]: more for path, more in (sizes(manager) - before).items()}
    assert found == {"regions": 1, "_counts": 1, "segments.parent": 1, "segments.home": 1}
