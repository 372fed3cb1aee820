"""Draft lengths: golden schedules, what is recorded, what the model promises."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers.vanilla import tensor, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.gamma import (
    DraftDistributions,
    Policy,
    first_state,
    next_state,
    normalised,
    plan,
)
from specsot.ops.draft.vanilla import entropy, packed, unpacked
from specsot.states.drafters.vanilla import PLUGGED_IN, VanillaSettings

EGAG = vectors("egag")


def policy_of(**given: Any) -> VanillaSettings:
    """Settings of a policy; lengths up to 8, and entropies up to 3 nats."""
    return VanillaSettings(kind="vanilla", **{"gamma_max": 8, "egag_h_ref": 3.0} | given)


@pytest.mark.parametrize("case", EGAG["entropy"])
def test_entropy(case: Any) -> None:
    logits_RV = tensor([case["logits"]])
    h_R = entropy(logits_RV / case["T"])
    assert h_R.item() == pytest.approx(case["H"], abs=1e-12)
    h_norm = normalised(h_R.item(), None, logits_RV.shape[1])
    assert h_norm == pytest.approx(case["H_norm"], abs=1e-12)
    assert entropy(logits_RV.float() / case["T"]).item() == pytest.approx(case["H"], abs=2e-6)


def test_the_entropy_of_a_vocabulary_of_one_is_no_doubt_at_all() -> None:
    assert normalised(entropy(torch.tensor([[3.0]])).item(), None, 1) == 0.0


@pytest.mark.parametrize("case", EGAG["schedules"])
def test_egag_follows_the_golden_schedules(case: Any) -> None:
    settings = policy_of(
        gamma_policy="egag",
        gamma_min=case["gamma_min"],
        gamma_max=case["gamma_max"],
        egag_mode=case["mode"],
        egag_ema_beta=case["beta"],
        egag_h_ref=1.0,  # what is given is the normalised entropy
    )
    state = first_state(settings)
    for row in case["rounds"]:
        state = replace(state, h=row["h_norm"])
        length = plan(settings, state, 100, row["remaining"])
        assert length.h_norm == row["h_norm"]
        assert length.raw == pytest.approx(row["raw"], abs=1e-12)
        assert length.ema == pytest.approx(row["ema"], abs=1e-12)
        assert (length.gamma, length.gamma_eff) == (row["gamma"], row["gamma_eff"])
        state = next_state(settings, state, length, 0, figures=laws(0.5))


def laws(*h: float, chance: tuple[float, ...] | None = None) -> DraftDistributions:
    return DraftDistributions(h, chance or [0.5] * len(h))


@pytest.mark.parametrize(("accepted", "found"), [(0, 1.0), (1, 2.0), (2, 3.0), (3, 3.0)])
def test_egag_goes_on_from_the_law_where_the_round_ended(accepted: int, found: float) -> None:
    """A round that accepted all of its drafts ended behind the last law that was computed."""
    settings = policy_of(gamma=3, gamma_policy="egag")
    state = first_state(settings)
    length = plan(settings, state, 9, 99)
    assert (length.gamma_eff, math.isnan(length.h)) == (3, True), "nothing has been seen yet"
    after = next_state(settings, state, length, accepted, figures=laws(1.0, 2.0, 3.0))
    assert (after.h, plan(settings, after, 9, 99).h) == (found, found)


def test_laws_travel_as_integers() -> None:
    h_SN, chance_SN = torch.tensor([[0.1, 2.5], [1.0, 0.0]]), torch.tensor([[0.5, 1], [0, 0.25]])
    bits_SC = packed(h_SN.double(), chance_SN.double()).numpy()
    found = unpacked(bits_SC, 2)
    assert [one.h for one in found] == h_SN.double().tolist()
    assert [one.chance for one in found] == chance_SN.double().tolist()
    wider = np.pad(bits_SC, ((0, 0), (0, 3)))  # another drafter of the round had more to tell
    assert unpacked(wider, 2)[1].chance == [0, 0.25]
    assert len(unpacked(bits_SC[:, :0], 2)[0].h) == 0, "nobody asked"


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(get_args(Policy)),
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 12), st.integers(0, 9)), max_size=8),
)
def test_lengths_stay_within_their_bounds(
    policy: Policy, low: int, more: int, rounds: list[tuple[float, int, int]]
) -> None:
    bounds = policy_of(
        gamma=3, gamma_policy=policy, gamma_min=low, gamma_max=max(low + more, 1), egag_ema_beta=0.5
    )
    state = first_state(bounds)
    for h, remaining, accepted in rounds:
        length = plan(bounds, state, 100, remaining)
        drafted = length.gamma_eff
        assert 0 <= drafted <= min(bounds.offered, remaining - 1)
        assert policy == "fixed" or low <= length.gamma <= bounds.gamma_max
        seen = laws(*[h] * max(drafted, 1), chance=(0.3,) * max(drafted, 1))
        state = next_state(bounds, state, length, min(accepted, drafted), figures=seen)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="gamma_min"):
        policy_of(gamma_min=3, gamma_max=2)


@pytest.mark.parametrize("policy", PLUGGED_IN)
def test_a_policy_that_is_not_shipped_names_its_package(policy: str) -> None:
    with pytest.raises(ValueError, match=f"{policy} is .* pip install ./examples/draft_lengths"):
        policy_of(gamma_policy=policy)
