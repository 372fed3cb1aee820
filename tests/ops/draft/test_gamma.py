"""Draft lengths: golden schedules and stop rules, what is recorded, what the model promises."""

import math
from typing import Any

import pytest
import torch
from helpers.cost_model import acceptance_rate, best_gamma, mean_emitted, speedup
from helpers.vectors import cases, tensor, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.gamma import (
    ADAEDL_THRESHOLD,
    GammaPolicy,
    GammaSettings,
    GammaState,
    entropy,
    first_state,
    next_state,
    normalised,
    packed,
    plan,
    records,
    stops_after,
    stops_before,
)

EGAG = vectors("egag")


@pytest.mark.parametrize("case", EGAG["entropy"])
def test_entropy(case: Any) -> None:
    logits_RV = tensor([case["logits"]])
    h_R = entropy(logits_RV, case["T"])
    assert h_R.item() == pytest.approx(case["H"], abs=1e-12)
    h_norm_R = normalised(h_R, None, logits_RV.shape[1])
    assert h_norm_R.item() == pytest.approx(case["H_norm"], abs=1e-12)
    assert entropy(logits_RV.float(), case["T"]).item() == pytest.approx(case["H"], abs=2e-6)


def test_the_entropy_of_a_vocabulary_of_one_is_no_doubt_at_all() -> None:
    assert normalised(entropy(torch.tensor([[3.0]])), None, 1).tolist() == [0.0]


@pytest.mark.parametrize("case", EGAG["schedules"])
def test_egag_follows_the_golden_schedules(case: Any) -> None:
    settings = GammaSettings(
        gamma_policy=GammaPolicy.EGAG,
        gamma_min=case["gamma_min"],
        gamma_max=case["gamma_max"],
        egag_mode=case["mode"],
        egag_ema_beta=case["beta"],
        egag_h_ref=1.0,  # what is given is the normalised entropy
    )
    state = first_state(settings)
    for row in case["rounds"]:
        remaining_S = torch.tensor([row["remaining"]])
        lengths = plan(settings, [state], tensor([row["h_norm"]]), 100, remaining_S)
        (record,) = records(packed(lengths).numpy(), [0])
        assert record.h_norm == row["h_norm"]
        assert record.raw == pytest.approx(row["raw"], abs=1e-12)
        assert record.ema == pytest.approx(row["ema"], abs=1e-12)
        assert (record.gamma, record.gamma_eff) == (row["gamma"], row["gamma_eff"])
        state = next_state(settings, state, record.gamma_eff, 0, record.ema)


def test_branches_have_their_own_lengths_and_averages() -> None:
    settings = GammaSettings(
        gamma_policy=GammaPolicy.EGAG, gamma_min=0, gamma_max=10, egag_ema_beta=0.5
    )
    states = [GammaState(5), GammaState(5, ema=2.0)]
    lengths = plan(settings, states, torch.tensor([0.0, 0.0]), 50, torch.tensor([99, 4]))
    assert lengths.ema_S.tolist() == [10.0, 6.0]
    assert lengths.gamma_S.tolist() == [10, 6]
    assert lengths.gamma_eff_S.tolist() == [10, 3], "the target adds one token itself"


def test_a_round_that_needs_one_token_drafts_none() -> None:
    lengths = plan(GammaSettings(), [GammaState(5)], torch.tensor([0.0]), 9, torch.tensor([1]))
    assert (lengths.gamma_S.item(), lengths.gamma_eff_S.item()) == (5, 0)


@pytest.mark.parametrize("case", EGAG["stop_rules"])
def test_svip_and_adaedl_stop_where_the_vectors_say(case: Any) -> None:
    h_S, chance_S = tensor([case["H"]]), tensor([0.5])
    svip = GammaSettings(gamma_policy=GammaPolicy.SVIP)
    assert stops_after(svip, 1, h_S, chance_S).item() == case["svip_stop_after"]
    adaedl = GammaSettings(gamma_policy=GammaPolicy.ADAEDL)
    states = [GammaState(5, threshold=0.4)]
    stops_S = stops_before(adaedl, states, 1, h_S)
    assert stops_S.item() == case["adaedl_stop_lambda_0_4"]


