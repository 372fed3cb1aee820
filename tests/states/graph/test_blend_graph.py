"""The block `blend`: what a graph with it may and may not say, and where it is told."""

from pathlib import Path

import pytest
from helpers.toy_graph import told

from specsot.engine.prepare.files import graph_names, open_graph
from specsot.engine.view.diagram import describe_graph
from specsot.ops.layer_plan import BlendSettings
from specsot.states.yaml.source import GraphError


def refused(*sets: str, graph: str = "blend_eagle") -> list[str]:
    with pytest.raises(GraphError) as caught:
        open_graph(graph, sets)
    return told(caught.value)


@pytest.mark.parametrize(
    ("setting", "place", "message"),
    [
        ("plan=full", "plan", "must be "),
        ("check_layers=[]", "check_layers", "must not be empty"),
        ("check_layers=[0]", "check_layers", "must be at least 1, not 0"),
        ("check_layers=[1.5]", "check_layers", "must be an integer, not the number 1.5"),
        ("check_layers=[true]", "check_layers", "must be an integer, not true"),
        ("check_layers=1", "check_layers", "must be a list"),
        ("ratios=[1.1]", "ratios", "must be at most 1"),
        ("ratios=[-0.1]", "ratios", "must be at least 0"),
        ("ratios=[.nan]", "ratios", "must be "),
        ("ratios=[true]", "ratios", "must be a number, not true"),
        ("ratios=[0.2, 0.1]", "ratios", "one share per check layer: 2 for 1"),
        ("metric=q", "metric", "must be "),
        ("check_update=none", "check_update", "must be "),
        ("mask=causal", "mask", "must be "),
        ("budget=all", "budget", "must be "),
        ("min_tokens=-1", "min_tokens", "must be at least 0, not -1"),
        ("on_miss=fail", "on_miss", "must be "),
        ("collect=1", "collect", "must be true or false"),
        ("chunk_tokens=0", "chunk_tokens", "must be at least 1, not 0"),
        ("ratio=0.2", "ratio", "unknown key 'ratio'; did you mean 'ratios'?"),
        ("mask=bottom_right", "mask", "bottom_right is for one sequence"),
    ],
)
def test_settings_that_cannot_be(setting: str, place: str, message: str) -> None:
    (problem,) = refused(f"blend.{setting}")
    assert problem.startswith(f"--set blend.{setting}: blend.{place}: {message}")


@pytest.mark.parametrize(
    ("layers", "ratios", "place", "message"),
    [
        ("[2, 2]", "[0.2, 0.2]", "3:21: blend.check_layers.1", "2 follows 2"),
        ("[3, 1]", "[0.2, 0.2]", "3:21: blend.check_layers.1", "1 follows 3"),
        ("[1, 2]", "[0.2, 0.3]", "4:17: blend.ratios.1", "shares must not grow, but 0.3"),
        ("[1, 2]", "[0.2]", "4:11: blend.ratios", "one share per check layer: 1 for 2"),
    ],
)
def test_check_layers_and_shares_go_together(
    layers: str, ratios: str, place: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: eagle\nblend:\n  check_layers: {layers}\n  ratios: {ratios}\n")
    (problem,) = refused(graph=str(file))
    assert problem.startswith(f"{file}:{place}: ") and message in problem


def test_bottom_right_is_for_one_sequence() -> None:
    """Whatever lets two branches be in one forward is refused before there is one."""
    wanted = ("blend.mask=bottom_right", "layout.max_num_branches=1")
    assert open_graph("blend_eagle", wanted)
    for more in ("layout.max_num_branches=2", "layout.kind=batching"):
        (problem,) = refused(*wanted, more)
        assert "blend.mask: bottom_right is for one sequence" in problem
    (problem,) = refused(*wanted, graph="bim_blend_eagle")
    assert "and no skeleton" in problem


def test_no_beam_search_on_cached_rows() -> None:
    problems = refused("blend.plan=blend", graph="beam")
    assert any("a graph has one of the blocks `beam`, `blend`" in p for p in problems)


def test_branches_must_be_able_to_search() -> None:
    (problem,) = refused("skeleton.tools=[Calculator]", graph="bim_blend_eagle")
    assert problem.startswith(
        "graphs/bim_blend_eagle.yaml:11:14: skeleton.documents: branches search"
    )
    sets = ("skeleton.tools=[Calculator]", "skeleton.documents=prefix")
    assert open_graph("bim_blend_eagle", sets)


def test_the_settings_are_those_of_the_ops() -> None:
    """Of the same names and, but for `plan`, with the same defaults."""
    blend = open_graph("eagle", ("blend={}",)).graph.blend
    assert blend is not None and blend.settings == BlendSettings(plan="blend")
    names = BlendSettings.__slots__
    assert names == tuple(type(blend).model_fields)[: len(names)]


def test_a_graph_without_the_block_says_nothing_of_it() -> None:
    for name in graph_names():
        graph = open_graph(name).graph
        assert ("blend" in graph.model_dump()) == ("blend" in name)


@pytest.mark.parametrize("name", ["blend_eagle", "bim_blend_eagle"])
def test_the_graph_without_the_block_differs_in_nothing_else(name: str) -> None:
    """But for where a search puts documents: that is no matter of reusing them."""
    names = (name.replace("blend_", ""), name)
    one, other = (open_graph(n).graph.model_dump(exclude={"name", "doc"}) for n in names)
    assert set(other) - set(one) == {"blend"} and not set(one) - set(other)
    assert {key for key in one if one[key] != other[key]} <= {"skeleton"}
    if one["skeleton"] is not None:
        assert other["skeleton"] == one["skeleton"] | {"documents": "branches", "search_top_k": 2}


def test_the_resolved_graph_shows_what_each_layer_does() -> None:
    program = open_graph("blend_eagle", ("blend.check_layers=[1, 3]", "blend.ratios=[0.3, 0.2]"))
    lines = describe_graph(program, layers=5).split("\n")
    (at,) = [i for i, line in enumerate(lines) if line.startswith("layer plans")]
    statuses = ["FULL", "CHECK", "AFTER_CHECK", "CHECK", "AFTER_CHECK"]
    assert lines[at + 3].split() == ["blend", *statuses]
    short = describe_graph(program, layers=3)
    assert "`check_layers` holds 3, but the model's layers are 0 to 2" in short
