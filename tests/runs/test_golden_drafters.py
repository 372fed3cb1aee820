"""Whole runs of the reference code of EAGLE-1, -2 and -3, DFlash and DDTree, reproduced.

The recorded runs are not trimmed at a budget: they end after the round in which it is reached (of
EAGLE, in which it is exceeded, and one more draft follows); stop ids count where a run has the same
text without."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers.sequences import DFLASH_GOLDEN
from helpers.support import GOLDEN, FixedBook, Graphs, Tiny, start
from safetensors.torch import load_file
from torch import Tensor

from specsot.engine.models import Models, with_drafter
from specsot.engine.run.core import EngineCore
from specsot.models.load.weights import load_target
from specsot.states.request import Branch

EAGLE = GOLDEN / "eagle"
CASES = {"e2_llama": "eagle2", "e3_llama": "eagle3", "e3_qwen3": "eagle3"}
GRAPHS = {"eagle2": "eagle2", "eagle3": "eagle"}
FACTS: dict[str, Any] = json.loads((EAGLE / "e1_llama" / "eagle1.json").read_text())
RUNS: dict[str, Any] = json.loads((DFLASH_GOLDEN / "generate.json").read_text())
TREES: dict[str, Any] = json.loads((DFLASH_GOLDEN / "ddtree.json").read_text())["runs"]
GREEDY = [name for name, case in RUNS.items() if not case["temperature"]]
GREEDY_TREES = [name for name, case in TREES.items() if not case["temperature"]]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


class Tree(NamedTuple):
    """A proposal to the only branch: root token and drafts; parents and depths of the drafts."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]


def states(run: EngineCore, most: int = 2000) -> Iterator[str]:
    run.advance()  # the first `schedule`
    for _ in range(most):
        run.advance()
        yield run.state


def trees(run: EngineCore, rounds: int) -> Iterator[Tree]:
    """The trees of the first rounds, each as soon as it is grown; ends after their verification."""
    drafts = 0
    for state in states(run):
        if state == "grow_tree" and drafts < rounds:
            drafts += 1
            proposal, branch = run.board["proposal"], branch_of(run)
            tokens = [branch.tokens[-1], *proposal.tokens_SN[0].tolist()]
            yield Tree(tokens, proposal.parents_SN[0].tolist(), proposal.depths_SN[0].tolist())
        if len(branch_of(run).accepted) >= rounds:
            return


def branch_of(run: EngineCore) -> Branch:
    branch: Branch = run.requests[0].branches[0]
    return branch


# -- EAGLE-2 and EAGLE-3 --------------------------------------------------------------------------


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


@pytest.mark.parametrize("prompt", range(3))
def test_every_tree_and_every_acceptance_of_a_run_is_the_recorded_one(
    case: Case, prompt: int
) -> None:
    golden = case.facts["runs"][prompt]
    run = case.open(str(prompt))
    for number, tree in enumerate(trees(run, golden["rounds"] + 1)):
        key = f"p{prompt}.r{number}"
        assert tree.tokens == case.rounds[f"{key}.draft_tokens"].tolist(), key
        parents = [-1, *(parent + 1 for parent in tree.parents)]
        assert parents == case.rounds[f"{key}.parents"].tolist(), key
        assert [0, *tree.depths] == case.rounds[f"{key}.tree_position_ids"].tolist(), key
        pool, branch = run.manager.kv_draft, branch_of(run)
        length = golden["kv_len_after_each_draft"][number]
        assert len(pool.slots_of(branch.owner)) == pool.current_length == length
        if number == golden["rounds"]:
            break
    assert number == golden["rounds"] and branch.accepted == golden["accept_lengths"]
    written = [*golden["prompt_ids"], *branch.tokens]
    assert written == [*golden["output_ids"], golden["pending_token_after_last_round"]]
    greedy = golden["naive_greedy_ids"]
    assert written[: len(greedy)] == greedy
    assert 1 + sum(branch.accepted) / golden["rounds"] == pytest.approx(golden["tau"])


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

        def forward(self, *given: Any, **named: Any) -> Any:
            out = drafter.forward(*given, **named)
            noted = dict(zip(("tokens", "hidden", "positions"), given, strict=False))
            attention = named["attention"] if named else given[4]
            calls.append(noted | {"mask": attention.groups[0].mask_GqK, "out": out})
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