def test_confidence_stops_after_an_unlikely_token_only() -> None:
    settings = GammaSettings(gamma_policy=GammaPolicy.CONFIDENCE, gamma_min=2)
    h_S, chance_S = torch.tensor([3.0, 3.0]), torch.tensor([0.39, 0.41])
    assert stops_after(settings, 2, h_S, chance_S).tolist() == [True, False]
    assert stops_after(settings, 1, h_S, chance_S).tolist() == [False, False], "below gamma_min"
    assert not stops_before(settings, [GammaState(5)] * 2, 3, h_S).any()


@pytest.mark.parametrize("policy", [GammaPolicy.FIXED, GammaPolicy.EGAG, GammaPolicy.HEURISTIC])
def test_policies_that_plan_never_stop_while_drafting(policy: GammaPolicy) -> None:
    settings = GammaSettings(gamma_policy=policy)
    h_S, chance_S = torch.tensor([9.0]), torch.tensor([0.0])
    assert not stops_after(settings, 5, h_S, chance_S).any()
    assert not stops_before(settings, [GammaState(5)], 5, h_S).any()


@pytest.mark.parametrize("case", cases("heuristic_gamma"))
def test_the_heuristic_schedule(case: Any) -> None:
    settings = GammaSettings(case["start"], GammaPolicy.HEURISTIC, gamma_max=max(64, case["start"]))
    state = first_state(settings)
    for row in case["rows"]:
        lengths = plan(settings, [state], tensor([0.0]), 9, torch.tensor([1000]))
        assert lengths.gamma_eff_S.tolist() == [row["gamma"]]
        state = next_state(settings, state, row["gamma"], row["matches"], math.nan)
        assert state.gamma == row["next"]


def test_a_round_without_drafts_teaches_nothing() -> None:
    for policy in (GammaPolicy.HEURISTIC, GammaPolicy.ADAEDL):
        settings = GammaSettings(gamma_policy=policy)
        state = first_state(settings)
        assert next_state(settings, state, 0, 0, math.nan) == state


def test_adaedl_stops_earlier_after_rejections_and_later_after_successes() -> None:
    settings = GammaSettings(gamma_policy=GammaPolicy.ADAEDL)
    state = first_state(settings)
    worse = next_state(settings, state, 4, 0, math.nan)
    better = next_state(settings, state, 4, 4, math.nan)
    assert better.threshold < ADAEDL_THRESHOLD < worse.threshold
    assert next_state(settings, worse, 4, 4, math.nan).acceptance == 0.5


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(GammaPolicy),
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 12), st.integers(0, 9)), max_size=8),
)
def test_lengths_stay_within_their_bounds(
    policy: GammaPolicy, low: int, more: int, rounds: list[tuple[float, int, int]]
) -> None:
    bounds = GammaSettings(
        gamma=3,
        gamma_policy=policy,
        gamma_min=low,
        gamma_max=max(low + more, 1),
        egag_ema_beta=0.5,
    )
    state = first_state(bounds)
    for h, remaining, accepted in rounds:
        lengths = plan(bounds, [state], tensor([h]), 100, torch.tensor([remaining]))
        (record,) = records(packed(lengths).numpy(), [accepted])
        assert 0 <= record.gamma_eff <= min(bounds.most, remaining - 1)
        assert policy is GammaPolicy.FIXED or low <= record.gamma <= bounds.gamma_max
        assert record.accepted == accepted
        drafted = record.gamma_eff
        state = next_state(bounds, state, drafted, min(accepted, drafted), record.ema)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="gamma_min"):
        GammaSettings(gamma_min=3, gamma_max=2)


@pytest.mark.parametrize("case", cases("cost_model"))
def test_the_cost_model(case: Any) -> None:
    alpha, cost = case["alpha"], case["c"]
    assert mean_emitted(alpha, 4) == pytest.approx(case["mean_emitted_gamma_4"], abs=1e-12)
    assert acceptance_rate(alpha, 4) == pytest.approx(case["seed_rate_gamma_4"], abs=1e-12)
    assert speedup(alpha, cost, 4) == pytest.approx(case["speedup_gamma_4"], abs=1e-12)
    assert best_gamma(alpha, cost) == case["gamma_star"]
    assert speedup(alpha, cost, best_gamma(alpha, cost)) == pytest.approx(case["speedup_star"])


def test_nothing_drafted_is_nothing_accepted() -> None:
    assert acceptance_rate(0.5, 0) == 0.0
