"""One-line mistakes in a graph: what is said, and where.

The mark ¦ stands where the problem must point; it is taken out before the graph is read."""

from importlib.resources import files

import pytest
from helpers.toy_graph import refused

from specsot.states.graph.load import load_program, op_table
from specsot.states.yaml.source import Source

MARK = "¦"
GROW = "[draft.grow_tree_, outline.force]"
PARSE = "[outline.parse_]"
NODES = "num_draft_tokens: {1: 10, 2: 6, 4: 3}"
DRAFTER = f"drafter:\n  kind: eagle3\n  {NODES}\n  draft_depth: 4\n  top_k: 4\n"
SIX = "[skeleton, verify, continuous_decode, parse, parallel_prefill, merge]"
MACHINE = (files("specsot") / "graphs/machines/skeleton.yaml").read_text(encoding="utf-8")
GOOD = MACHINE.replace("name: skeleton\n", "name: bim_eagle\n", 1).replace(
    "drafter: {kind: none}\n", DRAFTER, 1
)

MISTAKES = [
    # names
    ("to: verify}", "to: ¦verfy}", "no state 'verfy'; did you mean 'verify'?"),
    ("from: idle,", "from: ¦idel,", "no state 'idel'; did you mean 'idle'?"),
    ("when: newcomers_fit", "when: ¦newcomer_fit", "no guard 'newcomer_fit'; did you mean 'newco"),
    ("initial: schedule", "initial: ¦schedul", "initial: no state 'schedul'; did you mean 'sched"),
    ("- branch.tree_", "- ¦branch.tre_", "states.verify.ops.0: no op 'branch.tre_'; did you mean"),
    ("- branch.tree_", "- {op: ¦branch.tre_}", "states.verify.ops.0.op: no op 'branch.tre_'; did"),
    ("- branch.tree_", "- ¦__class__", "no op '__class__'"),
    ("- branch.tree_", "- ¦os.getcwd", "no op 'os.getcwd'"),
    # layout and drafter
    ("kind: eagle3", "kind: ¦eagel3", "no drafter 'eagel3'; did you mean 'eagle3'?; there are: no"),
    ("kind: eagle3", "kind: ¦hydra", "no drafter 'hydra'; there are: none, eagle3"),
    ("kind: eagle3", "kind: ¦''", "no drafter ''; there are: none, eagle3"),
    ("kind: eagle3", "kind: ¦null", "drafter.kind: must not be null"),
    ("kind: eagle3", "kind: ¦true", "drafter.kind: must be one of: none, eagle3"),
    ("kind: bim\n", "kind: ¦''\n", "no layout ''; there are: bim"),
    ("kind: eagle3", "kind: ¦3", "drafter.kind: must be one of: none, eagle3"),
    ("kind: eagle3", "kind: ¦[a]", "drafter.kind: must be one of: none, eagle3"),
    ("kind: eagle3", "¦knd: eagle3", "drafter: the key 'kind' is missing"),
    ("kind: bim\n", "kind: ¦bin\n", "no layout 'bin'; did you mean 'bim'?; there are: bim"),
    ("kind: bim\n  kv_slots", "¦kv_slots", "layout: the key 'kind' is missing"),
    # keys
    ("top_k: 4", "¦topk: 4", "drafter.topk: unknown key 'topk'; did you mean 'top_k'?"),
    ("max_branches: 8", "¦max_brnches: 8", "unknown key 'max_brnches'; did you mean 'max_br"),
    ("to: grow_tree}", "to: grow_tree, ¦too: done}", "unknown key 'too'; did you mean 'to'?"),
    ("initial:", "¦intial: x\ninitial:", "unknown key 'intial'; did you mean 'initial'?"),
    ("    final: true", "    final: true\n    ¦5: 1", "states.done.5: unknown key 5"),
    ("name: bim_eagle", "name: bim_eagle\n¦name: b", "name: this key is given twice, first in l"),
    ("version: 1\nname: bim_eagle", "¦version: 1", "graph: the key 'name' is missing"),
    ("{from: schedule, to: idle}", "¦{from: schedule}", ": the key 'to' is missing"),
    # values
    ("draft_depth: 4", "draft_depth: ¦0", "drafter.draft_depth: must be at least 1, not 0"),
    ("draft_depth: 4", "draft_depth: ¦65", "drafter.draft_depth: must be at most 64, not 65"),
    ("draft_depth: 4", "draft_depth: ¦true", "drafter.draft_depth: must be an integer, not true"),
    ("draft_depth: 4", "draft_depth: ¦4.0", "must be an integer, not the number 4.0"),
    ("draft_depth: 4", "draft_depth: ¦1e1", "must be an integer, not the number 10.0"),
    ("draft_depth: 4", "draft_depth: ¦'4'", "must be an integer, not the string '4'"),
    ("draft_depth: 4", "draft_depth: ¦five", "must be an integer, not the string 'five'"),
    ("draft_depth: 4", "draft_depth: ¦[4]", "must be an integer, not a list"),
    ("draft_depth: 4", "draft_depth: ¦{a: 4}", "must be an integer, not a mapping"),
    ("draft_depth: 4", "draft_depth: ¦~", "drafter.draft_depth: must not be null"),
    ("draft_depth: 4", "draft_depth: ¦-1", "must be at least 1, not -1"),
    ("draft_depth: 4", "draft_depth: ¦" + "9" * 31, "must be at most 64, not 9999"),
    ("draft_depth: 4", "draft_depth: ¦.inf", "must be an integer, not the number inf"),
    ("temperature: 0", "temperature: ¦.nan", "must be a finite number, not nan"),
    ("temperature: 0", "temperature: ¦-.inf", "must be a finite number, not -inf"),
    ("temperature: 0", "temperature: ¦-1", "must be at least 0.0, not -1"),
    ("temperature: 0", "temperature: ¦false", "must be a number, not false"),
    ("temperature: 0", "temperature: ¦hot", "must be a number, not the string 'hot'"),
    ("grammar: true", "grammar: ¦yes", "must be true or false, not the string 'yes'"),
    ("grammar: true", "grammar: ¦1", "must be true or false, not the number 1"),
    ("share: outline", "share: ¦all", "must be 'outline' or 'prompt', not 'all'"),
    ("tools: [Search]", "tools: ¦Search", "must be a list, not the string 'Search'"),
    ("tools: [Search]", "tools: [¦'a|b']", "skeleton.tools.0: 'a|b' must match"),
    ("tools: [Search]", "tools: [¦None]", "skeleton.tools.0: 'None' is not the name of a tool"),
    ("version: 1", "version: ¦2", "needs format 2, this specsot reads 1: upgrade specsot"),
    ("version: 1", "version: ¦true", "version: must be an integer, not true"),
    ("version: 1", "version: ¦0", "version: must be at least 1, not 0"),
    ("version: 1", "version: ¦'1'", "version: must be an integer, not the string '1'"),
    ("name: bim_eagle", "name: ¦../x", "name: '../x' must match"),
    ("name: bim_eagle", "name: ¦5", "name: must be a string, not the number 5"),
    ("max_new_tokens: 256", "max_new_tokens: ¦5000", "= 5012 slots, but layout.kv_slots is 4096"),
    (
        "max_num_branches: 8",
        "max_num_branches: ¦1000",
        "1000 branches with 3 nodes each need 5000 slots",
    ),
    # nodes by number of branches
    (NODES, "num_draft_tokens: ¦{2: 6}",
     "drafter.num_draft_tokens: needs an entry for 1 active branch"),
    (NODES, "num_draft_tokens: ¦{}",
     "drafter.num_draft_tokens: needs an entry for 1 active branch"),
    (NODES, "num_draft_tokens: {1: ¦0}",
     "drafter.num_draft_tokens.1: must be an integer from 1 to 4096"),
    (NODES, "num_draft_tokens: {1: 4, 2: ¦true}",
     "drafter.num_draft_tokens.2: must be an integer from 0 to 4096"),
    (NODES, "num_draft_tokens: {1: 4, ¦a: 1}",
     "a number of active branches is an integer from 1 to 1024"),
    (NODES, "num_draft_tokens: {1: 4, ¦0: 1}",
     "a number of active branches is an integer from 1 to 1024"),
    (NODES, "num_draft_tokens: ¦true",
     "must be auto, an integer from 1 to 4096, or a map {active branches"),
    (NODES, "num_draft_tokens: ¦[1]",
     "must be auto, an integer from 1 to 4096, or a map {active branches"),
    (NODES, "num_draft_tokens: ¦53",
     "53 nodes are too many: draft_depth 4 and top_k 4 draft at most 52"),
    # states and their names
    ("  merge:\n", "  ¦trigger:\n", "a state cannot be called 'trigger'"),
    ("  merge:\n", "  ¦start:\n", "a state cannot be called 'start'"),
    ("  merge:\n", "  ¦to_x:\n", "a state cannot be called 'to_x'"),
    ("  merge:\n", "  ¦Merge:\n", "'Merge' is not a state name"),
    ("  merge:\n", "  ¦mergé:\n", "'mergé' is not a state name"),
    ("  merge:\n", "  ¦__class__:\n", "'__class__' is not a state name"),
    ("  merge:\n", "  ¦1:\n", "1 is not a state name"),
    ("  merge:\n", "  ¦'a.b':\n", "'a.b' is not a state name"),
    ("    final: true", "    final: ¦yes", "must be true or false, not the string 'yes'"),
    ("  done:\n    final: true", "  done:¦", "states.done: must not be null"),
    # settings of an op
    (PARSE, "[{op: outline.parse_, with: {¦direct_tokn: 3}}]", "no setting 'direct_tokn'; did you"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦true}}]", "must be an integer, not true"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦null}}]", "must be an integer, not null"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦$drafter.levles}}]",
     "names no setting"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦$drafter.__class__}}]",
     "names no setting"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦$drafter.model_copy}}]",
     "names no setting"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦$states}}]",
     "names no setting of this graph"),
    (PARSE, "[{op: outline.parse_, with: {direct_tokens: ¦$skeleton.tools}}]",
     "an integer, not a list"),
    (GROW, "[{op: draft.grow_tree_, ¦wth: {draft_depth: 1}}]",
     "unknown key 'wth'; did you mean 'with'"),
    (GROW, "[¦3]", "states.grow_tree.ops.0: must be a mapping, not the number 3"),
    (GROW, "¦draft.grow_tree_", "must be a list, not the string 'draft.grow_tree_'"),
    # ways
    ("{from: schedule, to: idle}", "{from: schedule, to: idle, when: no_more_requests}\n"
     "  - ¦{from: schedule, to: schedule}", "the cycle schedule > schedule comm"),
    ("{from: schedule, to: idle}", "{from: schedule, to: idle, when: newcomers_fit}",
     "the last transition from 'schedule' must have no `when`"),
    # an edge from each of several states
    (SIX, "[skeleton, ¦verfy, verify]", "transitions.9.from.1: no state 'verfy'; did you mean"),
    (SIX, "[skeleton, ¦3]", "transitions.9.from.1: must be a string, not the number 3"),
    (SIX, "[skeleton, ¦~]", "transitions.9.from.1: must not be null"),
    (SIX, "[skeleton, ¦[verify]]", "transitions.9.from.1: must be a state, or a list of at least"),
    (SIX, "¦[]", "transitions.9.from: must be a state, or a list of at least one"),
    (SIX, "¦{verify: 1}", "transitions.9.from: must be a string, not a mapping"),
    (SIX, "[verify, skeleton, parse, parallel_prefill, continuous_decode, merge, ¦verify]",
     "transitions.9.from.6: never taken: transitions.9.from"),
    (SIX + ", to: schedule", SIX + ", to: ¦schedul", "transitions.9.to: no state 'schedul'"),
    (SIX + ", to: schedule", SIX + ", to: schedule, when: ¦finished",
     "transitions.9.when: no guard 'finished'"),
    (SIX + ", to: schedule", SIX + ", to: schedule, ¦whn: newcomers_fit",
     "transitions.9.whn: unknown key 'whn'; did you mean 'when'?"),
    ("{" + f"from: {SIX}, to: schedule" + "}", "¦{" + f"from: {SIX}" + "}",
     "transitions.9: the key 'to' is missing"),
    # values on every path
    ("[request.admit_, mask.build,", "[request.admit_,", "reads 'attention', unset on some path"),
    ("ops: [answer.merge]", "ops: [answer.merge, ¦mask.build]", "reads 'rows', unset on some path"),
]  # fmt: skip


