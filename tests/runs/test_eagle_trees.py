"""EAGLE-1 and EAGLE-2: one head, two kinds of trees, and what they have in common."""

import json
from itertools import product
from typing import Any

import pytest
from helpers.drafters import drafting
from helpers.support import GOLDEN, Tiny, drive, graphs, outline_of, start
from specsot_eagle1.static_tree import MC_SIM_7B_63, Node, StaticTree, lay_out

from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import model_folder
from specsot.engine.run.api import open_session
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import perform
from specsot.models.files import ModelError
from specsot.ops.types import Proposal
from specsot.states.yaml.source import GraphError

FACTS: Any = json.loads((GOLDEN / "eagle" / "e1_llama" / "eagle1.json").read_text())
QUESTIONS = (Prompt("0", "hello"), Prompt("1", "a second question", max_new_tokens=7))


def drafted(made: Tiny, branches: int, *sets: str, layout: str = "bim") -> Proposal:
    """What the first round offers to `branches` branches of one outline."""
    session = graphs.session(
        f"{layout}_plain",
        drafting(made, "eagle2"),
        made.book(stop_ids=()),
        outline=outline_of(branches),
        sets=sets,
    )

    def grown(run: EngineCore) -> bool:
        return run.state == "grow_tree" and len(run.board["proposal"].tokens_SN) == branches

    proposal: Proposal = drive(start(session, QUESTIONS[:1]), until=grown).board["proposal"]
    return proposal


def paths(proposal: Proposal, branch: int) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    tokens, parents = proposal.tokens_SN[branch].tolist(), proposal.parents_SN[branch].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert [len(path) for path in found] == proposal.depths_SN[branch].tolist()
    assert len(set(found)) == len(found) and proposal.valid_SN.all()
    return dict(zip(found, proposal.scores_SN[branch].tolist(), strict=True))


def static(nodes: Any) -> tuple[str, str]:
    return "drafter.kind=eagle1", f"drafter.tree={[list(node) for node in nodes]}"


WIDE = [node for depth in (1, 2, 3) for node in product(range(3), repeat=depth)]


@pytest.mark.parametrize(
    ("nodes", "dynamic"),
    [
        (WIDE[:12], ("drafter.draft_depth=2", "drafter.top_k=3", "drafter.num_draft_tokens=12")),
        (
            [(0,) * n for n in range(1, 6)],
            ("drafter.draft_depth=5", "drafter.top_k=1", "drafter.num_draft_tokens=5"),
        ),
    ],
    ids=["all of two levels", "a chain"],
)
def test_where_both_draft_everything_they_draft_the_same(
    nodes: list[tuple[int, ...]], dynamic: tuple[str, ...], made: Tiny
) -> None:
    one = drafted(made, 3, *static(nodes))
    other = drafted(made, 3, "drafter.kind=eagle2", *dynamic)
    for branch in range(3):
        assert paths(one, branch) == pytest.approx(paths(other, branch), abs=1e-4)


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_node_is_the_same_in_every_tree_that_has_it(layout: str, made: Tiny) -> None:
    whole = drafted(made, 3, *static(WIDE))
    parts = ([(2,), (0,), (2, 1), (2, 1, 2)], [(1,), (1, 0), (1, 2), (1, 2, 0), (1, 0, 0)])
    for part in (*parts, [(2, 0), (0,), (2,), (1,)]):
        some = drafted(made, 3, *static(part), layout=layout)
        for branch in range(3):
            every, few = paths(whole, branch), paths(some, branch)
            chosen = dict(zip(sorted(WIDE, key=lambda n: (len(n), n)), every, strict=True))
            assert set(few) == {chosen[node] for node in part}
            assert few == pytest.approx({path: every[path] for path in few}, abs=1e-4)