# -- EAGLE-1 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(golden: Callable[[str], Tiny], graphs: Graphs) -> Callable[[int], EngineCore]:
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


@pytest.mark.parametrize("prompt", range(3))
def test_every_acceptance_and_every_token_is_the_recorded_one(opened: Any, prompt: int) -> None:
    golden, run = FACTS["runs"][prompt], opened(prompt)
    for number, tree in enumerate(trees(run, golden["rounds"])):
        branch = branch_of(run)
        assert run.manager.kv_draft.current_length == branch.length, "tree rows are given back"
        if f"candidates_round{number}" in golden:
            rows = FACTS["verify"]["retrieve_indices"]
            paths = [[tree.tokens[i] if i >= 0 else -1 for i in row] for row in rows]
            assert paths == golden[f"candidates_round{number}"]
    assert branch.accepted == golden["accept_lengths"]
    written = [*golden["prompt_ids"], *branch.tokens]
    assert written[:-1] == golden["output_ids"]
    assert 1 + sum(branch.accepted) / golden["rounds"] == pytest.approx(golden["tau"])


def test_the_first_draft_sees_the_recorded_best_tokens(
    opened: Any, monkeypatch: pytest.MonkeyPatch
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
    next(trees(run, 1))
    torch.testing.assert_close(features[0], first["in_hidden"], **CLOSE)
    top = torch.cat(logits).topk(FACTS["draft_topk"])
    assert top.indices.tolist() == first["ss_token"].tolist()
    torch.testing.assert_close(top.values, first["ss_logit"], **CLOSE)


# -- DFlash and DDTree ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Models:
    target = load_target(DFLASH_GOLDEN / "target")
    plain = Models(target, None, None, (), torch.device("cpu"), torch.float32)
    return with_drafter(plain, DFLASH_GOLDEN / "draft", "dflash")


def rounds(
    graphs: Graphs, models: Models, graph: str, case: Any, *, count: int, sets: list[str]
) -> tuple[Branch, list[Tree]]:
    """The branch after this many rounds, and their trees."""
    book = FixedBook({"p": case["prompt"]})
    run = start(graphs.session(graph, models, book, budget=40 * count, sets=sets), ["p"])
    proposed = [*trees(run, count)]
    return branch_of(run), proposed


@pytest.mark.parametrize("name", GREEDY)
def test_every_block_and_every_acceptance(name: str, models: Models, graphs: Graphs) -> None:
    case = RUNS[name]
    size, steps = case["block_size"] or 8, case["steps"]
    accepted = case.get("fixed_acceptance_lengths", case["acceptance_lengths"])
    sets = [f"drafter.block_size={size}"]
    branch, blocks = rounds(graphs, models, "dflash", case, count=len(accepted), sets=sets)
    assert [block for block, _, _ in blocks][: len(steps)] == [s["verify_input_ids"] for s in steps]
    assert all(parents == list(range(-1, size - 2)) for _, parents, _ in blocks)
    assert [count + 1 for count in branch.accepted] == accepted
    written = [*case["prompt"], *branch.tokens]
    output = case.get("fixed_output_ids", case["output_ids"])
    assert written[: len(output)] == output


@pytest.mark.parametrize("name", GREEDY_TREES)
def test_every_tree_and_every_acceptance(name: str, models: Models, graphs: Graphs) -> None:
    case = TREES[name]
    sets, count = [f"drafter.num_draft_tokens={case['budget']}"], len(case["acceptance_lengths"])
    branch, grown = rounds(graphs, models, "ddtree", case, count=count, sets=sets)
    for (tokens, parents, depths), recorded in zip(grown, case["rounds"], strict=False):
        own = recorded["tree"]
        assert tokens[1:] == own["node_token_ids"]
        assert depths == own["node_depths"]
        assert [-1, *(parent + 1 for parent in parents)] == own["parents"]
    assert [count + 1 for count in branch.accepted] == case["acceptance_lengths"]
    written = [*case["prompt"], *branch.tokens]
    assert written[: len(case["output_ids"])] == case["output_ids"]
