"""The policies of examples/draft_lengths: golden schedules, stop rules, what they promise."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from helpers.vanilla import cases, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from specsot_draft_lengths.drafter import AdaptiveSettings
from specsot_draft_lengths.policies import (
    LIMITS,
    AdaptivePolicy,
    AdaptiveState,
    first_state,
    limit,
    next_state,
    reach,
)

from specsot.ops.draft.gamma import DraftDistributions, plan
from specsot.states.drafters.vanilla import PLUGGED_IN

NOTHING = DraftDistributions()


def policy_of(**given: Any) -> AdaptiveSettings:
    """Settings of a policy; lengths up to 8."""
    return AdaptiveSettings(kind="adaptive", **{"gamma_max": 8} | given)


def laws(*h: float, chance: tuple[float, ...] | None = None) -> DraftDistributions:
    return DraftDistributions(h, chance or [0.5] * len(h))


def test_every_policy_is_named_where_it_is_not_installed() -> None:
    assert set(PLUGGED_IN) == set(get_args(AdaptivePolicy))


@pytest.mark.parametrize("case", vectors("egag")["stop_rules"])
def test_svip_and_adaedl_stop_where_the_vectors_say(case: Any) -> None:
    seen, state = laws(case["H"], case["H"]), AdaptiveState(5, threshold=0.4)
    svip = policy_of(gamma_policy="svip")
    assert reach(svip, state, 2, seen) == (1 if case["svip_stop_after"] else None)
    adaedl = policy_of(gamma_policy="adaedl")
    assert reach(adaedl, state, 2, seen) == (1 if case["adaedl_stop_lambda_0_4"] else None)


def test_confidence_stops_after_an_unlikely_token_only() -> None:
    settings = policy_of(gamma_policy="confidence", gamma_min=2)
    state = first_state(settings)
    assert reach(settings, state, 3, laws(3, 3, 3, chance=(0.1, 0.39, 0.9))) == 2
    assert reach(settings, state, 3, laws(3, 3, 3, chance=(0.1, 0.41, 0.9))) is None
    strict = settings.model_copy(update={"gamma_limit": 0.95})
    assert reach(strict, state, 3, laws(3, 3, 3, chance=(0.1, 0.97, 0.9))) == 3


@pytest.mark.parametrize("policy", LIMITS)
def test_the_next_round_goes_as_far_as_the_rule_went(policy: AdaptivePolicy) -> None:
    """Half of it; and twice as far where nothing was in the way, up to the bound."""
    settings = policy_of(gamma=4, gamma_policy=policy, gamma_max=16)
    state = first_state(settings)
    length = plan(settings, state, 9, 99)
    sure, doubtful = laws(*[0.0] * 4, chance=(1.0,) * 4), laws(*[9.0] * 4, chance=(0.0,) * 4)
    on = next_state(settings, state, length, 4, figures=sure)
    assert plan(settings, on, 9, 99).gamma == 6
    back = next_state(settings, state, length, 4, figures=doubtful)
    assert plan(settings, back, 9, 99).gamma == 3
    for _ in range(9):
        on = next_state(settings, on, replace(length, gamma_eff=16), 16, figures=sure)
    assert plan(settings, on, 9, 99).gamma == 16


def test_the_heuristic_judges_no_single_draft() -> None:
    settings = policy_of(gamma_policy="heuristic")
    assert reach(settings, first_state(settings), 2, laws(9.0, 9.0, chance=(0.0, 0.0))) is None


@pytest.mark.parametrize("case", cases("heuristic_gamma"))
def test_the_heuristic_schedule(case: Any) -> None:
    settings = policy_of(
        gamma=case["start"], gamma_policy="heuristic", gamma_max=max(64, case["start"])
    )
    state = first_state(settings)
    for row in case["rows"]:
        length = plan(settings, state, 9, 1000)
        assert length.gamma_eff == row["gamma"]
        state = next_state(settings, state, length, row["matches"], figures=NOTHING)
        assert state.gamma == row["next"]


def test_a_round_without_drafts_teaches_nothing() -> None:
    for policy in ("heuristic", "adaedl"):
        settings = policy_of(gamma_policy=policy)
        state = first_state(settings)
        none = plan(settings, state, 9, 1)
        assert next_state(settings, state, none, 0, figures=NOTHING) == state


def test_adaedl_stops_earlier_after_rejections_and_later_after_successes() -> None:
    settings = policy_of(gamma=4, gamma_policy="adaedl")
    state, seen = first_state(settings), laws(1.0, 1.0, 1.0, 1.0)
    length = plan(settings, state, 9, 99)
    worse = next_state(settings, state, length, 0, figures=seen)
    better = next_state(settings, state, length, 4, figures=seen)
    assert better.threshold < limit(settings) == 0.4 < worse.threshold
    assert next_state(settings, worse, length, 4, figures=seen).acceptance == 0.5


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(get_args(AdaptivePolicy)),
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 12), st.integers(0, 9)), max_size=8),
)
def test_lengths_stay_within_their_bounds(
    policy: AdaptivePolicy, low: int, more: int, rounds: list[tuple[float, int, int]]
) -> None:
    bounds = policy_of(gamma=3, gamma_policy=policy, gamma_min=low, gamma_max=max(low + more, 1))
    state = first_state(bounds)
    for h, remaining, accepted in rounds:
        length = plan(bounds, state, 100, remaining)
        drafted = length.gamma_eff
        assert 0 <= drafted <= min(bounds.offered, remaining - 1)
        assert low <= length.gamma <= bounds.gamma_max
        seen = laws(*[h] * max(drafted, 1), chance=(0.3,) * max(drafted, 1))
        state = next_state(bounds, state, length, min(accepted, drafted), figures=seen)
