"""What only a whole graph can tell, on a toy graph; and the shipped graphs under every swap."""

import random
from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from pathlib import Path

import pytest
from helpers.support import SEED
from helpers.toy_graph import GRAPH, changed, load, problems

from specsot.engine.prepare.files import graph_names, open_graph, open_source
from specsot.states.graph.graph import LAYOUTS
from specsot.states.graph.load import load_program, op_table
from specsot.states.graph.plugins import DRAFTERS
from specsot.states.yaml.source import GraphError, Source

FULL = (
    "schedule", "skeleton", "expand_root", "grow_tree", "verify", "parse", "parallel_prefill",
    "continuous_decode", "merge", "idle", "done",
)  # fmt: skip


def test_the_toy_graph_is_good() -> None:
    program = load()
    assert [s.entry.function for s in program.steps["draft"]] == ["draft"]
    assert program.steps["draft"][0].settings == {"top_k": 4, "levels": 5}
    assert program.steps["draft"][0].at == "g.yaml:8"
    assert set(program.guards) == {"toy_done"}


DONE = "  done: {final: true}"
LOOP = "  - {from: verify, to: draft}"
NEVER_ENDS = "can be reached: a run would never end"
UNREAD = "while an earlier one is still unread"
NODES = "{kind: eagle3, num_draft_tokens: 21, draft_depth: 2, top_k: 4}"


