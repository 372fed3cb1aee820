"""Shipped graphs of one family differ in one word: the layout, or the drafter."""

from collections.abc import Iterable
from typing import Any

import pytest
from helpers.support import FULL, PLAIN, graphs
from specsot_eagle1.static_tree import MC_SIM_7B_63

from specsot.engine.prepare.files import graph_names, open_graph, open_source

# Without a drafter, as their docs say, or with a block that the others do not have.
OTHERS = (
    *("autoregressive", "bim_plain", "batching_plain", "paged_plain", "beam"),
    *("blend_eagle", "bim_blend_eagle", "bim_blend_merge", "bim_attend_merge"),
)
# The algorithm as published accepts by rejection; the second drafter stands in its own block.
MORE = {"speculative": ("sampling",), "bim_two_drafters": ("skeleton",)}
PREFIXES = ("bim_", "batching_", "paged_")
KINDS = pytest.mark.parametrize("kind", ["plain", "eagle"])


def resolved(name: str, sets: Iterable[str] = ()) -> dict[str, Any]:
    program = open_graph(name, sets=tuple(sets), table=graphs.table)
    steps = {
        state: [(step.entry.function, dict(step.settings)) for step in steps]
        for state, steps in program.steps.items()
    }
    return program.graph.model_dump(by_alias=True) | {"steps": steps}


@pytest.mark.parametrize("twin", ["eagle", "bim_eagle", "batching_eagle", "paged_eagle"])
def test_graphs_of_other_drafters_differ_in_nothing_else(twin: str) -> None:
    prefix = twin.rpartition("eagle")[0]
    family = [
        name
        for name in graph_names()
        if next((p for p in PREFIXES if name.startswith(p)), "") == prefix and name not in OTHERS
    ]
    assert family
    for name in family:
        one, other = (open_source(n).data for n in (twin, name))
        assert one.keys() == other.keys()
        unlike = {k for k in one if one[k] != other[k]}
        assert unlike <= {"name", "doc", "drafter", *MORE.get(name, ())}, name


@KINDS
def test_one_word_turns_a_graph_into_its_twin(kind: str) -> None:
    swapped = resolved(f"bim_{kind}", ["layout.kind=batching"])
    twin = resolved(f"batching_{kind}")
    assert swapped | {key: twin[key] for key in ("name", "doc")} == twin


def test_all_full_graphs_have_the_same_states_and_transitions() -> None:
    first, *others = [resolved(name) for name in FULL]
    for graph in others:
        assert list(graph["states"]) == list(first["states"])
        assert graph["transitions"] == first["transitions"]
    assert all("skeleton" not in resolved(name)["states"] for name in PLAIN)


def test_eagle2_is_the_twin_of_eagle_and_keeps_a_tree_as_it_was_given() -> None:
    one, other = open_graph("eagle").graph, open_graph("eagle2").graph
    assert other.drafter.kind == "eagle2"
    assert other.drafter.model_dump(exclude={"kind"}) == one.drafter.model_dump(exclude={"kind"})
    same = {"name": one.name, "doc": one.doc, "drafter": one.drafter}
    assert other.model_copy(update=same) == one
    drafter = open_graph("eagle2", ("drafter.kind=eagle1",)).graph.drafter
    assert drafter.model_dump()["tree"] == MC_SIM_7B_63
    assert (drafter.offered, drafter.scratch) == (25, 10)
