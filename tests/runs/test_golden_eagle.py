"""Whole EAGLE-2 and EAGLE-3 runs of the reference code, reproduced through `eagle2` and `eagle`.

The recorded runs are not trimmed at a stop token or a budget: a run ends after the round in which
more than `max_new_tokens` tokens were committed, and one more draft follows it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.support import FixedBook, Graphs, Tiny, start
from safetensors.torch import load_file
from torch import Tensor

from specsot.engine.models import with_drafter
from specsot.engine.run.core import EngineCore

EAGLE = Path(__file__).parents[1] / "golden" / "eagle"
CASES = {"e2_llama": "eagle2", "e3_llama": "eagle3", "e3_qwen3": "eagle3"}
GRAPHS = {"eagle2": "eagle2", "eagle3": "eagle"}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@dataclass
class Case:
    """One golden case, its tensors, and a session that runs its prompts."""

    facts: Any
    rounds: dict[str, Tensor]
    first: dict[str, Tensor]
    open: Callable[[str], EngineCore]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, golden: Callable[[str], Tiny], graphs: Graphs) -> Case:
    folder = EAGLE / request.param
    facts = json.loads((folder / "case.json").read_text())
    prompts = {str(j): run["prompt_ids"] for j, run in enumerate(facts["runs"])}
    nodes, levels = facts["total_token"] - 1, facts["depth"] + 1
    kind = CASES[request.param]
    models = with_drafter(golden(facts["target"]).models, EAGLE / "drafts" / facts["draft"], kind)
    session = graphs.session(
        GRAPHS[kind],
        models,
        FixedBook(prompts, stop_ids=(2,)),
        budget=facts["max_new_tokens"] + 3 * levels,
        sets=(
            f"drafter.num_draft_tokens={nodes}",
            f"drafter.draft_depth={levels}",
            f"drafter.top_k={facts['top_k']}",
        ),
    )
    return Case(
        facts,
        load_file(folder / "rounds.safetensors"),
        load_file(folder / "first_round.safetensors"),
        lambda prompt: start(session, [prompt]),
    )


def states(run: EngineCore, most: int = 400) -> Iterator[str]:
    run.advance()  # the first `schedule`: nobody has begun
    for _ in range(most):
        run.advance()
        yield run.state


@pytest.mark.parametrize("prompt", range(3))
def test_every_tree_and_every_acceptance_of_a_run_is_the_recorded_one(
    case: Case, prompt: int
) -> None:
    golden = case.facts["runs"][prompt]
    run = case.open(str(prompt))
    branch, drafts = None, 0
    for state in states(run):
        branch = run.requests[0].branches[0]
        pool = run.manager.kv_draft
        if state == "expand_root":
            assert len(pool.slots_of(branch.owner)) == golden["kv_len_after_each_draft"][drafts]
        elif state == "grow_tree":
            _compare_tree(run, case.rounds, f"p{prompt}.r{drafts}", branch.tokens[-1])
            assert pool.current_length == golden["kv_len_after_each_draft"][drafts]
            drafts += 1
            if drafts > golden["rounds"]:
                break
    assert drafts == golden["rounds"] + 1
    assert branch.accepted == golden["accept_lengths"]
    written = [*golden["prompt_ids"], *branch.tokens]
    assert written == [*golden["output_ids"], golden["pending_token_after_last_round"]]
    greedy = golden["naive_greedy_ids"]
    assert written[: len(greedy)] == greedy
    assert 1 + sum(branch.accepted) / golden["rounds"] == pytest.approx(golden["tau"])


def _compare_tree(run: EngineCore, rounds: dict[str, Tensor], key: str, root: int) -> None:
    proposal = run.board["proposal"]
    tokens = [root, *proposal.tokens_SN[0].tolist()]
    parents = [-1, *(proposal.parents_SN[0] + 1).tolist()]
    depths = [0, *proposal.depths_SN[0].tolist()]
    assert tokens == rounds[f"{key}.draft_tokens"].tolist(), key
    assert parents == rounds[f"{key}.parents"].tolist(), key
    assert depths == rounds[f"{key}.tree_position_ids"].tolist(), key


def test_the_drafters_cache_holds_the_recorded_keys_and_values(case: Case) -> None:
    """After the first two expand_root; growing the tree changes none of these rows."""
    run, found = case.open("0"), 0
    for state in states(run):
        if state in ("expand_root", "grow_tree"):
            pool = run.manager.kv_draft
            slots = pool.slots_of(run.branches[0].owner).tolist()
            name = ("draft", "round1")[found]
            for part, golden in enumerate(("k", "v")):
                recorded = case.first[f"{name}.kv.{golden}"]
                torch.testing.assert_close(pool.data[0, part][:, slots], recorded, **CLOSE)
            found += state == "grow_tree"
        if found == 2:
            break
    key = "before_second"
    assert case.facts["draft_kv_len"][key] == len(case.facts["runs"][0]["prompt_ids"])
    assert case.facts["draft_kv_len"]["after_second"] == len(slots)


def test_the_first_draft_is_the_recorded_one_level_by_level(case: Case) -> None:
    """What goes into the drafter at each level: tokens, hidden states, positions, own ancestors."""
    run = case.open("0")
    seen = _spied(run)
    for state in states(run):
        if state == "expand_root":
            frontier = run.board["frontier"]
        if state == "grow_tree":
            break
    best = case.first["root.logprobs"].topk(case.facts["top_k"]).values
    torch.testing.assert_close(frontier.scores_SK[0], best, **CLOSE)
    root, *levels = seen
    assert root["tokens"].tolist() == [case.first["draft.in_ids"].tolist()]
    torch.testing.assert_close(root["out"][0], case.first["root.out_hidden"], **CLOSE)
    past = len(case.first["draft.in_ids"])
    assert len(levels) == case.facts["depth"]
    for level, call in enumerate(levels):
        name = f"level{level}"
        assert call["tokens"][0].tolist() == case.first[f"{name}.in_ids"].tolist()
        assert call["positions"][0].tolist() == case.first[f"{name}.position_ids"].tolist()
        mask_QK = call["mask"][0]
        assert mask_QK[:, :past].all(), "the whole history is seen"
        own = mask_QK[:, past : past + (level + 1) * case.facts["top_k"]]
        assert own.int().tolist() == case.first[f"{name}.tree_mask"].int().tolist()
        torch.testing.assert_close(call["hidden"][0], case.first[f"{name}.in_hidden"], **CLOSE)
        torch.testing.assert_close(call["out"][0], case.first[f"{name}.out_hidden"], **CLOSE)
        logprobs = run.board["drafter"].model.logits(call["out"][0]).log_softmax(-1)
        torch.testing.assert_close(logprobs, case.first[f"{name}.logprobs"], **CLOSE)


def _spied(run: EngineCore) -> list[dict[str, Tensor]]:
    """Every forward of the drafter of this run: what went in and what came out."""
    calls: list[dict[str, Tensor]] = []
    drafter = run.board["drafter"].model

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(drafter, name)

        def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, *rest: Any) -> Tensor:
            out = drafter.forward(tokens, hidden, positions, *rest)
            given = {"tokens": tokens, "hidden": hidden, "positions": positions}
            calls.append(given | {"mask": rest[1].groups[0].mask_GqK, "out": out})
            return out

    run.board["drafter"].model = Spy()
    return calls


def test_verify_sees_the_trees_rows_at_the_recorded_positions(case: Case) -> None:
    run, kept = case.open("0"), {}

    def keep(event: Any) -> None:
        if getattr(event, "op", "") == "target.forward_":
            kept.update({key: run.board[key] for key in ("rows", "logits", "features")})

    run.sink = keep
    for state in states(run):
        if state == "verify":
            break
    past = len(case.first["prompt_ids"])
    assert kept["rows"].positions_BQ[0].tolist() == case.first["verify.position_ids"].tolist()
    assert kept["rows"].positions_BQ.min() == past
    torch.testing.assert_close(kept["logits"], case.first["verify.logits"], **CLOSE)
    feature = "verify.aux_hidden" if case.facts["use_eagle3"] else "verify.last_hidden"
    torch.testing.assert_close(kept["features"], case.first[feature], **CLOSE)
    tree = case.first["tree.tree_mask"].int().tolist()
    assert kept["rows"].ancestors_STT[0].int().tolist() == tree
