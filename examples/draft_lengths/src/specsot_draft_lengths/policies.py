"""The policies: a branch's next draft length from the outcome of its rounds; no torch.

Sources: svip 2411.18462, confidence 2405.04304, adaedl 2410.18351 (its threshold: 2309.08168),
heuristic: transformers. Where these stop inside a round, a round here decides the next one's
length: as far as the rule would have gone, averaged over the rounds."""

from dataclasses import dataclass, replace
from math import isnan, nan, sqrt
from typing import TYPE_CHECKING, Literal

from specsot.ops.draft.gamma import DraftDistributions, GammaRecord, GammaState

if TYPE_CHECKING:
    from .drafter import AdaptiveSettings

AdaptivePolicy = Literal["heuristic", "svip", "confidence", "adaedl"]

LIMITS: dict[str, float] = {"svip": 0.3, "confidence": 0.4, "adaedl": 0.4}
"""The policies that judge every draft, and the published threshold of each."""
SVIP_SCALE = 0.15
ADAEDL_SCALE = 0.2
LENGTH_DECAY = 0.5  # weight of the previous length
# The adaptation of Draft & Verify: the acceptance to reach, the step, and the weights of the past.
TARGET_ACCEPTANCE = 0.9
THRESHOLD_STEP = 0.01
ACCEPTANCE_DECAY = 0.5
THRESHOLD_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class AdaptiveState(GammaState):
    """Also AdaEDL's moving acceptance (NaN before the first round) and its threshold."""

    acceptance: float = nan
    threshold: float = LIMITS["adaedl"]


def limit(settings: "AdaptiveSettings") -> float:
    """The threshold of a policy that judges every draft; 0 for the heuristic."""
    published = LIMITS.get(settings.gamma_policy, 0.0)
    return published if settings.gamma_limit is None else settings.gamma_limit


def first_state(settings: "AdaptiveSettings") -> AdaptiveState:
    gamma = min(max(settings.gamma, settings.gamma_min, 1), settings.offered)
    return AdaptiveState(gamma, threshold=limit(settings))


def reach(
    settings: "AdaptiveSettings", state: AdaptiveState, drafted: int, figures: DraftDistributions
) -> int | None:
    """How many drafts the rule of the policy makes; None if it does not stop."""
    policy = settings.gamma_policy
    for count, h in enumerate(figures.h):  # before draft number count + 1
        bound = 1 - sqrt(ADAEDL_SCALE * h) if policy == "adaedl" else 1.0
        if bound < state.threshold and count >= settings.gamma_min:
            return count
        if count == drafted:
            break
        if count + 1 < settings.gamma_min:
            continue
        if policy == "svip" and sqrt(SVIP_SCALE * h) > limit(settings):
            return count + 1
        if policy == "confidence" and figures.chance[count] < limit(settings):
            return count + 1
    return None


def next_state(
    settings: "AdaptiveSettings",
    state: AdaptiveState,
    length: GammaRecord,
    accepted: int,
    figures: DraftDistributions,
) -> AdaptiveState:
    """The state after a round with `length.gamma_eff` drafts, of which `accepted` were accepted."""
    policy = settings.gamma_policy
    drafted = length.gamma_eff
    if policy == "heuristic":
        gamma = state.gamma + (2 if accepted == drafted else -1)
        gamma = min(max(gamma, settings.gamma_min, 1), settings.offered)
        return replace(state, gamma=gamma) if drafted else state
    if not figures.h:
        return state
    stop = reach(settings, state, drafted, figures)
    reached = max(2 * drafted, 1) if stop is None else stop
    gamma = min(LENGTH_DECAY * state.gamma + (1 - LENGTH_DECAY) * reached, settings.offered)
    state = replace(state, gamma=gamma)
    if policy != "adaedl" or not drafted:
        return state
    # a higher threshold, so shorter chains, after many rejections; else a lower one
    acceptance = accepted / drafted
    if not isnan(state.acceptance):
        acceptance = ACCEPTANCE_DECAY * state.acceptance + (1 - ACCEPTANCE_DECAY) * acceptance
    step = THRESHOLD_STEP if acceptance <= TARGET_ACCEPTANCE else -THRESHOLD_STEP
    threshold = THRESHOLD_DECAY * state.threshold + (1 - THRESHOLD_DECAY) * (state.threshold + step)
    return replace(state, acceptance=acceptance, threshold=threshold)
