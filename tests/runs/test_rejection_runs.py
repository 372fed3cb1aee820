"""Rejection sampling through whole runs: thousands of answers against the law of the target.

Every answer is a request of its own with its own seed, so nothing but the engine's coins is random.
The law is put together from transformers' distributions behind every possible beginning."""

from collections import Counter

import pytest
import torch
from helpers.drafters import drafting
from helpers.support import FixedBook, Make, Tiny, branches_of, drive, graphs, start

from specsot.engine.certify.texts import ALPHA, chi_square, p_value
from specsot.engine.prepare.inputs import Prompt
from specsot.ops.verify import rejection as accept_rejection

KEPT = 3  # tokens that top_k leaves
BUDGET = 4  # the first token, a round of up to three, and what a shorter round leaves to the next
HEAT = 30.0  # temperature at which no beginning is rare
RUNS, AT_ONCE = 1500, 250
PROMPT = [9, 4, 33, 57, 3]
CASES = {
    "vanilla-chain": ("vanilla", "chain", ["drafter.gamma=2", "drafter.draws=sampled"]),
    "vanilla-block": ("vanilla", "block", ["drafter.gamma=2", "drafter.draws=sampled"]),
    "dflash-block": ("dflash", "block", ["drafter.block_size=4", "drafter.draws=sampled"]),
    "dflash-chain": ("dflash", "chain", ["drafter.block_size=3", "drafter.draws=sampled"]),
    "dflash-best": ("dflash", "chain", ["drafter.block_size=3"]),
    "dflash-tree": (
        "dflash",
        "topk",
        ["drafter.block_size=3", "drafter.grow=ddtree", "drafter.num_draft_tokens=5"],
    ),
    "eagle3-tree": (
        "eagle3",
        "topk",
        ["drafter.num_draft_tokens=5", "drafter.draft_depth=2", "drafter.top_k=3"],
    ),
    "eagle1-recursive": (
        "eagle1",
        "without_replacement",
        ["drafter.tree=[[0], [1], [0, 0], [0, 1], [1, 0]]", "drafter.draws=distinct"],
    ),
    "eagle1-independent": (
        "eagle1",
        "with_replacement",
        ["drafter.tree=[[0], [1], [0, 0], [0, 1], [1, 0]]", "drafter.draws=sampled"],
    ),
}


@pytest.fixture(scope="module")
def made(tiny: Make) -> Tiny:
    return tiny("llama", restrict=8)


def law(made: Tiny) -> dict[tuple[int, ...], float]:
    found = {(): 1.0}
    for _ in range(BUDGET):
        found = {
            (*begun, token): chance * own
            for begun, chance in found.items()
            for token, own in _next(made, [*PROMPT, *begun])
        }
    return found


def _next(made: Tiny, ids: list[int]) -> list[tuple[int, float]]:
    top = made.reference.logits(ids, torch.float32)[-1].double().topk(KEPT)
    chances = (top.values / HEAT).softmax(-1).tolist()
    return list(zip(top.indices.tolist(), chances, strict=True))


def answers(made: Tiny, case: str, *sets: str) -> Counter[tuple[int, ...]]:
    kind, rule, own = CASES[case]
    session = graphs.session(
        "autoregressive",
        drafting(made, kind),
        FixedBook({"q": PROMPT}),
        budget=BUDGET,
        sets=(
            f"drafter.kind={kind}",
            *own,
            f"sampling.temperature={HEAT}",
            f"sampling.top_k={KEPT}",
            "sampling.accept=rejection",
            f"sampling.rule={rule}",
            f"layout.max_num_branches={AT_ONCE}",
            "layout.kv_slots=8000",
            *sets,
        ),
    )
    found: Counter[tuple[int, ...]] = Counter()
    for first in range(0, RUNS, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        prompts = [Prompt(str(seed), "q", seed=seed) for seed in seeds]
        run = drive(start(session, prompts), check=False)
        found.update(tuple(branch.tokens) for branch in branches_of(run))
    return found


def fit(found: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    assert set(found) <= set(wanted), "an answer that cannot be"
    seen = torch.tensor([found[answer] for answer in wanted], dtype=torch.float64)
    expected = torch.tensor(list(wanted.values()), dtype=torch.float64) * RUNS
    return p_value(*chi_square(seen, expected))


@pytest.mark.parametrize("case", CASES)
def test_the_law_of_the_answers_is_the_targets(case: str, made: Tiny) -> None:
    assert fit(answers(made, case), law(made)) >= ALPHA


def test_the_unadjusted_token_is_seen(made: Tiny) -> None:
    found = answers(made, "vanilla-chain", "sampling.skip_sample_adjustment=true")
    assert fit(found, law(made)) < ALPHA


def test_one_coin_for_all_siblings_is_seen(made: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_rejection, "sibling_ranks", torch.zeros_like)
    assert fit(answers(made, "eagle3-tree"), law(made)) < ALPHA


def test_the_reference_is_a_law(made: Tiny) -> None:
    found = law(made)
    assert len(found) == KEPT**BUDGET
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) * RUNS > 5, "rare answers tell nothing"
