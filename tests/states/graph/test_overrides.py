"""`--set path=value` on a shipped graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.support import TREES

from specsot.engine.prepare.files import SHIPPED, open_graph
from specsot.states.drafter import NoDrafterSettings
from specsot.states.drafters.eagle import Eagle3Settings
from specsot.states.graph.graph import Program
from specsot.states.graph.load import load_program, op_table
from specsot.states.yaml.source import GraphError, RenamedKeyWarning, Source

TABLE = op_table()


def opened(*sets: str, graph: str = "bim_eagle") -> Program:
    return open_graph(graph, sets, TABLE)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("drafter.draft_depth=5", "drafter.draft_depth", 5),
        ("drafter.draft_depth=0o5", "drafter.draft_depth", 5),
        ("drafter.num_draft_tokens={1: 8, 3: 2}", "drafter.num_draft_tokens", {1: 8, 3: 2}),
        ("drafter.num_draft_tokens.2=4", "drafter.num_draft_tokens", {1: 10, 2: 4, 4: 3}),
        ("drafter.num_draft_tokens.8=2", "drafter.num_draft_tokens", {1: 10, 2: 6, 4: 3, 8: 2}),
        ("drafter.num_draft_tokens=9", "drafter.num_draft_tokens", 9),
        ("drafter.model=/a=b", "drafter.model", "/a=b"),
        ("skeleton.tools=[Search, Code]", "skeleton.tools", ("Search", "Code")),
        ("skeleton.grammar=false", "skeleton.grammar", False),
        ("skeleton.share=prompt", "skeleton.share", "prompt"),
        ("sampling.temperature=0.0", "sampling.temperature", 0.0),
        ("limits={max_new_tokens: 9}", "limits.max_new_tokens", 9),
        ("layout.max_num_branches=1", "layout.max_num_branches", 1),
    ],
)
def test_a_setting_is_changed(text: str, path: str, value: Any) -> None:
    assert opened(*TREES, text).graph.refer(path) == value


def test_a_kind_replaces_its_block_by_defaults_before_the_others() -> None:
    drafter = opened("drafter.draft_depth=3", "drafter.kind=eagle3").graph.drafter
    assert drafter == Eagle3Settings(kind="eagle3", draft_depth=3)
    assert opened("drafter.kind=none").graph.drafter == NoDrafterSettings(kind="none")
    former = opened("drafter.kind=ngram", "drafter.method=lookup").graph.drafter
    assert former == opened("drafter.kind=ngram").graph.drafter
    assert opened("drafter.kind=eagle3", graph="bim_plain").graph.refer("drafter.top_k") == 4


def test_the_machine_can_be_changed_and_the_last_of_several_values_holds() -> None:
    ways = ("transitions.0.when=answers_ready", "transitions.1.when=outlines_finished")
    graph = opened("states.merge.doc=hi", "states.merge.doc=hello", *ways).graph
    assert graph.states["merge"].doc == "hello"
    assert [edge.when for edge in graph.transitions[:2]] == ["answers_ready", "outlines_finished"]


def test_positions_of_untouched_values_stay() -> None:
    plain, other = opened(), opened("drafter.kind=none")
    assert plain.source.marks[("initial",)] == other.source.marks[("initial",)]
    assert ("drafter", "draft_depth") not in other.source.marks
    assert plain.steps["verify"][0].at == other.steps["verify"][0].at


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["drafter.num_draft_tokens=x"],
         "--set drafter.num_draft_tokens=x: drafter.num_draft_tokens: must be auto, an "),
        (["drafter.draft_depth="],
         "--set drafter.draft_depth=: drafter.draft_depth: must not be null"),
        (["drafter.draft_deph=3"],
         "drafter.draft_deph: unknown key 'draft_deph'; did you mean 'draft_depth'?"),
        (["drafte.levels=3"], "drafte: unknown key 'drafte'; did you mean 'drafter'?"),
        (["drafter.kind=eagel3"], "drafter: no drafter 'eagel3'; did you mean 'eagle3'?"),
        (["drafter.kind=none", "drafter.num_draft_tokens=3"],
         "--set drafter.num_draft_tokens=3: drafter.num_draft_tokens: 'num_draft_tokens' "
         "belongs to the drafter eagle3"),
        (["drafter.kind=ngram", "drafter.method=nasd"],
         "drafter.method: must be lookup, the only method; other drafters: recycle, suffix [G104]"),
        (["drafter=eagle3"], "drafter: must be a mapping, not the string 'eagle3'"),
        (["limits={max_rounds: 0}"], "--set limits={max_rounds: 0}: limits: must be at least 1"),
        (["name.x=3"], "--set name.x=3: name.x: name is 'bim_eagle', not a mapping"),
        (["transitions.99.when=x"], "transitions is a list of "),
        (["transitions.x.when=x"], "transitions is a list of "),
        (["transitions.0.when=x"], "--set transitions.0.when=x: transitions.0.when: no guard 'x'"),
        (["skeleton=null"], "--set skeleton=null: skeleton: must not be null"),
        (["version=2"], "--set version=2: version: the graph needs format 2"),
        (["drafter.draft_depth=&a 3"], "drafter.draft_depth: anchors are not allowed: &a"),
        (["drafter.draft_depth=[1"], "drafter.draft_depth: expected ',' or ']'"),
        (["drafter.draft_depth"], "--set drafter.draft_depth: option: write path=value"),
        (["=3"], "--set =3: option: write path=value"),
        (["drafter..levels=3"], "write path=value, e.g. drafter.top_k=8"),
        ([""], "write path=value"),
        (["x" * 500 + "=1"], "unknown key 'xxxxx"),
        (["a." * 300 + "a=1"], "unknown key 'a'"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_option(sets: list[str], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        opened(*sets)
    first = str(caught.value).split("\n")[0]
    assert first.startswith("--set ") and message in first


def test_a_change_that_breaks_something_else_points_at_that() -> None:
    place = r"^graphs/bim_eagle.yaml:\d+:\d+: drafter.num_draft_tokens: \d+ nodes"
    with pytest.raises(GraphError, match=place):
        opened("drafter.draft_depth=1")


OLD_KEYS = [
    ("layout.capacity=600", "layout.kv_slots", 600),
    ("layout.max_active=3", "layout.max_num_branches", 3),
    ("skeleton.found=4", "skeleton.search_top_k", 4),
    ("scheduler.max_tokens=64", "scheduler.max_num_batched_tokens", 64),
    ("limits.samples=1", "limits.n", 1),
    ("drafter.nodes=7", "drafter.num_draft_tokens", 7),
    ("drafter.levels=2", "drafter.draft_depth", 2),
]


@pytest.mark.parametrize(("text", "path", "value"), OLD_KEYS)
def test_an_old_key_is_read_with_a_warning(text: str, path: str, value: Any) -> None:
    old = text.partition("=")[0]
    with pytest.warns(RenamedKeyWarning) as warned:
        graph = opened(text).graph
    block, key = path.split(".")
    assert getattr(getattr(graph, block), key) == value
    (warning,) = warned
    assert str(warning.message).startswith(f"--set {text}: {old} is now called {path};")


@pytest.fixture
def old_file(tmp_path: Path) -> Callable[..., tuple[Program, list[str]]]:
    """open(changes): a file with old keys, and the sentences of its only warning."""
    text = (
        "extends: bim_eagle\nname: old\nlayout:\n  kind: bim\n  max_active: 3   # an old key\n"
        "  block_size: 4\nskeleton: {found: 3, max_branches: 4}\n"
    )
    file = tmp_path / "old.yaml"

    def open_(old: str = "", new: str = "", *sets: str) -> tuple[Program, list[str]]:
        file.write_text(text.replace(old, new))
        with pytest.warns(RenamedKeyWarning) as warned:
            program = open_graph(str(file), sets, TABLE)
        (warning,) = warned
        sentences = str(warning.message).replace(str(file), "old.yaml").split("\n")
        return program, [sentence.partition(" is now")[0] for sentence in sentences]

    return open_


def test_old_keys_of_a_file_are_one_warning_with_their_places(old_file: Any) -> None:
    program, places = old_file("", "", "layout.max_num_branches=5")
    assert program.graph.layout.max_num_branches == 5, "the new name changes the old key's value"
    assert program.graph.skeleton.search_top_k == 3
    assert places == ["old.yaml:5:3: layout.max_active", "old.yaml:7:12: skeleton.found"]


def test_problems_of_an_old_key_are_at_its_place(old_file: Any, tmp_path: Path) -> None:
    with pytest.raises(GraphError) as caught:
        old_file("3   #", "x   #")
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (5, 15)
    assert problem.message == "must be an integer, not the string 'x'"
    file = tmp_path / "both.yaml"
    file.write_text("extends: bim_eagle\nlayout: {kind: bim, max_active: 3, max_num_branches: 4}")
    with pytest.raises(GraphError, match=r"old name of 'max_num_branches' \[G005\]"):
        open_graph(str(file), (), TABLE)


def test_a_reference_and_a_setting_of_an_op_may_have_an_old_name() -> None:
    machine = (SHIPPED / "machines" / "skeleton.yaml").read_text()
    own = "[{op: outline.parse_, with: {found: $skeleton.found}}]"
    source = Source(machine.replace("[outline.parse_]", own), "m.yaml")
    with pytest.warns(RenamedKeyWarning) as warned:
        program = load_program(source, TABLE)
    assert program.steps["parse"][0].settings["search_top_k"] == 2
    assert str(warned[0].message).count("is now called") == 2
