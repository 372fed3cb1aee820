"""The block `beam`: what a graph with it may and may not say, and where it is told."""

from typing import Any

import pytest
from helpers.toy_graph import told

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.repeat import graph_yaml
from specsot.states.graph.graph import Graph
from specsot.states.graph.load import load_program, op_table
from specsot.states.yaml.source import GraphError, Source

FILE = "g.yaml"
BEAM = graph_yaml(open_graph("beam").graph)


def refused(*sets: str, graph: str = "beam") -> list[str]:
    with pytest.raises(GraphError) as caught:
        open_graph(graph, sets)
    return told(caught.value)


def changed(old: str, new: str) -> list[str]:
    """Problems of the whole shipped graph with one piece of its text replaced."""
    assert BEAM.count(old) == 1
    with pytest.raises(GraphError) as caught:
        load_program(Source(BEAM.replace(old, new), FILE), op_table())
    return told(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_beams=0", "must be at least 1, not 0"),
        ("num_beams=257", "must be at most 256, not 257"),
        ("num_beams=true", "must be an integer, not true"),
        ("num_beams=2.5", "must be an integer, not the number 2.5"),
        ("length_penalty=6", "must be at most 5.0, not 6"),
        ("length_penalty=-6", "must be at least -5.0, not -6"),
        ("length_penalty=.nan", "must be "),
        ("length_penalty=x", "must be a number, not the string 'x'"),
        ("early_stopping=1", "must be true, false or never"),
        ("early_stopping=always", "must be true, false or never"),
        ("early_stopping=null", "must not be null"),
        ("num_beam=3", "unknown key 'num_beam'; did you mean 'num_beams'?"),
    ],
)
def test_settings_that_cannot_be(setting: str, message: str) -> None:
    (problem,) = refused(f"beam.{setting}")
    path = setting.partition("=")[0]
    assert problem.startswith(f"--set beam.{setting}: beam.{path}: {message}")


@pytest.mark.parametrize("value", ["true", "false", "never"])
@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_settings_reach_the_op(value: str, layout: str) -> None:
    program = open_graph("beam", (f"beam.early_stopping={value}", f"layout.kind={layout}"))
    (step,) = [s for s in program.steps["select_beams"] if s.entry.name == "beam.select"]
    early = {"true": True, "false": False}.get(value, value)
    assert step.settings == {"num_beams": 4, "length_penalty": 1.0, "early_stopping": early}


def test_a_search_takes_no_drafter() -> None:
    problem = changed("drafter: {kind: none}", "drafter: {kind: ngram}")[0]
    assert problem == (
        f"{FILE}:5:17: drafter.kind: beam search takes no drafter: the kind must be none, not ngram"
    )


def test_a_search_has_no_skeleton() -> None:
    problems = refused("skeleton.max_branches=3")
    assert "a graph with the block `beam` has no skeleton" in problems[0] + problems[-1]


@pytest.mark.parametrize("setting", ["temperature=0.7", "top_k=5", "repetition_penalty=1.2"])
def test_a_search_draws_nothing(setting: str) -> None:
    name = setting.partition("=")[0]
    (problem,) = refused(f"sampling.{setting}")
    assert problem.startswith(
        f"--set sampling.{setting}: sampling.{name}: beam search draws no tokens: {name} must be "
    )


def test_the_rows_of_all_beams_must_fit() -> None:
    assert refused("limits.max_new_tokens=1024") == [
        "graphs/beam.yaml:10:14: beam.num_beams: 1 prompt token + 4 beams with 1024 tokens + 1 = "
        "4098 slots, but layout.kv_slots is 4096"
    ]
    assert open_graph("beam", ("limits.max_new_tokens=1024", "layout.kv_slots=4098"))


def test_what_commits_single_tokens_has_no_place_in_a_search() -> None:
    problem = changed("[beam.gather,", "[branch.root, branch.start_, beam.gather,")[0]
    assert problem.endswith(
        "states.select_beams.ops.1: 'branch.start_' cannot be part of a beam search: "
        "it commits single tokens"
    )


def test_a_search_needs_its_block_and_the_block_a_search() -> None:
    start, end = BEAM.index("\nbeam:") + 1, BEAM.index("\nsampling:")
    with pytest.raises(GraphError, match="needs the block 'beam' in this graph"):
        load_program(Source(BEAM[:start] + BEAM[end:], FILE), op_table())
    problems = refused("beam.num_beams=3", graph="autoregressive")
    assert any("beam: no state runs an op that reads this block: beam." in p for p in problems)


def test_graphs_without_the_block_are_as_before() -> None:
    """Their plain data, of which a graph's hash is made, does not name it."""
    plain: dict[str, Any] = open_graph("autoregressive").graph.model_dump(by_alias=True)
    assert "beam" not in plain and "skeleton" in plain
    beam = open_graph("beam").graph
    assert beam.model_dump(by_alias=True)["beam"]["num_beams"] == 4
    assert Graph.model_validate(beam.model_dump(by_alias=True, exclude_none=True)) == beam
