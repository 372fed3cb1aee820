"""One-line mistakes in a shipped graph: what is said, and where."""

from importlib.resources import files

import pytest

from specsot.ops.registry import OpTable
from specsot.states.load import load_program, op_table
from specsot.states.source import GraphError, Source

GOOD = (files("specsot") / "graphs" / "bim_eagle.yaml").read_text(encoding="utf-8")
GROW = "[draft.grow_tree_, outline.force]"
NODES = "{1: 10, 2: 6, 4: 3}"


@pytest.fixture(scope="module")
def table() -> OpTable:
    return op_table()


def said(text: str, table: OpTable) -> list[str]:
    try:
        load_program(Source(text, "g.yaml"), table)
    except GraphError as error:
        return str(error).split("\n")
    raise AssertionError("the graph was accepted")


def place(text: str, mark: str, start: int) -> str:
    """`file:line:column` of the first `mark` at or after `start`."""
    index = text.index(mark, start)
    return f"g.yaml:{text.count(chr(10), 0, index) + 1}:{index - text.rfind(chr(10), 0, index)}"


ONE_PROBLEM = [
    # names
    ("to: verify}", "to: verfy}", "verfy", "no state 'verfy'; did you mean 'verify'?"),
    ("when: all_finished", "when: all_finish", "all_finish}", "no guard 'all_finish'; did you"),
    ("initial: skeleton", "initial: skelton", "skelton", "initial: no state 'skelton'; did you"),
    ("- branch.tree_", "- branch.tre_", "branch.tre_", "verify.ops.0: no op 'branch.tre_'; did"),
    ("- branch.tree_", "- __class__", "__class__", "no op '__class__'"),
    ("- branch.tree_", "- os.getcwd", "os.getcwd", "no op 'os.getcwd'"),
    # layout and drafter
    ("kind: eagle3", "kind: eagel3", "eagel3", "no drafter 'eagel3'; did you mean 'eagle3'?;"),
    ("kind: eagle3", "kind: dflash", "dflash", "no drafter 'dflash'; there are: none, eagle3"),
    ("kind: eagle3", "kind: 3", "3", "drafter.kind: must be one of: none, eagle3"),
    ("kind: eagle3", "kind: [a]", "[a]", "drafter.kind: must be one of: none, eagle3"),
    ("kind: bim\n", "kind: bin\n", "bin", "no layout 'bin'; did you mean 'bim'?; there are: bim"),
    ("  kind: bim\n", "", "capacity", "layout: the key 'kind' is missing"),
    ("kind: eagle3", "knd: eagle3", "knd", "drafter: the key 'kind' is missing"),
    # keys
    ("top_k: 4", "topk: 4", "topk", "drafter.topk: unknown key 'topk'; did you mean 'top_k'?"),
    ("max_branches: 8", "max_brnches: 8", "max_br", "unknown key 'max_brnches'; did you mean"),
    ("to: done}", "too: done, to: done}", "too", "unknown key 'too'; did you mean 'to'?"),
    ("    final: true", "    final: true\n    5: 1", "5", "states.done.5: unknown key 5"),
    ("name: bim_eagle", "name: bim_eagle\nname: b", "name: b\n", "name: this key is given twice"),
    ("name: bim_eagle\n", "", "version", "graph: the key 'name' is missing"),
    ("to: done}", "too: done}", "too", "unknown key"),
    # values
    ("levels: 4", "levels: 0", "0", "drafter.levels: must be at least 1, not 0"),
    ("levels: 4", "levels: 65", "65", "drafter.levels: must be at most 64, not 65"),
    ("levels: 4", "levels: true", "true", "drafter.levels: must be an integer, not true"),
    ("levels: 4", "levels: 4.0", "4.0", "must be an integer, not the number 4.0"),
    ("levels: 4", "levels: 1e1", "1e1", "must be an integer, not the number 10.0"),
    ("levels: 4", "levels: '4'", "'4'", "must be an integer, not the string '4'"),
    ("levels: 4", "levels: five", "five", "must be an integer, not the string 'five'"),
    ("levels: 4", "levels: [4]", "[4]", "must be an integer, not a list"),
    ("levels: 4", "levels: {a: 4}", "{a", "must be an integer, not a mapping"),
    ("levels: 4", "levels: ~", "~", "drafter.levels: must not be null"),
    ("levels: 4", "levels: -1", "-1", "must be at least 1, not -1"),
    ("levels: 4", "levels: " + "9" * 31, "999", "must be at most 64, not 9999"),
    ("levels: 4", "levels: .inf", ".inf", "must be an integer, not the number inf"),
    ("levels: 4", "levels: 1", "{1: 10", "10 nodes are too many: levels 1 and top_k 4 draft at"),
    ("temperature: 0", "temperature: .nan", ".nan", "must be a finite number, not nan"),
    ("temperature: 0", "temperature: -.inf", "-.inf", "must be a finite number, not -inf"),
    ("temperature: 0", "temperature: 0.7", "0.7", "only 0 (greedy decoding) is possible so far"),
    ("temperature: 0", "temperature: false", "false", "must be a number, not false"),
    ("temperature: 0", "temperature: hot", "hot", "must be a number, not the string 'hot'"),
    ("grammar: true", "grammar: yes", "yes", "must be true or false, not the string 'yes'"),
    ("grammar: true", "grammar: 1", "1", "must be true or false, not the number 1"),
    ("share: outline", "share: all", "all", "must be 'outline' or 'prompt', not 'all'"),
    ("tools: [Search]", "tools: Search", "Search", "must be a list, not the string 'Search'"),
    ("tools: [Search]", "tools: ['a|b']", "'a|b'", "skeleton.tools.0: 'a|b' must match"),
    ("version: 1", "version: 2", "2", "needs format 2, this specsot reads 1: upgrade specsot"),
    ("version: 1", "version: true", "true", "version: must be an integer, not true"),
    ("version: 1", "version: 0", "0", "version: must be at least 1, not 0"),
    ("version: 1", "version: '1'", "'1'", "version: must be an integer, not the string '1'"),
    ("name: bim_eagle", "name: ../x", "../x", "name: '../x' must match"),
    ("name: bim_eagle", "name: 5", "5", "name: must be a string, not the number 5"),
    ("max_new_tokens: 256", "max_new_tokens: 5000", "5000", "= 5012 slots, but layout.capacity is"),
    ("max_active: 8", "max_active: 1000", "1000", "1000 branches with 3 nodes each need 5000"),
    # nodes by number of branches
    (NODES, "{2: 6}", "{2", "drafter.nodes: needs an entry for 1 active branch"),
    (NODES, "{1: 0}", "0}", "drafter.nodes.1: must be an integer from 1 to 4096"),
    (NODES, "{1: 4, a: 1}", "a:", "a number of active branches is an integer from 1 to 1024"),
    (NODES, "{1: 4, 0: 1}", "0:", "a number of active branches is an integer from 1 to 1024"),
    (NODES, "{1: 4, 2: true}", "true", "drafter.nodes.2: must be an integer from 1 to 4096"),
    (NODES, "true", "true", "must be an integer from 1 to 4096, or a map {active branches: nodes}"),
    (NODES, "53", "53", "53 nodes are too many: levels 4 and top_k 4 draft at most 52"),
    (NODES, "[1]", "[1]", "must be an integer from 1 to 4096, or a map"),
    # states and their names
    ("  merge:\n", "  trigger:\n", "trigger", "a state cannot be called 'trigger'"),
    ("  merge:\n", "  start:\n", "start", "a state cannot be called 'start'"),
    ("  merge:\n", "  to_x:\n", "to_x", "a state cannot be called 'to_x'"),
    ("  merge:\n", "  Merge:\n", "Merge", "'Merge' is no state name"),
    ("  merge:\n", "  mergé:\n", "merg", "'mergé' is no state name"),
    ("  merge:\n", "  __class__:\n", "__class__", "'__class__' is no state name"),
    ("  merge:\n", "  1:\n", "1:", "1 is no state name"),
    ("  merge:\n", "  'a.b':\n", "'a.b'", "'a.b' is no state name"),
    ("    final: true", "    final: yes", "yes", "must be true or false, not the string 'yes'"),
    ("  done:\n    final: true", "  done:", "\n\n", "states.done: must not be null"),
    # settings of an op
    (GROW, "[{op: draft.grow_tree_, with: {levls: 3}}]", "levls", "no setting 'levls'; did you"),
    (GROW, "[{op: draft.grow_tree_, with: {levels: true}}]", "true", "an integer, not true"),
    (GROW, "[{op: draft.grow_tree_, with: {levels: $drafter.levles}}]", "$d", "names nothing in"),
    (GROW, "[{op: draft.grow_tree_, with: {levels: $drafter.__class__}}]", "$d", "names nothing"),
    (GROW, "[{op: draft.grow_tree_, with: {levels: $drafter.model_copy}}]", "$d", "names nothing"),
    (GROW, "[{op: draft.grow_tree_, with: {levels: $states}}]", "$s", "names nothing in"),
    (GROW, "[{op: draft.grow_tree_, with: {levels: $skeleton.tools}}]", "$s", "not a list"),
    (GROW, "[{op: draft.grow_tree_, wth: {levels: 1}}]", "wth", "unknown key 'wth'; did you"),
    (GROW, "[3]", "3", "states.grow_tree.ops.0: must be a mapping, not the number 3"),
    (GROW, "draft.grow_tree_", "draft", "must be a list, not the string 'draft.grow_tree_'"),
    # ways
    ("  - {from: parse, to: expand_root}\n", "", None, "the last way out of 'parse' must have no"),
    ("{from: merge, to: done}", "{from: merge}", "from: merge", "the key 'to' is missing"),
    ("{from: parse, to: expand_root}", "{from: parse, to: parse}", "from: parse, to: parse",
     "the cycle parse > parse commits no token: a run could stay in it for ever"),
    # values on every path
    ("[request.admit_, mask.build,", "[request.admit_,", "target", "reads 'visible', unset on"),
    ("    ops: [answer.merge]", "    ops: [answer.merge, mask.build]", "mask", "reads 'rows', un"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "mark", "message"), ONE_PROBLEM)
def test_says_what_and_where(
    old: str, new: str, mark: str | None, message: str, table: OpTable
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    lines = said(text, table)
    assert any(message in line for line in lines), lines
    line = next(line for line in lines if message in line)
    if mark is not None:
        keyed = "missing" in message or "cycle" in message or message.startswith("layout")
        found = place(text, mark, 0 if keyed or new == "" else GOOD.index(old))
        if "are too many" in message or "capacity" in message or message.startswith("'name'"):
            found = place(text, mark, 0)
        assert line.startswith(found + ": "), line
