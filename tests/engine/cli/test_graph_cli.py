"""`specsot check | show | list | schema | explain` as a user runs them; the example of every code
gives that code and no other."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.commands import CommandLine

from specsot.engine.bench.experiment import read_experiment
from specsot.engine.cli.graphs import explanations
from specsot.engine.cli.main import COMMANDS
from specsot.engine.errors import Code
from specsot.engine.prepare.files import SHIPPED, graph_names, open_graph, open_source
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.view.diagram import mermaid
from specsot.states.graph.graph import Graph
from specsot.states.graph.load import op_table
from specsot.states.text.prompts import FOLDER, load_template
from specsot.states.yaml.source import GraphError, ProblemCode, Source

ROOT = Path(__file__).parents[3]
MISSING = object()


def test_check_without_arguments_checks_what_ships(cli: CommandLine) -> None:
    assert cli("check") == 0
    lines = cli.out.split("\n")
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"graphs/{name}.yaml" for name in graph_names()
    ]
    assert all(": good (" in line for line in lines[:-1])


def test_check_tells_good_and_bad_apart_and_takes_changes(cli: CommandLine, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\n")
    assert cli("check", "eagle", str(bad), "nothing") == 3
    out, err = cli.out, cli.err
    assert re.fullmatch(r"graphs/eagle.yaml: good \(\d+ states, \d+ transitions\)\n", out)
    assert f"{bad}:1:1: graph: the key 'name' is missing" in err
    assert "nothing: file: no such file or shipped graph" in err
    assert cli("check", "eagle", "nothing", "--json") == 3
    document = json.loads(cli.out)
    assert document["schema_version"] == 1 and document["graphs"] == ["graphs/eagle.yaml"]
    assert [problem["file"] for problem in document["problems"]] == ["nothing"]
    assert cli("check", "eagle", "--set", "drafter.kind=none") == 0
    assert cli("check", "eagle", "--set", "drafter.kin=none") == 3
    assert "--set drafter.kin=none: drafter.kin: unknown key 'kin'" in cli.err


def test_show_prints_the_file_as_it_is(cli: CommandLine) -> None:
    assert cli("show", "bim_eagle") == 0
    assert cli.out == (ROOT / "graphs/bim_eagle.yaml").read_text(encoding="utf-8")
    assert "extends: machines/skeleton.yaml" in cli.out and "\nstates:" not in cli.out


@pytest.mark.parametrize("sets", [(), ("--set", "drafter.kind=none", "--set", "layout.order=fcfs")])
def test_show_full_prints_one_file(sets: tuple[str, ...], cli: CommandLine, tmp_path: Path) -> None:
    assert cli("show", "bim_blend_merge", "--full", *sets) == 0
    file = tmp_path / "whole.yaml"
    file.write_text(cli.out)
    assert cli("check", str(file)) == 0
    assert open_graph(str(file)).graph == open_graph("bim_blend_merge", sets[1::2]).graph
    text = file.read_text()
    assert "extends" not in text and "    ops: [draft.grow_tree_, outline.force]\n" in text
    assert "- {from: schedule, to: parse, when: outlines_finished}\n" in text


def test_show_resolved_names_states_ways_and_functions(cli: CommandLine) -> None:
    assert cli("show", "bim_eagle", "--resolved") == 0
    text = cli.out
    assert all(f"\n  {name}" in text for name in open_graph("bim_eagle").graph.states)
    assert "num_draft_tokens=4" in text and re.search(r"^attention +auto$", text, re.MULTILINE)
    assert re.search(r"^  schedule +> parse +when outlines_finished$", text, re.MULTILINE)
    assert "states.phases.grow_tree.grow_tree_()" in text
    assert "states.phases.expand_root.intake_(attention=auto)" in text
    tools = [f"Tool{number}" for number in range(25)]
    change = f"skeleton.tools=[{', '.join(tools)}]"
    assert cli("show", "bim_plain", "--resolved", "--set", change) == 0
    assert cli.out.count("Tool24") == 1 and "tools=[25 of them]" in cli.out
    (shown,) = re.findall(r"^ +tools=(.*?)^\w", cli.out, re.MULTILINE | re.DOTALL)
    assert 2 <= len(shown.strip().split("\n")) <= 4
    assert Source(f"tools: {shown}", "shown").data["tools"] == tools, "YAML as it stands"


def test_mermaid_keeps_its_own_words_apart(cli: CommandLine) -> None:
    assert cli("show", "eagle", "--mermaid") == 0
    lines = cli.out.split("\n")
    assert lines[0] == "stateDiagram-v2" and lines[1] == "  [*] --> schedule"
    assert "  schedule --> merge: answers_ready" in lines and "  done --> [*]" in lines
    edges = len(open_graph("eagle").graph.transitions)
    assert len(lines) == len(["kind", "first", "last", "end"]) + edges
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


def test_list(cli: CommandLine) -> None:
    assert cli("list") == 0
    lines = cli.out.strip().split("\n")
    docs = {name: open_graph(name).graph.doc for name in graph_names()}
    assert [tuple(line.split(maxsplit=1)) for line in lines] == list(docs.items())
    assert max(map(len, lines)) <= 100
    assert cli.json("list")["graphs"] == docs
    assert cli("list", "--ops") == 0
    words = ("branch.commit_", "newcomers_fit", "kv_draft", "drops attention plan", "max_branches")
    assert all(word in cli.out for word in words)


def validator(cli: CommandLine) -> Any:
    """A validator of what `specsot schema` prints."""
    kind = pytest.importorskip("jsonschema").Draft202012Validator
    assert cli("schema") == 0
    schema = json.loads(cli.out)
    kind.check_schema(schema)
    return kind(schema)


def test_the_schema_accepts_what_ships(cli: CommandLine) -> None:
    editor = validator(cli)
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
        *((name, MISSING) for name in ("layout", "states", "name")),
    ],
)
def test_the_schema_refuses_what_check_refuses(block: str, value: Any, cli: CommandLine) -> None:
    data = {**open_source("bim_eagle").data, block: value}
    data = {key: one for key, one in data.items() if one is not MISSING}
    editor = validator(cli)
    assert list(editor.iter_errors(json.loads(json.dumps(data))))
    assert list(editor.iter_errors({"name": "a"}))


def test_a_terminal_shows_the_place(
    tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "g.yaml"
    file.write_text("extends: bim_eagle\nversion: 1\nname: g\ndoc: d\nlayout: {kind: bimm}\n")
    assert cli("check", str(file)) == 3
    plain = cli.err
    assert plain.count("\n") == 1
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for command in ("check", "show", "run"):
        assert cli(command, str(file), *(["--full"] if command == "show" else [])) == 3
        said = cli.err
        *_, line, mark, _ = said.split("\n")
        assert plain.strip() in said
        assert line == "    layout: {kind: bimm}" and mark.index("^") == line.index("bimm")
    assert cli("run", "bim_eagle", "--set", f"drafter.num_draft_tokens={'x' * 400}") == 3
    assert "drafter.num_draft_tokens: must be" in cli.err, "an option has no line"


NO_GRAPHS = ("experiments", "published")


def test_graphs_of_ones_own_at_first(
    tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("init", str(tmp_path / "mine")) == 0
    monkeypatch.chdir(tmp_path / "mine")
    for file in (p for p in Path("graphs").rglob("*.yaml") if p.parent.name not in NO_GRAPHS):
        first = file.read_text().split("\n", 1)[0]
        schema = file.parent / first.removeprefix("# yaml-language-server: $schema=")
        assert "properties" in json.loads(schema.read_text())
    graph = Path("graphs/bim_eagle.yaml")
    graph.write_text(graph.read_text().replace("num_draft_tokens: 4", "num_draft_tokens: 7"))
    assert cli("check", *(str(p) for p in sorted(Path("graphs").glob("*.yaml")))) == 0
    assert open_graph("graphs/bim_eagle.yaml").graph.drafter.offered == 7
    assert Path("specsot.yaml").is_file() and Path("graphs/prompts/documents.jsonl").is_file()
    assert cli("init") == 2
    assert "is there already" in cli.err
    assert "num_draft_tokens: 7" in graph.read_text()


# -- explanations ----------------------------------------------------------------------------------

# What the keys of explained.yaml are where a code has none.
KEYS = dict.fromkeys(("command", "kind", "base", "wrong", "right", "module", "module_right"), "")
KEYS |= {"when": "check", "encoding": "utf-8"}
KNOWN = {code: SimpleNamespace(**KEYS | page) for code, page in explanations().items()}
HEAD = "version: 1\nname: mine\nextends: {base}\n\n"
OWN_OP = "ops: [answer.merge]"  # of the machine `decode`
TABLE = op_table()


def test_every_code_is_explained_and_no_other() -> None:
    assert list(KNOWN) == [*ProblemCode, *(str(int(code)) for code in Code)]
    for one in KNOWN.values():
        assert vars(one).keys() == {*KEYS, "title", "means", "mend"}
        assert one.when in ("check", "run")
        assert one.title and one.means and one.mend
    assert len({KNOWN[code].title for code in ProblemCode}) == len(ProblemCode)
    kinds = {"block", "machine", "file", "own", "name", "set", "template", "experiment"}
    assert {KNOWN[code].kind for code in ProblemCode} == kinds
    assert all(KNOWN[code].wrong and KNOWN[code].right for code in ProblemCode)
    assert all(len(code) == 4 and code[0] == "G" and code[1:].isdigit() for code in ProblemCode)


def replaced(text: str, one: SimpleNamespace, piece: str) -> str:
    assert one.right in text
    return text.replace(one.right, piece, 1)


def given(one: SimpleNamespace, wrong: bool) -> list[ProblemCode]:
    piece = one.wrong if wrong else one.right
    text, sets, mine = piece, [], Path("mine.yaml")
    if one.kind == "block":
        text = HEAD.format(base=one.base) + piece
    elif one.kind == "machine":
        text = replaced((SHIPPED / "machines" / f"{one.base}.yaml").read_text(), one, piece)
    elif one.kind == "own":
        Path("own_ops.py").write_text(one.module)
        machine = (SHIPPED / "machines" / "decode.yaml").read_text()
        called = piece if piece.startswith("{") else repr(piece)
        text = machine.replace(OWN_OP, f"ops: [answer.merge, {called}]", 1)
    elif one.kind == "experiment":
        block = piece.removeprefix("{").removesuffix("}") if piece.startswith("{") else piece
        text = f"{{version: 1, name: mine, doc: Mine., {block}}}"
    elif one.kind == "set":
        sets = [piece]
    elif one.kind == "template":
        text = replaced((FOLDER / f"{one.base}.yaml").read_text(), one, piece)
    mine.write_text(text, encoding=one.encoding if wrong else "utf-8")
    graph = {"name": piece, "set": one.base}.get(one.kind, str(mine))
    try:
        if one.kind == "template":
            load_template(mine)
        elif one.kind == "experiment":
            read_experiment(mine)
        else:
            open_graph(graph, sets, TABLE)
        if one.when == "run" and one.kind != "template":
            from specsot.engine.run.api import load

            load(prepare(RunOptions(graph=graph, threads=1))).board()
    except GraphError as error:
        return [problem.code for problem in error.problems]
    return []


@pytest.mark.parametrize("code", ProblemCode)
def test_an_example_gives_exactly_its_code_until_it_is_mended(
    code: ProblemCode, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    one = KNOWN[code]
    assert set(given(one, wrong=True)) == {code}
    if one.when == "run" and one.kind != "template":
        open_graph("mine.yaml", (), TABLE)  # which `check` accepts
    assert given(one, wrong=False) == []


def test_each_can_be_asked_for_and_they_are_listed(cli: CommandLine) -> None:
    for name in KNOWN:
        assert cli("explain", name) == 0 and cli.out.startswith(f"{name}: ")
        assert max(map(len, cli.out.splitlines())) <= 160
    cli("explain")
    lines = cli.out.splitlines()
    assert len(lines) == len(ProblemCode) + len(Code) and lines[0].startswith("G001  ")
    made = cli.json("explain", "[g202]")
    assert made["code"] == "G202" and made["wrong"] == "ops: [draft.grow_tree]"
    assert cli("explain", "G20") == Code.USAGE
    assert "no code 'G20'; did you mean 'G2" in cli.err


def test_a_message_and_its_document_show_the_code(here: Path, cli: CommandLine) -> None:
    cli("check", "eagle", "--set", "drafter.num_draft_token=3")
    assert cli.err.endswith("did you mean 'num_draft_tokens'? [G101]\n")
    cli("check", "eagle", "--set", "drafter.num_draft_token=3", "--json")
    (problem,) = json.loads(cli.out)["problems"]
    assert problem["code"] == "G101" and "[G101]" not in problem["message"]


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5])
def test_an_exit_codes_command_ends_with_it(code: int, cli: CommandLine, here: Path) -> None:
    words = shlex.split(KNOWN[str(code)].command or "")
    assert words[0] == "specsot" and words[1] in {command.name for command in COMMANDS}
    assert cli(*words[1:]) == code
