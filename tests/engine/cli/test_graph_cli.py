"""`specsot check | show | list | schema` as a user runs them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import call

from specsot.engine.prepare.files import graph_names, open_graph, open_source
from specsot.engine.view.diagram import mermaid
from specsot.states.graph.graph import Graph
from specsot.states.yaml.source import Source

ROOT = Path(__file__).parents[3]
Printed = pytest.CaptureFixture[str]


def test_check_without_arguments_checks_what_ships(capsys: Printed) -> None:
    assert call("check") == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"graphs/{name}.yaml" for name in graph_names()
    ]
    assert all(": good (" in line for line in lines[:-1])


def test_check_tells_good_and_bad_apart(capsys: Printed, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\n")
    assert call("check", "eagle", str(bad), "nothing") == 3
    out, err = capsys.readouterr()
    assert re.fullmatch(r"graphs/eagle.yaml: good \(\d+ states, \d+ transitions\)\n", out)
    assert f"{bad}:1:1: graph: the key 'name' is missing" in err
    assert "nothing: file: no such file or shipped graph" in err


def test_check_takes_changes(capsys: Printed) -> None:
    assert call("check", "eagle", "--set", "drafter.kind=none") == 0
    assert call("check", "eagle", "--set", "drafter.kin=none") == 3
    assert "--set drafter.kin=none: drafter.kin: unknown key 'kin'" in capsys.readouterr().err


def test_check_as_json(capsys: Printed) -> None:
    assert call("check", "eagle", "nothing", "--json") == 3
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and document["graphs"] == ["graphs/eagle.yaml"]
    assert [p["file"] for p in document["problems"]] == ["nothing"]


def test_show_prints_the_file_as_it_is(capsys: Printed) -> None:
    assert call("show", "bim_eagle") == 0
    text = capsys.readouterr().out
    assert text == (ROOT / "graphs/bim_eagle.yaml").read_text(encoding="utf-8")
    assert "extends: machines/skeleton.yaml" in text and "\nstates:" not in text


@pytest.mark.parametrize("sets", [(), ("--set", "drafter.kind=none", "--set", "layout.order=fcfs")])
def test_show_full_prints_a_graph_of_one_file(
    sets: tuple[str, ...], capsys: Printed, tmp_path: Path
) -> None:
    assert call("show", "bim_blend_merge", "--full", *sets) == 0
    file = tmp_path / "whole.yaml"
    file.write_text(capsys.readouterr().out)
    assert call("check", str(file)) == 0
    assert open_graph(str(file)).graph == open_graph("bim_blend_merge", sets[1::2]).graph
    text = file.read_text()
    assert "extends" not in text and "    ops: [draft.grow_tree_, outline.force]\n" in text
    assert "- {from: schedule, to: parse, when: outlines_finished}\n" in text


def test_show_resolved_names_states_and_ways(capsys: Printed) -> None:
    assert call("show", "bim_eagle", "--resolved") == 0
    text = capsys.readouterr().out
    graph = open_graph("bim_eagle").graph
    assert all(f"\n  {name}" in text for name in graph.states)
    assert "num_draft_tokens=4" in text and re.search(r"^attention +auto$", text, re.MULTILINE)
    assert re.search(r"^  schedule +> parse +when outlines_finished$", text, re.MULTILINE)


def test_show_resolved_names_the_functions(capsys: Printed) -> None:
    assert call("show", "bim_eagle", "--resolved", "--set", "drafter.kind=eagle3") == 0
    text = capsys.readouterr().out
    assert "states.phases.grow_tree.grow_tree_()" in text
    assert "states.phases.expand_root.intake_(attention=auto)" in text


def test_show_resolved_tells_a_long_setting_once_and_folded(capsys: Printed) -> None:
    change = "drafter.kind=eagle1"
    assert call("show", "eagle", "--resolved", "--set", change) == 0
    text = capsys.readouterr().out
    tree = open_graph("eagle", [change]).graph.model_dump()["drafter"]["tree"]
    assert len(tree) == 25 and text.count("[0,0,0,0,1]") == 1
    (shown,) = re.findall(r"^ +tree=(.*?)^\w", text, re.MULTILINE | re.DOTALL)
    assert 2 <= len(shown.strip().split("\n")) <= 4
    written = Source(f"tree: {shown}", "shown").data["tree"]  # YAML as it stands
    assert written == [list(path) for path in tree]
    tools = ", ".join(f"Tool{number}" for number in range(25))
    assert call("show", "bim_plain", "--resolved", "--set", f"skeleton.tools=[{tools}]") == 0
    text = capsys.readouterr().out
    assert text.count("Tool24") == 1 and "tools=[25 of them]" in text


def test_show_a_bad_graph(capsys: Printed) -> None:
    assert call("show", "egle") == 3
    assert "did you mean 'eagle'?" in capsys.readouterr().err


def test_mermaid(capsys: Printed) -> None:
    assert call("show", "eagle", "--mermaid") == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "stateDiagram-v2" and lines[1] == "  [*] --> schedule"
    assert "  schedule --> merge: answers_ready" in lines and "  done --> [*]" in lines
    edges = len(open_graph("eagle").graph.transitions)
    assert len(lines) == len(["kind", "first", "last", "end"]) + edges


def test_mermaid_keeps_its_own_words_apart() -> None:
    data: dict[str, Any] = dict(open_source("eagle").data)
    data |= {"initial": "note", "states": {"note": {}, "end": {"final": True}}}
    data["transitions"] = [{"from": "note", "to": "end"}]
    assert mermaid(Graph.model_validate(data)).split("\n")[1:] == [
        '  state "note" as note_',
        '  state "end" as end_',
        "  [*] --> note_",
        "  note_ --> end_",
        "  end_ --> [*]",
    ]


def test_list(capsys: Printed) -> None:
    assert call("list") == 0
    lines = capsys.readouterr().out.strip().split("\n")
    docs = {name: open_graph(name).graph.doc for name in graph_names()}
    assert [tuple(line.split(maxsplit=1)) for line in lines] == list(docs.items())
    assert max(map(len, lines)) <= 100
    assert call("list", "--json") == 0
    assert json.loads(capsys.readouterr().out)["graphs"] == docs


def test_list_ops_is_the_vocabulary_for_writers(capsys: Printed) -> None:
    assert call("list", "--ops") == 0
    text = capsys.readouterr().out
    for word in (
        "branch.commit_",
        "newcomers_fit",
        "kv_draft",
        "drops attention plan",
        "max_branches",
    ):
        assert word in text


def validator(capsys: Printed) -> Any:
    """A validator of what `specsot schema` prints."""
    kind = pytest.importorskip("jsonschema").Draft202012Validator
    assert call("schema") == 0
    schema = json.loads(capsys.readouterr().out)
    kind.check_schema(schema)
    return kind(schema)


def test_the_schema_accepts_what_ships(capsys: Printed) -> None:
    editor = validator(capsys)
    for name in (*graph_names(), "machines/skeleton"):
        whole = open_source(name)
        for source in (whole, Source(whole.text, name)):
            data = json.loads(json.dumps(source.data))  # keys as editors see them
            assert list(editor.iter_errors(data)) == []


@pytest.mark.parametrize(
    ("block", "value"),
    [
        ("drafter", {"kind": "eagle3", "num_draft_tokens": {"2": 5}}),
        ("drafter", {"kind": "eagle3", "num_draft_tokens": {"1": 0}}),
        ("drafter", {"kind": "eagle3", "num_draft_tokens": 0}),
        ("drafter", {"kind": "none", "num_draft_tokens": 3}),
        ("layout", {"kind": "bam"}),
        ("layout", {"kind": "bim", "kv_slots": None}),
        ("skeleton", None),
        ("skeleton", {"tools": ["a|b"]}),
        ("limits", {"max_new": 3}),
        ("states", {}),
        ("states", {"a": {"ops": [3]}}),
        ("version", 2),
        ("extra", 1),
        ("extends", "eagle"),  # beside states
        ("attention", "sparse"),
        ("transitions", [{"from": [], "to": "done"}]),
        ("transitions", [{"from": ["merge", 3], "to": "done"}]),
    ],
)
def test_the_schema_refuses_what_check_refuses(block: str, value: Any, capsys: Printed) -> None:
    data = {**open_source("bim_eagle").data, block: value}
    assert list(validator(capsys).iter_errors(json.loads(json.dumps(data))))


@pytest.mark.parametrize("key", ["extends", "layout", "states", "name"])
def test_the_schema_misses_what_check_misses(key: str, capsys: Printed) -> None:
    data = dict(open_source("bim_eagle").data) if key != "extends" else {"name": "a"}
    data.pop(key, None)
    assert list(validator(capsys).iter_errors(json.loads(json.dumps(data))))


def test_wrong_usage_is_exit_code_2(capsys: Printed) -> None:
    assert call("show") == 2
    assert call("show", "eagle", "--full", "--mermaid") == 2
    assert call("show", "eagle", "--set", "drafter.kind=none") == 2
    assert "--set changes no file" in capsys.readouterr().err
    assert call("check", "--nonsense") == 2


def test_on_a_terminal_the_place_is_shown(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "g.yaml"
    file.write_text("extends: bim_eagle\nversion: 1\nname: g\ndoc: d\nlayout: {kind: bimm}\n")
    assert call("check", str(file)) == 3
    plain = capsys.readouterr().err
    assert plain.count("\n") == 1
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for command in ("check", "show", "run"):
        assert call(command, str(file), *(["--full"] if command == "show" else [])) == 3
        said = capsys.readouterr().err
        *_, line, mark, _ = said.split("\n")
        assert plain.strip() in said
        assert line == "    layout: {kind: bimm}" and mark.index("^") == line.index("bimm")


def test_graphs_of_ones_own_to_begin_with(
    tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("init", str(tmp_path / "mine")) == 0
    monkeypatch.chdir(tmp_path / "mine")
    for file in (p for p in Path("graphs").rglob("*.yaml") if p.parent.name != "experiments"):
        first = file.read_text().split("\n", 1)[0]
        schema = file.parent / first.removeprefix("# yaml-language-server: $schema=")
        assert "properties" in json.loads(schema.read_text())
    graph = Path("graphs/bim_eagle.yaml")
    graph.write_text(graph.read_text().replace("num_draft_tokens: 4", "num_draft_tokens: 7"))
    capsys.readouterr()
    assert call("check", *(str(p) for p in sorted(Path("graphs").glob("*.yaml")))) == 0
    assert open_graph("graphs/bim_eagle.yaml").graph.drafter.offered == 7
    assert Path("specsot.yaml").is_file() and Path("graphs/prompts/documents.jsonl").is_file()
    assert call("init") == 2
    assert "is there already" in capsys.readouterr().err
    assert "num_draft_tokens: 7" in graph.read_text()


def test_on_a_terminal_an_option_has_no_line(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert call("run", "bim_eagle", "--set", f"drafter.num_draft_tokens={'x' * 400}") == 3
    assert "drafter.num_draft_tokens: must be" in capsys.readouterr().err