def test_the_packaged_head_drafts_for_both_kinds() -> None:
    found: list[list[int]] = []
    rounds: list[int] = []
    for graph, *sets in (["autoregressive"], ["eagle2"], ["eagle2", "drafter.kind=eagle1"]):
        session = open_session(graph, sets=sets, max_new_tokens=40, threads=1)
        run, recorder, _ = perform(session, [Prompt("1", "Tell me about honey bees.")])
        found.append(run.requests[0].branches[0].tokens)
        rounds.append(recorder.meter.rounds)
        run.close()
    assert found[0] == found[1] == found[2]
    assert max(rounds[1:]) < 0.8 * rounds[0]


def test_a_kind_that_has_no_packaged_model() -> None:
    with pytest.raises(ModelError, match=r"no embedded other model: name one with --drafter-model"):
        model_folder("embedded", "other")


# -- layouts of static trees ----------------------------------------------------------------------


def test_the_default_tree_is_the_recorded_one() -> None:
    assert [list(node) for node in MC_SIM_7B_63] == FACTS["tree_choices"]
    tree, verify = lay_out(MC_SIM_7B_63), FACTS["verify"]
    assert [0, *tree.depths] == verify["tree_position_ids"]
    paths = verify["retrieve_indices"]
    parents = {row[i]: row[i - 1] for row in paths for i in range(1, len(row)) if row[i] > 0}
    assert [parents[i + 1] - 1 for i in range(len(tree.parents))] == list(tree.parents)
    inner = [level for level in tree.levels if level.inner]
    masks = [[list(map(int, row)) for row in level.ancestors] for level in inner]
    assert masks == FACTS["draft"]["attn_mask"]


def nodes_of(tree: StaticTree) -> list[Node]:
    found: list[list[Node]] = []
    inner: list[Node] = [()]
    for level in tree.levels:
        pairs = zip(level.above, level.ranks, strict=True)
        found.append([(*inner[above], rank) for above, rank in pairs])
        inner = [found[-1][index] for index in level.inner]
    return [node for level in found for node in level]


TREES: dict[str, tuple[Node, ...]] = {
    "EAGLE-1's": MC_SIM_7B_63,
    "one node": ((3,),),
    "a chain": ((0,), (0, 0), (0, 0, 0)),
    "in any order": ((1, 1, 2), (0, 1), (1, 1), (1,), (0,), (1, 1, 0)),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_laid_out_by_depth_and_rank(name: str) -> None:
    given = TREES[name]
    tree = lay_out(given)
    nodes = nodes_of(tree)
    assert nodes == sorted(given, key=lambda node: (len(node), node))
    assert [len(node) for node in nodes] == list(tree.depths)
    parents = [nodes[parent] if parent >= 0 else () for parent in tree.parents]
    assert parents == [node[:-1] for node in nodes]
    assert all(level.breadth > max(level.ranks) for level in tree.levels)


@pytest.mark.parametrize("name", TREES)
def test_inner_nodes_see_their_own_path(name: str) -> None:
    given = TREES[name]
    inner = sorted({node[:-1] for node in given} - {()}, key=lambda node: (len(node), node))
    tree = lay_out(given)
    assert tree.inner == len(inner)
    for level in tree.levels:
        known = inner[: len(level.inner_depths)]
        assert [len(node) for node in known] == list(level.inner_depths)
        mine = [node for node in known if len(node) == level.depth]
        for node, seen in zip(mine, level.ancestors, strict=True):
            sees = [other for other, visible in zip(known, seen, strict=True) if visible]
            assert sees == [node[:length] for length in range(1, len(node) + 1)]


WRONG = [
    ("[]", "must not be empty"),
    ("[[0], []]", "a node is a list of child ranks, not empty"),
    ("[[0], [1, 0]]", "[1, 0] needs its parent [1] in the tree"),
    ("[[0], [1], [0]]", "[0] is given twice"),
    ("[[0], [-1]]", "must be at least 0, not -1"),
    ("[[0], [256]]", "must be at most 255, not 256"),
    ("[[0], [true]]", "must be an integer, not true"),
    ("[[0], 1]", "must be a list, not the number 1"),
    ("5", "must be a list, not the number 5"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_graph_with_a_wrong_tree_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        open_graph("bim_eagle", ("drafter.kind=eagle1", f"drafter.tree={text}"))
    assert f"drafter.tree: {message}" in str(caught.value)