TABLE = op_table()


def said(text: str) -> list[str]:
    return refused(lambda: load_program(Source(text, "g.yaml"), TABLE))


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES)
def test_says_what_and_where(old: str, new: str, message: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    line = said(text.replace(MARK, ""))
    assert message in line[0], line
    if MARK in new:
        before = text[: text.index(MARK)]
        place = f"g.yaml:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}: "
        assert line[0].startswith(place), line[0]


def test_one_mistake_may_be_several_problems_of_one_stage() -> None:
    text = GOOD.replace("kind: eagle3", "kind: none")
    problems = [line.partition(" ")[2] for line in said(text)]
    assert len(problems) == 3
    for key, problem in zip(("num_draft_tokens", "draft_depth", "top_k"), problems, strict=True):
        assert problem.startswith(f"drafter.{key}: '{key}' belongs to the drafter eagle3")
        assert problem.endswith(", this is none")


def test_problems_of_a_stage_come_together_in_file_order() -> None:
    text = GOOD.replace("draft_depth: 4", "draft_depth: 0").replace("version: 1", "version: 0")
    text = text.replace("grammar: true", "grammar: 1")
    text = text.replace("from: idle, to: done", "form: idle, to: done")
    places = [int(line.split(":")[1]) for line in said(text)]
    assert len(places) == 5 and places == sorted(places)


def test_a_later_stage_waits_for_an_earlier_one() -> None:
    text = GOOD.replace("when: newcomers_fit", "when: newcomer_fit", 1)  # a name
    text = text.replace("  - {from: schedule, to: idle}\n", "")  # a way
    assert len(said(text)) == 1
