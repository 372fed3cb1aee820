"""EAGLE-1's static trees (examples/eagle1): layouts, refusals, and whole runs of the reference code
(branch v1), which end after the round in which more than `max_new_tokens` tokens were committed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import FixedBook, Graphs, Tiny, start
from safetensors.torch import load_file
from specsot_eagle1.static_tree import MC_SIM_7B_63, Node, StaticTree, lay_out
from torch import Tensor

from specsot.engine.models import with_drafter
from specsot.engine.prepare.files import open_graph
from specsot.engine.run.core import EngineCore
from specsot.states.yaml.source import GraphError

EAGLE = Path(__file__).parents[1] / "golden" / "eagle"
FACTS: dict[str, Any] = json.loads((EAGLE / "e1_llama" / "eagle1.json").read_text())
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
Opened = Callable[[int], EngineCore]


@pytest.fixture(scope="module")
def opened(golden: Callable[[str], Tiny], graphs: Graphs) -> Opened:
    models = with_drafter(golden("llama").models, EAGLE / "drafts" / "llama_eagle2", "eagle1")
    prompts = {str(j): run["prompt_ids"] for j, run in enumerate(FACTS["runs"])}
    session = graphs.session(
        "autoregressive",
        models,
        FixedBook(prompts, stop_ids=(2,)),
        budget=FACTS["settings"]["max_new_tokens"] + 20,
        sets=("drafter.kind=eagle1",),
    )
    return lambda prompt: start(session, [str(prompt)])


def advance_to(run: EngineCore, state: str) -> None:
    run.advance()
    while run.state != state:
        run.advance()


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


@pytest.mark.parametrize("prompt", range(3))
def test_every_acceptance_and_every_token_is_the_recorded_one(opened: Opened, prompt: int) -> None:
    golden, run = FACTS["runs"][prompt], opened(prompt)
    committed = 0
    for number in range(golden["rounds"]):
        advance_to(run, "grow_tree")
        branch = run.requests[0].branches[0]
        assert run.manager.kv_draft.current_length == branch.length, "tree rows are given back"
        if f"candidates_round{number}" in golden:
            paths = _paths(run, branch.tokens[-1])
            assert paths == golden[f"candidates_round{number}"]
        advance_to(run, "verify")
        committed += branch.accepted[-1] + 1
    assert branch.accepted == golden["accept_lengths"]
    written = [*golden["prompt_ids"], *branch.tokens]
    assert written[:-1] == golden["output_ids"]
    assert committed / golden["rounds"] == pytest.approx(golden["tau"])


def _paths(run: EngineCore, root: int) -> list[list[int]]:
    tokens: list[int] = [root, *run.board["proposal"].tokens_SN[0].tolist()]
    rows = FACTS["verify"]["retrieve_indices"]
    return [[tokens[i] if i >= 0 else -1 for i in row] for row in rows]


def test_the_first_draft_sees_the_recorded_best_tokens(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ss_token`, `ss_logit`: the ten best of the root and of every node with children."""
    first = load_file(EAGLE / "e1_llama" / "eagle1_first_round.safetensors")
    run, logits = opened(0), []
    drafter = run.board["drafter"].model

    def kept(hidden_RH: Tensor) -> Tensor:
        logits.append(type(drafter).logits(drafter, hidden_RH))
        return logits[-1]

    monkeypatch.setattr(drafter, "logits", kept)
    features: list[Tensor] = []
    monkeypatch.setattr(drafter, "fuse", lambda taps: features.append(taps) or taps)
    advance_to(run, "grow_tree")
    torch.testing.assert_close(features[0], first["in_hidden"], **CLOSE)
    top = torch.cat(logits).topk(FACTS["draft_topk"])
    assert top.indices.tolist() == first["ss_token"].tolist()
    torch.testing.assert_close(top.values, first["ss_logit"], **CLOSE)


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
