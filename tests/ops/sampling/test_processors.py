"""Logits processors: golden distributions, transformers' own processors, and what a row sees."""

from typing import Any, NamedTuple

import pytest
import torch
from helpers.vanilla import cases, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specsot.ops.sampling import processors
from specsot.ops.sampling.coins import branch_key, token_keys
from specsot.ops.sampling.settings import TIES, SamplingRules
from specsot.ops.types import ancestors

CPU = torch.device("cpu")
KINDS = pytest.mark.parametrize("kind", [torch.float64, torch.float32], ids=["64", "32"])


def of(size: int, *rules: SamplingRules, stops: tuple[int, ...] = ()) -> processors.SamplingColumns:
    return processors.columns(rules, [stops] * len(rules), size, CPU)


class Past(NamedTuple):
    """What branches and paths have behind them, as in `Sampler` and `process`."""

    seen_SV: Tensor
    counts_SV: Tensor
    answered_S: Tensor
    tokens_RC: Tensor
    path_RC: Tensor

    def scores(
        self, logits_RV: Tensor, rules: processors.SamplingColumns, branch_R: Tensor
    ) -> Tensor:
        sampler = processors.Sampler(rules, branch_R, *self[:3])
        return processors.process(
            logits_RV, sampler, branch_R, tokens_RC=self.tokens_RC, path_RC=self.path_RC
        )


def scores_of(
    logits_RV: Tensor, rules: SamplingRules, past: Past | None = None, stops: tuple[int, ...] = ()
) -> Tensor:
    rows, size = logits_RV.shape
    past = past or wrote(size, [], [])
    if len(past.tokens_RC) != rows:
        none_R0 = torch.zeros(rows, 0)
        past = past._replace(tokens_RC=none_R0.long(), path_RC=none_R0.bool())
    return past.scores(logits_RV, of(size, rules, stops=stops), torch.zeros(rows).long())


def wrote(size: int, prompt: list[int], answer: list[int]) -> Past:
    seen_SV = torch.zeros(1, size, dtype=torch.bool)
    counts_SV = torch.zeros(1, size, dtype=torch.int32)
    seen_SV[0, prompt] = True
    answer_C = torch.tensor(answer, dtype=torch.int64)
    processors.take_in_(seen_SV, counts_SV, torch.zeros_like(answer_C), answer_C)
    none = torch.zeros(1, 0)
    return Past(seen_SV, counts_SV, torch.tensor([len(answer)]), none.long(), none.bool())


# --- golden --------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("order", ["temperature_first", "filters_first"])
@pytest.mark.parametrize("case", cases("processors"))
def test_distributions(case: Any, order: Any, kind: torch.dtype) -> None:
    logits_RV = tensor([case["logits"]], kind)
    rules = SamplingRules(case["temperature"], case["top_k"], case["top_p"], filter_order=order)
    probs_RV = processors.probabilities(scores_of(logits_RV, rules), torch.tensor([rules.greedy]))
    name = "" if order == "temperature_first" else "_filter_first"
    wanted_RV = tensor([case["probs" + name]])
    close = 1e-12 if kind == torch.float64 else 2e-7
    assert torch.allclose(probs_RV.double(), wanted_RV, rtol=0, atol=close)
    assert int((probs_RV > 0).sum()) == case["kept" + name]
    assert probs_RV.argmax().item() == case["argmax"]


# --- transformers --------------------------------------------------------------------------------


@st.composite
def rule_sets(draw: st.DrawFn) -> SamplingRules:
    return SamplingRules(
        temperature=draw(st.sampled_from([0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 5, 40, 500])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=draw(st.sampled_from([(), ((3, 2.5), (7, -4.0))])),
        banned=draw(st.sampled_from([(), (1, 2)])),
        min_new_tokens=draw(st.sampled_from([0, 3])),
    )


def theirs(rules: SamplingRules, prompt: int, stops: list[int]) -> LogitsProcessorList:
    """transformers' processors in the order of GenerationMixin._get_logits_processor (5.23)."""
    found: list[Any] = []
    if rules.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(t,): b for t, b in rules.logit_bias}))
    if rules.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(rules.repetition_penalty))
    if rules.banned:
        found.append(NoBadWordsLogitsProcessor([[token] for token in rules.banned]))
    if rules.min_new_tokens:
        found.append(MinLengthLogitsProcessor(prompt + rules.min_new_tokens, stops))
    found.append(TemperatureLogitsWarper(rules.temperature))
    if rules.top_k:
        found.append(TopKLogitsWarper(rules.top_k))
    if rules.top_p < 1:
        found.append(TopPLogitsWarper(rules.top_p))
    if rules.min_p:
        found.append(MinPLogitsWarper(rules.min_p))
    return LogitsProcessorList(found)


