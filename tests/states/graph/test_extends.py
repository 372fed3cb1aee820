"""`extends`: whose blocks hold, where a problem is told, and what cannot be extended."""

from itertools import pairwise
from pathlib import Path

import pytest
from helpers.toy_graph import refused

from specsot.engine.prepare.files import graph_names, open_graph, open_source
from specsot.engine.prepare.repeat import graph_yaml
from specsot.states.drafters.eagle import Eagle3Settings
from specsot.states.graph.graph import BatchingBlock
from specsot.states.graph.load import load_program, op_table
from specsot.states.yaml.source import GraphError, Source


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(**texts: str) -> None:
    """Files NAME.yaml; `__` in a name is a folder."""
    for name, text in texts.items():
        path = Path(f"{name.replace('__', '/')}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def problems(ref: str = "mine.yaml") -> list[str]:
    return refused(open_graph, ref)


# -- what holds ------------------------------------------------------------------------------------


def test_two_lines_are_a_graph() -> None:
    write(mine="extends: bim_eagle\ndrafter: {kind: none}\n")
    own, plain = open_graph("mine.yaml").graph, open_graph("bim_plain").graph
    assert own.model_copy(update={"name": plain.name, "doc": plain.doc}) == plain


def test_a_block_replaces_the_whole_block() -> None:
    """What it does not say is the default of the schema, not what the base says."""
    write(
        base="extends: bim_eagle\nname: base\n"
        "layout: {kind: bim, kv_slots: 999, max_num_branches: 3}\n"
        "sampling: {temperature: 0.5}\n",
        mine="extends: base.yaml\nlayout: {kind: batching}\n"
        "drafter: {kind: eagle3, draft_depth: 2}\n",
    )
    graph = open_graph("mine.yaml").graph
    assert graph.layout == BatchingBlock(kind="batching")
    assert graph.drafter == Eagle3Settings(kind="eagle3", draft_depth=2)
    assert graph.name == "base" and graph.sampling.temperature == 0.5


@pytest.mark.parametrize("ref", ["eagle", "eagle.yaml", "graphs/eagle.yaml", "machines/decode"])
def test_a_shipped_graph_is_extended_by_name(ref: str) -> None:
    write(mine=f"extends: {ref}\nname: mine\ndrafter: {{kind: none}}\n")
    assert open_graph("mine.yaml").graph.states == open_graph("eagle").graph.states


def test_a_neighbour_is_found_from_the_file_and_wins_over_a_shipped_graph() -> None:
    write(
        eagle="nothing: here\n",
        deep__eagle="extends: eagle\nname: neighbour\n",
        deep__more__mine="extends: ../eagle.yaml\ndoc: mine\n",
    )
    assert open_graph("deep/more/mine.yaml").graph.name == "neighbour"
    absolute = Path("deep/eagle.yaml").absolute()
    write(other=f"extends: {absolute}\n")
    assert open_graph("other.yaml").graph.name == "neighbour"


def test_a_copy_of_the_shipped_folder_extends_its_own_files() -> None:
    machine = Source(open_source("machines/decode").text, "machine").text
    write(
        graphs__eagle=open_source("eagle").text,
        graphs__machines__decode=machine.replace("max_rounds: 4000", "max_rounds: 77"),
    )
    program = open_graph("graphs/eagle.yaml")
    assert program.graph.limits.max_rounds == 77
    assert open_graph("eagle.yaml").graph.limits.max_rounds == 4000


def test_changes_come_after_the_base() -> None:
    write(mine="extends: bim_eagle\ndrafter: {kind: ngram, num_draft_tokens: 5}\n")
    graph = open_graph("mine.yaml", ["drafter.draft_depth=2", "limits.max_rounds=9"]).graph
    assert graph.refer("drafter.num_draft_tokens") == 5 and graph.refer("drafter.draft_depth") == 2
    assert graph.limits.max_rounds == 9
    swapped = open_graph("mine.yaml", ["drafter.kind=eagle3"]).graph
    assert swapped.drafter == Eagle3Settings(kind="eagle3")


@pytest.mark.parametrize("name", graph_names())
def test_the_whole_graph_extends_nothing_and_means_the_same(name: str) -> None:
    program = open_graph(name)
    text = graph_yaml(program.graph)
    again = load_program(Source(text, "g.yaml"), op_table())
    assert again.graph == program.graph and again.steps.keys() == program.steps.keys()
    assert "extends" not in Source(text, "g.yaml").data


# -- where a problem is told -----------------------------------------------------------------------

BASE = """\
extends: bim_eagle
name: base
layout: {kind: bim, kv_slots: 300}
limits:
  max_new_tokens: 298
  max_rounds: 0
"""


def test_a_problem_of_an_inherited_part_points_to_its_file() -> None:
    write(sub__base=BASE, mine="extends: sub/base.yaml\nname: 5\nlayot: {kind: bim}\n")
    assert problems() == [
        "mine.yaml:2:7: name: must be a string, not the number 5",
        "mine.yaml:3:1: layot: unknown key 'layot'; did you mean 'layout'?",
        "sub/base.yaml:6:15: limits.max_rounds: must be at least 1, not 0",
    ]


def test_each_of_two_that_do_not_fit_keeps_its_place() -> None:
    write(base=BASE.replace("max_rounds: 0", "max_rounds: 9"), mine="extends: base.yaml\n")
    places = [problem.partition(": ")[0] for problem in problems()]
    assert places == ["base.yaml:5:19", "graphs/machines/skeleton.yaml:24:18"]


def test_an_op_of_a_machine_is_told_with_the_machine() -> None:
    write(mine="extends: beam\nbeam: {num_beams: 2}\n")
    program = open_graph("mine.yaml")
    assert program.steps["select_beams"][0].at.startswith("graphs/machines/beam.yaml:")
    assert program.source.at(("beam",)) == "mine.yaml:2"


def test_a_key_that_is_nearly_extends() -> None:
    write(mine="extend: eagle\n")
    assert "mine.yaml:1:1: extend: unknown key 'extend'; did you mean 'extends'?" in problems()


# -- what cannot be extended -----------------------------------------------------------------------

OTHER = "a graph that extends another replaces blocks only; states belong in machine files"
NO_NAME = "extends: must be the name of a graph or the path of a file, not"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a\nextends: bim_eagel\n", "2:10: extends: 'bim_eagel': no such file or shipped "
         "graph; did you mean 'bim_eagle'?; shipped are: autoregressive, "),
        ("extends: machines/skeletn.yaml\n", "1:10: extends: 'machines/skeletn.yaml': no such file "
         "or shipped graph; did you mean 'machines/skeleton'?"),
        ("extends: bse.yaml\n", "1:10: extends: 'bse.yaml': no such file or shipped graph; did you "
         "mean 'base.yaml'?"),
        ("extends: base\n", "1:10: extends: 'base': no such file or shipped graph; did you mean "
         "'base.yaml'?"),
        ("extends: sub\n", "1:10: extends: 'sub': this is a directory, not a file"),
        ("extends: templates/embedded\n", "1:10: extends: 'templates/embedded': no such file or"),
        ("extends: ../specsot\n", "1:10: extends: '../specsot': no such file or shipped graph"),
        ("extends: mine.yaml\n", "1:10: extends: a graph cannot extend itself: mine.yaml > mine"),
        ("extends: sub/../mine.yaml\n", "1:10: extends: a graph cannot extend itself: mine.yaml >"),
        ("extends:\n", f"1:9: {NO_NAME} null"),
        ("extends: ''\n", f"1:10: {NO_NAME} the string ''"),
        ("extends: [eagle, beam]\n", f"1:10: {NO_NAME} a list"),
        ("extends: 5\n", f"1:10: {NO_NAME} the number 5"),
        ("extends: eagle\nstates: {}\n", f"2:1: states: {OTHER}"),
        ("extends: eagle\ninitial: verify\n", f"2:1: initial: {OTHER}"),
        ("transitions: []\nextends: eagle\n", f"1:1: transitions: {OTHER}"),
        ("extends: eagle\ndrafter: ~\n", "2:10: drafter: must not be null"),
        ("extends: blend_eagle\nblend:\n", "2:7: blend: must not be null"),
        ("extends: eagle\nversion: 2\n", "2:10: version: the graph needs format 2, this specsot"),
        ("extends: eagle\nblend: {}\nblnd: {}\n", "3:1: blnd: unknown key 'blnd'; did you mean"),
    ],
)  # fmt: skip
def test_what_cannot_be_extended_is_told_with_its_place(text: str, problem: str) -> None:
    write(base="extends: eagle\n", sub__other="extends: eagle\n", mine=text)
    (first,) = problems()
    assert first.startswith(f"mine.yaml:{problem}"), first


