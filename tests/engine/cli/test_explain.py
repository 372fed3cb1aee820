"""`specsot explain`: every code is explained, and its example gives that code and no other."""

import json
import shlex
from pathlib import Path

import pytest
from helpers.commands import CommandLine

from specsot.engine.bench.experiment import read_experiment
from specsot.engine.cli.graphs import Explanation, explanations
from specsot.engine.cli.main import COMMANDS
from specsot.engine.errors import Code
from specsot.engine.prepare.files import SHIPPED, open_graph
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import RunOptions
from specsot.states.graph.load import op_table
from specsot.states.text.prompts import FOLDER, load_template
from specsot.states.yaml.source import GraphError, ProblemCode

KNOWN = explanations()
HEAD = "version: 1\nname: mine\nextends: {base}\n\n"
OWN_OP = "ops: [answer.merge]"  # of the machine `decode`
TABLE = op_table()


def test_every_code_is_explained_and_no_other() -> None:
    assert list(KNOWN) == [*ProblemCode, *(str(int(code)) for code in Code)]
    assert len({KNOWN[code].title for code in ProblemCode}) == len(ProblemCode)
    kinds = {"block", "machine", "file", "own", "name", "set", "template", "experiment"}
    assert {KNOWN[code].kind for code in ProblemCode} == kinds
    assert all(KNOWN[code].wrong and KNOWN[code].right for code in ProblemCode)
    assert all(len(code) == 4 and code[0] == "G" and code[1:].isdigit() for code in ProblemCode)


def replaced(text: str, one: Explanation, piece: str) -> str:
    assert one.right in text
    return text.replace(one.right, piece, 1)


def given(one: Explanation, wrong: bool) -> list[ProblemCode]:
    piece, module = (one.wrong, one.module) if wrong else (one.right, one.module_right)
    text, sets, mine = piece, [], Path("mine.yaml")
    if one.kind == "block":
        text = HEAD.format(base=one.base) + piece
    elif one.kind == "machine":
        text = replaced((SHIPPED / "machines" / f"{one.base}.yaml").read_text(), one, piece)
    elif one.kind == "own":
        Path("own_ops.py").write_text(module or one.module)
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