@settings(max_examples=250, deadline=None)
@given(
    rule_sets(),
    st.integers(0, 2**31),
    st.lists(st.integers(0, 199), min_size=1, max_size=9),
    st.lists(st.integers(0, 199), max_size=5),
)
def test_scores_are_those_of_transformers(
    rules: SamplingRules, seed: int, prompt: list[int], answer: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(1, 200, generator=generator) * 3
    stops = (5, 9)
    wanted = theirs(rules, len(prompt), list(stops))(
        torch.tensor([prompt + answer]), logits_RV.clone()
    )
    found = scores_of(logits_RV, rules, wrote(200, prompt, answer), stops)
    assert torch.equal(found > -torch.inf, wanted > -torch.inf)
    assert torch.equal(found, wanted)


# --- penalties -----------------------------------------------------------------------------------


def test_a_node_of_a_tree_has_its_own_path_behind_it() -> None:
    """Root 1 with children 2 and 3, below the first of them 2 again; padding has the token -1."""
    above_STT = ancestors(torch.tensor([[-1, -1, 0]]), 2)
    path_RC = torch.nn.functional.pad(above_STT[0], (0, 1))
    tokens_RC = torch.tensor([[1, 2, 3, 2, -1]]).expand(4, -1)
    past = wrote(6, [5], [4])._replace(tokens_RC=tokens_RC, path_RC=path_RC)
    counted = scores_of(torch.zeros(4, 6), SamplingRules(frequency_penalty=1.0), past)
    assert (-counted).tolist() == [
        [0, 1, 0, 0, 1, 0],
        [0, 1, 1, 0, 1, 0],
        [0, 1, 0, 1, 1, 0],
        [0, 1, 2, 0, 1, 0],
    ]
    seen = scores_of(torch.ones(4, 6), SamplingRules(repetition_penalty=2.0), past)
    rules = SamplingRules(presence_penalty=0.5, frequency_penalty=0.25)
    found = scores_of(torch.zeros(1, 6), rules, wrote(6, [0, 1], [1, 2, 2, 2]))
    assert found.tolist() == [[0, -0.75, -1.25, 0, 0, 0]], "of the answer alone"
    assert (seen < 1).int().tolist() == [
        [0, 1, 0, 0, 1, 1],
        [0, 1, 1, 0, 1, 1],
        [0, 1, 0, 1, 1, 1],
        [0, 1, 1, 0, 1, 1],
    ]
    forced = SamplingRules(forced=(4, 1, 0), min_new_tokens=3)
    best = scores_of(torch.eye(6)[[5] * 4], forced, past, stops=(5,)).argmax(1)
    assert best.tolist() == [0, 5, 5, 5], "two tokens are written at the root, three below it"
    held = SamplingRules(min_new_tokens=3)
    best = scores_of(torch.eye(6)[[5] * 4] + torch.eye(6)[3] / 2, held, past, stops=(5,)).argmax(1)
    assert best.tolist() == [3, 5, 5, 5]


# --- rows, ties, purity --------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.lists(rule_sets(), min_size=2, max_size=4), st.integers(0, 2**31), st.booleans())
def test_a_row_does_not_depend_on_its_neighbours(
    rules: list[SamplingRules], seed: int, coarse: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(len(rules), 300, generator=generator)
    logits_RV = logits_RV.round() if coarse else logits_RV
    rules = [*rules[:-1], SamplingRules(0.0, top_k=3, top_p=0.1, min_p=0.9)]
    rows = torch.arange(len(rules))
    past = wrote(300, [1], [2])
    past = Past._make(part.expand(len(rules), *part.shape[1:]) for part in past)
    together = past.scores(logits_RV, of(300, *rules, stops=(7,)), rows)
    key_R = token_keys(torch.tensor(branch_key(seed, 0)).expand(len(rules)), rows)
    chosen = processors.choose(together, of(300, *rules), rows, key_R)
    for row, one in enumerate(rules):
        alone = scores_of(logits_RV[row : row + 1], one, wrote(300, [1], [2]), stops=(7,))
        assert torch.equal(together[row : row + 1], alone)
        token = processors.choose(alone, of(300, one), torch.tensor([0]), key_R[row : row + 1])
        assert chosen[row] == token
        assert alone[0, token] > -torch.inf
    assert torch.equal(together[-1], logits_RV[-1]), "temperature 0 keeps the order of all scores"


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60), st.sampled_from([0.2, 0.5, 0.9, 1.0]), st.integers(0, 2**31))
def test_top_p_behind_top_k_is_what_a_full_sort_keeps(k: int, p: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z_V = torch.randint(0, 6, (60,), generator=generator).double()
    order = z_V.sort(descending=True, stable=True).indices.tolist()
    left = [i for i in order if z_V[i] >= z_V[order[k - 1]]]
    mass_V = z_V[left].softmax(0)
    kept = {i for at, i in enumerate(left) if at == 0 or p == 1 or mass_V[:at].sum() < p - 1e-12}
    found = scores_of(z_V[None], SamplingRules(1.0, k, p))
    assert set(torch.nonzero(found[0] > -torch.inf).flatten().tolist()) == kept


def test_of_very_many_ties_with_the_last_the_lowest_ids_stay() -> None:
    found = scores_of(torch.zeros(1, 500), SamplingRules(1.0, top_k=10))
    kept = torch.nonzero(found[0] > -torch.inf).flatten()
    assert kept.tolist() == list(range(10 + TIES))
    assert of(500, SamplingRules(1.0, top_k=10)).most_kept == 10 + TIES


def test_what_is_forced_comes_though_it_is_banned() -> None:
    logits_RV = torch.tensor([[9.0, 1.0, 0.0]])
    rules = SamplingRules(temperature=1.0, banned=(2,), forced=(2,))
    assert scores_of(logits_RV, rules, wrote(3, [], [])).tolist() == [[-torch.inf] * 2 + [0.0]]


def test_nothing_given_is_changed_and_half_precision_is_widened() -> None:
    rules = SamplingRules(0.7, 5, 0.9, 0.1, 1.2, 0.1, 0.1, ((1, 1.0),), (2,), (), 4)
    logits_RV, past = torch.randn(1, 50), wrote(50, [3], [4])
    held = [logits_RV.clone(), past.seen_SV.clone(), past.counts_SV.clone()]
    scores_of(logits_RV, rules, past, (6,))
    assert all(map(torch.equal, held, (logits_RV, past.seen_SV, past.counts_SV)))
    assert scores_of(logits_RV.bfloat16(), rules, past).dtype == torch.float32
    assert scores_of(logits_RV.double(), rules, past).dtype == torch.float64