def test_every_part_of_another_machine_is_told() -> None:
    write(mine="extends: eagle\ninitial: a\nstates: {a: {}}\ntransitions: []\n")
    assert [p.partition(": ")[0] for p in problems()] == ["mine.yaml:2:1", "mine.yaml:3:1",
                                                         "mine.yaml:4:1"]  # fmt: skip


def test_a_way_around_leads_back() -> None:
    write(
        mine="extends: a.yaml\n", a="name: a\nextends: sub/b.yaml\n", sub__b="extends: ../a.yaml\n"
    )
    assert problems() == [
        "sub/b.yaml:1:10: extends: a graph cannot extend itself: "
        "mine.yaml > a.yaml > sub/b.yaml > sub/../a.yaml"
    ]


def test_a_chain_has_an_end() -> None:
    names = [f"f{i}" for i in range(8)]
    write(**{name: f"extends: {base}.yaml\n" for name, base in pairwise(names)})
    write(f7="extends: eagle\n")
    assert problems("f0.yaml") == [
        "f7.yaml:1:10: extends: more than 8 files extend one another: "
        + " > ".join([f"{name}.yaml" for name in names] + ["graphs/eagle.yaml"])
    ]
    write(f6=open_source("machines/decode").text)
    assert open_graph("f0.yaml").graph.name == "decode"


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("", "base.yaml:1:1: graph: the file is empty; a graph is a mapping of keys"),
        ("# nothing\n", "base.yaml:1:1: graph: the file is empty; a graph is a mapping of keys"),
        ("- a\n", "base.yaml:1:1: graph: a list at the top; a graph is a mapping of keys"),
        ("5\n", "base.yaml:1:1: graph: the number 5 at the top; a graph is a mapping of keys"),
        ("hello\n", "base.yaml:1:1: graph: the string 'hello' at the top; a graph is a mapping"),
        ("a: [\n", "base.yaml:2:1: yaml: "),
        ("version: 2\n", "base.yaml:1:10: version: the graph needs format 2, this specsot reads 1"),
        ("extends: eagel\n", "base.yaml:1:10: extends: 'eagel': no such file or shipped graph"),
    ],
)
def test_a_base_that_is_no_graph_is_told_there(base: str, problem: str) -> None:
    write(base=base, mine="version: 1\nextends: base.yaml\n")
    assert problems()[0].startswith(problem)


def test_a_graph_inside_a_run_file_extends_nothing() -> None:
    with pytest.raises(GraphError, match="unknown key 'extends'"):
        load_program(Source("extends: eagle\n", "run.yaml"), op_table())