# By what is wrong: replaced parts of the toy graph, further lines of it, and its problems.
BAD: dict[str, tuple[list[tuple[str, str]], str, list[str]]] = {
    "a state that cannot be reached":
        ([(DONE, f"  alone: {{}}\n{DONE}")], "  - {from: alone, to: draft}\n",
         ["g.yaml:10:3: states.alone: cannot be reached"]),
    "a state that cannot be reached is checked for names":
        ([(DONE, f"  alone: {{ops: [toy.opn]}}\n{DONE}")], "  - {from: alone, to: draft}\n",
         ["g.yaml:10:17: states.alone.ops.0: no op 'toy.opn'; did you mean 'toy.open'?"]),
    "a state that nothing leaves":
        ([("  - {from: draft, to: verify}\n", "")], "",
         [f"g.yaml:6:1: states: none of done {NEVER_ENDS}",
         "g.yaml:8:3: states.draft: not final, but no transition leaves it",
         "g.yaml:9:3: states.verify: cannot be reached",
         "g.yaml:10:3: states.done: cannot be reached"]),
    "a final state that a transition leaves":
        ([], "  - {from: done, to: draft}\n",
         ["g.yaml:10:3: states.done: final, but a transition leaves it"]),
    "no final state":
        ([("{final: true}", "{}")], "  - {from: done, to: draft}\n",
         ["g.yaml:6:1: states: no state is final: a run would never end"]),
    "no final state can be reached":
        ([("to: done, when: toy_done", "to: draft, when: toy_done")], "",
         [f"g.yaml:6:1: states: none of done {NEVER_ENDS}",
         "g.yaml:10:3: states.done: cannot be reached"]),
    "a part of the graph that never ends":
        ([(DONE, f"  trap: {{ops: [toy.draft, toy.verify_]}}\n{DONE}"), (LOOP,
         "  - {from: verify, to: trap}\n  - {from: trap, to: trap}")], "",
         ["g.yaml:10:3: states.trap: no final state can be reached from here"]),
    "a transition after one without a guard":
        ([("to: done, when: toy_done}", "to: done}")], "",
         ["g.yaml:15:5: transitions.3: never taken: transitions.2 has no guard"]),
    "the last transition has a guard":
        ([(LOOP, "  - {from: verify, to: draft, when: toy_any}")], "",
         ["g.yaml:15:5: transitions.3: the last transition from 'verify' must have no `when`"]),
    "one mistake in several edges is one problem":
        ([("{from: draft, to: verify}", "{from: [draft, prefill], to: verfy}")], "",
         ["g.yaml:13:34: transitions.1.to: no state 'verfy'; did you mean 'verify'?"]),
    "a value that no op writes":
        ([("prefill: {ops: [toy.open]}", "prefill: {}")], "",
         ["g.yaml:8:17: states.draft.ops.0: 'toy.draft' reads 'rows', "
          "which no op of this graph writes"]),
    "a value that is missing on one path only":
        ([("to: draft}", "to: draft, when: toy_any}\n  - {from: prefill, to: verify}")], "",
         ["g.yaml:9:18: states.verify.ops.0: 'toy.verify_' reads 'proposal', "
          "unset on some path here"]),
    "a value that was dropped":
        ([("verify, to: draft}", "verify, to: verify}")], "",
         ["g.yaml:9:18: states.verify.ops.0: 'toy.verify_' reads 'proposal', "
          "unset on some path here"]),
    "a guard reads what no path to it writes":
        ([("to: draft}", "to: draft, when: toy_accepted}\n  - {from: prefill, to: draft}")], "",
         ["g.yaml:12:38: transitions.0.when: 'toy_accepted' reads 'accepted', "
          "unset on some path here"]),
    "the same linear write twice in a row":
        ([("[toy.draft]", "[toy.draft, toy.draft]")], "",
         [f"g.yaml:8:28: states.draft.ops.1: 'toy.draft' writes 'proposal' {UNREAD}"]),
    "the same linear write twice in a row, after another op":
        ([("[toy.open]", "[toy.open, toy.place_, toy.place_]")], "",
         [f"g.yaml:7:41: states.prefill.ops.2: 'toy.place_' writes 'batch' {UNREAD}"]),
    "a linear value that was read but never dropped":
        ([("[toy.open]", "[toy.open, toy.place_, toy.look, toy.place_]")], "",
         [f"g.yaml:7:51: states.prefill.ops.3: 'toy.place_' writes 'batch' {UNREAD}"]),
    "an op that runs again on the same values":
        ([("[toy.open]", "[toy.open, toy.open]")], "",
         ["g.yaml:7:29: states.prefill.ops.1: 'toy.open' has just run (g.yaml:7) on the same "
          "values"]),
    "a linear write in a loop":
        ([("[toy.draft]", "[toy.place_, toy.draft]")], "",
         [f"g.yaml:8:17: states.draft.ops.0: 'toy.place_' writes 'batch' {UNREAD}"]),
    "one of two paths leaves a linear value":  # from a, where the batch may not be committed
        ([("[toy.draft]", "[toy.place_, toy.draft]"), ("  done:",
         "  a: {ops: [toy.commit_]}\n  b: {}\n  done:"), ("to: draft}\n  - {from: draft",
         "to: draft}\n  - {from: a, to: draft}\n  - {from: draft"), (LOOP,
         "  - {from: verify, to: a, when: toy_any}")],
         "  - {from: verify, to: b}\n  - {from: b, to: draft}\n",
         [f"g.yaml:8:17: states.draft.ops.0: 'toy.place_' writes 'batch' {UNREAD}"]),
    "a cycle that commits nothing":
        ([("to: draft}", "to: draft, when: toy_any}\n  - {from: prefill, to: prefill}")], "",
         ["g.yaml:13:5: transitions.1: the cycle prefill > prefill commits no token: "
          "a run could stay in it forever"]),
    "a longer cycle is one problem":
        ([(DONE, f"  a: {{ops: [toy.say]}}\n  b: {{}}\n{DONE}"), ("to: draft}",
         "to: draft, when: toy_any}\n  - {from: prefill, to: a}")],
         "  - {from: a, to: b}\n  - {from: b, to: prefill}\n",
         ["g.yaml:15:5: transitions.1: the cycle prefill > a > b > prefill commits no token: "
          "a run could stay in it forever"]),
    "a transition after one with the same guard":
        ([(LOOP, "  - {from: verify, to: draft, when: toy_done}")], "",
         ["g.yaml:15:5: transitions.3: never taken: transitions.2 has the same guard",
          "g.yaml:15:5: transitions.3: the last transition from 'verify' must have no `when`"]),
    "one of several edges in a line is told by its state":
        ([("{from: draft, to: verify}", "{from: [draft, prefill], to: verify}")], "",
         ["g.yaml:13:20: transitions.1.from.1: never taken: transitions.0 has no guard"]),
    "the last transition of one of several states has a guard":
        ([("{from: verify, to: draft}", "{from: [verify, draft], to: draft, when: toy_any}")], "",
         ["g.yaml:15:13: transitions.3.from.0: the last transition from 'verify' must have no "
          "`when`",
          "g.yaml:15:21: transitions.3.from.1: never taken: transitions.1 has no guard"]),
    "one missing value is one problem":
        ([("prefill: {ops: [toy.open]}", "prefill: {}"), ("[toy.draft]", "[toy.peek, toy.draft]")],
         "", ["g.yaml:8:17: states.draft.ops.0: 'toy.peek' reads 'rows', which no op of this "
              "graph writes"]),
    "more nodes than levels and children":
        ([("{kind: eagle3}", NODES)], "",
         ["g.yaml:4:43: drafter.num_draft_tokens: 21 nodes are too many: draft_depth 2 and top_k 4 "
          "draft at most 20"]),
    "a pool without room for one answer":
        ([("{kind: bim}", "{kind: bim, kv_slots: 267}")], "",
         ["g.yaml:1:1: graph: 1 prompt token + 256 new ones + 10 nodes + 1 = 268 slots, but "
          "layout.kv_slots is 267"]),
    "an op without its block is one problem":
        ([("[toy.open]", "[toy.open, toy.outline]")], "",
         ["g.yaml:7:29: states.prefill.ops.1: 'toy.outline' needs the block 'skeleton' "
          "in this graph"]),
    "a block that no op reads":
        ([("initial:", "skeleton: {}\ninitial:")], "",
         ["g.yaml:5:1: skeleton: no state runs an op that reads this block: toy.outline"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_and_where(name: str) -> None:
    changes, more, expected = BAD[name]
    assert problems(changed(*changes) + more) == expected


@pytest.mark.parametrize(
    "changes",
    [
        [("when: toy_done", "when: toy_accepted")],
        [("[toy.draft]", "[toy.draft, toy.cut, toy.cut]")],  # an update reads what it replaces
        [("[toy.open]", "[toy.open, toy.place_, toy.commit_, toy.place_, toy.commit_]")],
        [("[toy.open]", "[toy.open, toy.place_, toy.commit_, toy.open]")],  # rows are not linear
        [
            ("[toy.draft]", "[toy.place_, toy.draft]"),
            ("[toy.verify_]", "[toy.verify_, toy.commit_]"),
        ],
        [("initial:", "skeleton: {}\ninitial:"), ("[toy.open]", "[toy.open, toy.outline]")],
        [("[toy.open]", "[toy.open, {op: toy.say, with: {times: null}}]")],
        [("{kind: eagle3}", NODES.replace("21", "20"))],
        [("{kind: bim}", "{kind: bim, kv_slots: 268}")],
        [(GRAPH[GRAPH.index("initial:") :], "initial: done\nstates: {done: {final: true}}\n")],
    ],
)
def test_what_is_right(changes: list[tuple[str, str]]) -> None:
    assert load(changed(*changes))


def test_both_paths_that_commit_a_linear_value_are_enough() -> None:
    changes, more, _ = BAD["one of two paths leaves a linear value"]
    assert load(changed(("  b: {}", "  b: {ops: [toy.commit_]}"), text=changed(*changes) + more))


def test_a_list_under_from_is_an_edge_from_each_of_its_states() -> None:
    text = changed(
        ("{from: prefill, to: draft}", "{from: [verify, prefill], to: done, when: toy_done}"),
        ("  - {from: verify, to: done, when: toy_done}\n  - {from: verify, to: draft}",
         "  - from:\n    - prefill\n    - verify\n    to: draft"),
    )  # fmt: skip
    program = load(text)
    edges = [(edge.from_, edge.to, edge.when) for edge in program.graph.transitions]
    assert edges == [
        ("prefill", "done", "toy_done"),
        ("prefill", "draft", None),
        ("draft", "verify", None),
        ("verify", "done", "toy_done"),
        ("verify", "draft", None),
    ]
    at = [program.source.at(("transitions", i)) for i in range(len(edges))]
    assert at == ["g.yaml:12", "g.yaml:14", "g.yaml:13", "g.yaml:12", "g.yaml:14"]
    at = [program.source.at(("transitions", i, "from")) for i in range(len(edges))]
    assert at == ["g.yaml:12", "g.yaml:15", "g.yaml:13", "g.yaml:12", "g.yaml:16"]
    same = load(GRAPH.replace("- {from: prefill,", "- {from: [prefill],"))
    assert same.graph == load().graph


def test_changes_count_edges_as_the_file_does() -> None:
    text = changed(("  - {from: prefill, to: draft}\n", ""), ("{from: verify, to: draft}",
                   "{from: [prefill, verify], to: draft}"))  # fmt: skip
    graph = load(text, ["transitions.1.when=toy_never"]).graph
    assert [edge.when for edge in graph.edges_from("verify")] == ["toy_never", None]
    (option,) = problems(text, ["transitions.2.from=[prefill, verify, x]"])
    assert option.endswith(", x]: transitions.2.from: no state 'x'")


def machine_ops() -> Iterator[tuple[str, str, int]]:
    for machine in MACHINES:
        for state, spec in open_source(machine).data["states"].items():
            yield from ((machine, state, at) for at in range(len(spec.get("ops", ()))))


def test_every_doubled_op_of_the_machines_is_refused() -> None:
    table = op_table()
    for machine, state, at in machine_ops():
        source = open_source(machine)
        ops = source.data["states"][state]["ops"]
        ops.insert(at, ops[at])
        if ops[at] != "outline.force":  # it changes what it reads
            with pytest.raises(GraphError):
                load_program(source, table)


# -- settings ------------------------------------------------------------------------------------


def test_settings_come_from_with_then_from_the_blocks_then_from_the_default() -> None:
    with_ = "{op: toy.draft, with: {levels: 2, extra: $limits.max_rounds}}"
    program = load(changed(("[toy.draft]", f"[{with_}]")))
    assert program.steps["draft"][0].settings == {"levels": 2, "extra": 4000, "top_k": 4}


@pytest.mark.parametrize(
    ("with_", "message"),
    [
        ("{word: 3}", "'word' must be a string, not the number 3"),
        ("{word: null}", "'word' must be a string, not null"),
        ("{times: true}", "'times' must be null or an integer, not true"),
        ("{times: 1.0}", "'times' must be null or an integer, not the number 1.0"),
        ("{times: 'x'}", "'times' must be null or an integer, not the string 'x'"),
        ("{tims: 1}", "'toy.say' has no setting 'tims'; did you mean 'times'?"),
        ("{times: $limits.max_new}", "'$limits.max_new' names no setting of this graph; did you"),
    ],
)
def test_the_kind_of_a_literal_setting(with_: str, message: str) -> None:
    text = changed(("[toy.open]", f"[toy.open, {{op: toy.say, with: {with_}}}]"))
    assert message in problems(text)[0]


def test_attention_stands_at_the_top_of_a_graph() -> None:
    text = changed(("[toy.open]", "[toy.open, toy.attend]"))

    def settings(text: str, *sets: str) -> dict[str, object]:
        return dict(load(text, sets).steps["prefill"][1].settings)

    assert settings(text) == {"attention": "auto"}
    assert settings(text, "attention=dense") == {"attention": "dense"}
    assert settings(f"{text}attention: grouped\n") == {"attention": "grouped"}
    own = text.replace("toy.attend", "{op: toy.attend, with: {attention: dense}}")
    assert settings(f"{own}attention: grouped\n") == {"attention": "dense"}
    assert problems(f"{text}attention: sparse\n") == [
        "g.yaml:16:12: attention: must be 'auto', 'cascade', 'dense' or 'grouped', not 'sparse'"
    ]


# -- the shipped graphs --------------------------------------------------------------------------


MACHINES = ("machines/beam", "machines/decode", "machines/skeleton", "machines/skeleton_merge")


def test_full_graphs_have_the_same_states_and_no_graph_needs_with() -> None:
    graphs = [open_graph(name).graph for name in graph_names()]
    states = [state for graph in graphs for state in graph.states.values()]
    assert not any(call.with_ for state in states for call in state.ops)
    full = [graph for graph in graphs if graph.skeleton is not None]
    assert len(full) >= 2
    assert {tuple(graph.states) for graph in full} == {FULL}


@pytest.mark.parametrize("name", [*graph_names(), *MACHINES])
def test_a_shipped_graph_is_called_as_its_file_and_explains_itself(name: str) -> None:
    program = open_graph(name)
    own = Source(program.source.text, name).data
    assert own["name"] == name.removeprefix("machines/") and program.source.text.startswith("# ")
    assert own["doc"].endswith(".") and own["doc"].count(". ") == 0, "one sentence"
    assert all(state.doc or state.final for state in program.graph.states.values())


def test_states_stand_in_a_few_machine_files() -> None:
    sources = {name: open_source(name) for name in graph_names()}
    assert {source.marks[("states",)].file for source in sources.values()} == {
        f"graphs/{name}.yaml" for name in MACHINES
    }
    assert all(len(source.text.split("\n")) <= 25 for source in sources.values())
    docs = [source.data["doc"] for source in sources.values()]
    assert len(set(docs)) == len(docs)
    folder = files("specsot") / "graphs"
    others = ("experiments", "published")
    shipped = [p for p in Path(str(folder)).rglob("*.yaml") if p.parent.name not in others]
    assert sum(len(p.read_text(encoding="utf-8").split("\n")) for p in shipped) <= 830


WORDS = list(product(graph_names(), LAYOUTS, DRAFTERS))


@pytest.mark.parametrize(("name", "layout", "drafter"), random.Random(SEED).sample(WORDS, 60))
def test_swapping_one_word_resolves(name: str, layout: str, drafter: str) -> None:
    table = op_table()
    sets = (f"layout.kind={layout}", f"drafter.kind={drafter}")
    if open_graph(name).graph.beam is not None and drafter != "none":
        with pytest.raises(GraphError) as caught:  # whatever else a drafter's sizes are short of
            open_graph(name, sets, table)
        assert f"the kind must be none, not {drafter}" in str(caught.value)
        return
    program = open_graph(name, sets, table)
    for steps in program.steps.values():
        for step in steps:
            wanted = {s.name for s in step.entry.settings if s.required}
            assert wanted <= step.settings.keys() <= {s.name for s in step.entry.settings}
