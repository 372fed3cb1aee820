"""Trees from marginals: the golden ones, every tie as a full enumeration has it, no host reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from specsot.ops.draft.dflash import chain, tree
from specsot.ops.types import ancestors

GOLDEN = Path(__file__).parents[2] / "golden" / "dflash"
FACTS: dict[str, Any] = json.loads((GOLDEN / "ddtree.json").read_text())
CASES = [(case["case"], case["budget"]) for case in FACTS["trees"]]


@pytest.fixture(scope="module")
def at() -> dict[str, Tensor]:
    return load_file(GOLDEN / "ddtree.safetensors")


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return found


@pytest.mark.parametrize(("case", "budget"), CASES)
def test_golden_trees(at: dict[str, Tensor], case: str, budget: int) -> None:
    prefix = f"tree.{case}.{budget}."
    golden = {k.removeprefix(prefix): v for k, v in at.items() if k.startswith(prefix)}
    drafted = tree(at[f"tree.{case}.logits"].log_softmax(-1)[None], budget)
    assert drafted.tokens_SN[0].tolist() == golden["node_token_ids"].tolist()
    assert (drafted.parents_SN[0] + 1).tolist() == golden["parents"].tolist()[1:]
    assert drafted.depths_SN[0].tolist() == golden["node_depths"].tolist()
    assert drafted.valid_SN.all() and drafted.scores_SN.dtype == torch.float32
    torch.testing.assert_close(
        drafted.scores_SN[0].double(), golden["node_logprobs"], rtol=0, atol=1e-4
    )
    seen = ancestors(drafted.parents_SN, drafted.levels)[0]
    assert torch.equal(seen, golden["visibility"].bool())


@pytest.mark.parametrize("facts", FACTS["trees"], ids=lambda f: f"{f['case']}-{f['budget']}")
def test_golden_walks_and_expectations(at: dict[str, Tensor], facts: dict[str, Any]) -> None:
    drafted = tree(at[f"tree.{facts['case']}.logits"].log_softmax(-1)[None], facts["budget"])
    assert drafted.tokens_SN.shape[1] == facts["num_nodes"]
    expected = facts["expected_acceptance"]
    assert float(drafted.scores_SN.exp().sum()) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    said = at[f"tree.{facts['case']}.{facts['budget']}.posterior"][0].tolist()
    children = list(zip(drafted.parents_SN[0].tolist(), drafted.tokens_SN[0].tolist(), strict=True))
    walk = [0]
    while (walk[-1] - 1, said[walk[-1]]) in children:
        walk.append(children.index((walk[-1] - 1, said[walk[-1]])) + 1)
    assert (walk, said[walk[-1]]) == (facts["accepted_indices"], facts["next_token"])


def test_golden_inputs_of_a_verification(at: dict[str, Tensor]) -> None:
    facts = FACTS["compile"]
    drafted = tree(at[f"tree.{facts['case']}.logits"].log_softmax(-1)[None], facts["budget"])
    tokens = [facts["root_token"], *drafted.tokens_SN[0].tolist()]
    positions = [facts["start"], *(drafted.depths_SN[0] + facts["start"]).tolist()]
    assert tokens == at["compile.verify_input_ids"][0].tolist()
    assert positions == at["compile.verify_position_ids"][0].tolist()
    seen = ancestors(drafted.parents_SN, drafted.levels)[0]
    allowed = at["compile.attention_allowed"][0, 0].bool()
    assert allowed[:, : facts["past_length"]].all()
    assert torch.equal(allowed[:, facts["past_length"] :], seen)


def enumerated(scores: Tensor, nodes: int) -> list[tuple[tuple[int, ...], float]]:
    level: list[tuple[tuple[int, ...], Tensor]] = [((), torch.zeros(()))]
    every: list[tuple[tuple[int, ...], Tensor]] = []
    for row in scores:
        ids = sorted(range(len(row)), key=lambda i, row=row: (-float(row[i]), i))
        longer = [((*prefix, i), score + row[i]) for prefix, score in level for i in ids]
        level = sorted(longer, key=lambda node: -float(node[1]))
        every += level
    best = sorted(every, key=lambda node: -float(node[1]))[:nodes]
    return [(prefix, float(score)) for prefix, score in best]


@st.composite
def marginals(draw: st.DrawFn) -> list[list[list[float]]]:
    levels, size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    scores = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, -1e-9, -3.1, float("-inf")])
    row = st.lists(scores, min_size=size, max_size=size)
    block = st.lists(row, min_size=levels, max_size=levels)
    return draw(st.lists(block, min_size=1, max_size=3))


@settings(max_examples=150, deadline=None)
@given(marginals(), st.integers(1, 60))
def test_the_tree_is_the_head_of_a_full_enumeration(
    batch: list[list[list[float]]], nodes: int
) -> None:
    scores = torch.tensor(batch)
    drafted = tree(scores, nodes)
    for row, alone in enumerate(scores):
        expected = enumerated(alone, nodes)
        parents = drafted.parents_SN[row].tolist()
        assert paths(drafted.tokens_SN[row].tolist(), parents) == [path for path, _ in expected]
        assert drafted.scores_SN[row].tolist() == [score for _, score in expected]
        assert drafted.depths_SN[row].tolist() == [len(path) for path, _ in expected]
        assert all(parent < node for node, parent in enumerate(parents))
    assert drafted.levels >= int(drafted.depths_SN.max())


def test_the_chain_is_the_best_token_of_every_position() -> None:
    scores = torch.tensor(
        [[[-1.0, -0.5, -0.5], [-0.1, -2.0, -3.0]], [[-0.2, -9, -9], [-3, -1, -1]]]
    )
    drafted = chain(scores, scores.argmax(-1))
    assert drafted.tokens_SN.tolist() == [[1, 0], [0, 1]]
    assert drafted.parents_SN.tolist() == [[-1, 0]] * 2
    assert drafted.depths_SN.tolist() == [[1, 2]] * 2
    torch.testing.assert_close(drafted.scores_SN, torch.tensor([[-0.5, -0.6], [-0.2, -1.2]]))
    assert drafted.levels == 2 and drafted.valid_SN.all()


def test_a_budget_of_none_leaves_the_root() -> None:
    for drafted in (
        tree(torch.zeros(3, 5, 9), 0),
        chain(torch.zeros(3, 0, 9), torch.zeros(3, 0, dtype=torch.int64)),
    ):
        assert drafted.tokens_SN.shape == drafted.scores_SN.shape == (3, 0)
        assert drafted.levels == 0
        assert ancestors(drafted.parents_SN, 0).tolist() == [[[True]]] * 3


def test_float64_marginals_give_float32_scores_and_the_same_tree() -> None:
    scores = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    narrow, wide = tree(scores, 20), tree(scores.double(), 20)
    assert (
        wide.scores_SN.dtype
        == chain(scores.double(), scores.argmax(-1)).scores_SN.dtype
        == torch.float32
    )
    assert torch.equal(narrow.tokens_SN, wide.tokens_SN)


def test_nothing_is_read_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.zeros(2, 4, 6).log_softmax(-1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a device value was read")

    for name in ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
    tree(scores, 12)
    chain(scores, scores.argmax(-1))
