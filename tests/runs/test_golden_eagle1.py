"""Whole EAGLE-1 runs of the reference code (branch v1), with its static tree.

The recorded runs are not trimmed: a run ends after the round in which more than `max_new_tokens`
tokens were committed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import FixedBook, Graphs, Tiny, start
from safetensors.torch import load_file
from specsot_eagle1.static_tree import MC_SIM_7B_63, lay_out
from torch import Tensor

from specsot.engine.models import with_drafter
from specsot.engine.run.core import EngineCore

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
