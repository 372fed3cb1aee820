"""Draft lengths: how many tokens a chain drafter proposes for each branch in a round; no torch.

A length follows from earlier rounds, so the host knows it before the drafter runs, and the target
gets rows for these drafts alone. The policies: docs/drafters.md; sources: svip 2411.18462,
confidence 2405.04304, adaedl 2410.18351 (its threshold: 2309.08168), heuristic: transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, isnan, log, nan, sqrt
from typing import Literal, Protocol

Policy = Literal["fixed", "egag", "heuristic", "svip", "confidence", "adaedl", "cost"]

LIMITS: dict[str, float] = {"svip": 0.3, "confidence": 0.4, "adaedl": 0.4}
"""The policies that judge every draft, and the published threshold of each."""
LOOKING = ("egag", *LIMITS)
"""The policies that read the drafter's distributions."""
SVIP_SCALE = 0.15
ADAEDL_SCALE = 0.2
LENGTH_DECAY = 0.5  # weight of the previous length
# The adaptation of Draft & Verify: the acceptance to reach, the step, and the weights of the past.
TARGET_ACCEPTANCE = 0.9
THRESHOLD_STEP = 0.01
ACCEPTANCE_DECAY = 0.5
THRESHOLD_DECAY = 0.9


class GammaSettings(Protocol):
    """What the policies read of `VanillaSettings`."""

    gamma: int
    gamma_policy: Policy
    gamma_min: int
    gamma_max: int | None
    gamma_limit: float | None
    egag_mode: Literal["linear", "seed"]
    egag_ema_beta: float
    egag_h_ref: float | None


def longest(settings: GammaSettings) -> int:
    """The upper bound of the adaptive policies."""
    return settings.gamma_max or max(settings.gamma, 1)


def limit(settings: GammaSettings) -> float:
    """The threshold of a policy that judges every draft; 0 for others."""
    published = LIMITS.get(settings.gamma_policy, 0.0)
    return published if settings.gamma_limit is None else settings.gamma_limit


@dataclass(frozen=True, slots=True)
class GammaState:
    """A policy's state for one branch between rounds, NaN before the first: the next length, not
    rounded; EGAG's last entropy and moving average; AdaEDL's moving acceptance, threshold."""

    gamma: float
    h: float = nan
    ema: float = nan
    acceptance: float = nan
    threshold: float = LIMITS["adaedl"]


@dataclass(frozen=True, slots=True)
class GammaRecord:
    """The planned length of a chain: the entropy in nats (NaN if not used or measured), over its
    reference in [0, 1]; the length before and after smoothing, rounded and clamped, and as the
    answer needs it; after the round, the number of accepted drafts."""

    h: float
    h_norm: float
    raw: float
    ema: float
    gamma: int
    gamma_eff: int
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """Along a chain the entropies in nats, and the chance of each draft; empty if not used."""

    h: Sequence[float] = ()
    chance: Sequence[float] = ()


def normalised(h: float, h_ref: float | None, vocabulary: int) -> float:
    """Entropy over its reference (ln V if None), clamped to [0, 1]; 0 for a vocabulary of one."""
    reference = log(vocabulary) if h_ref is None else h_ref
    return min(max(h / reference, 0.0), 1.0) if reference > 0 else 0.0


def plan(settings: GammaSettings, state: GammaState, vocab: int, remaining: int) -> GammaRecord:
    """A chain's length; remaining: tokens of the branch to come, the target's own included."""
    h = state.h if settings.gamma_policy == "egag" else nan
    h_norm = nan
    ema = nan
    low = settings.gamma_min
    high = longest(settings)
    raw: float = settings.gamma if settings.gamma_policy == "fixed" else state.gamma
    if not isnan(h):
        h_norm = normalised(h, settings.egag_h_ref, vocab)
        raw = low + (1 - h_norm) * (high - low)
        if settings.egag_mode == "seed":
            raw = min(max(floor((1 - h_norm) * high), low), high)
        ema = raw
        beta = settings.egag_ema_beta
        if beta and not isnan(state.ema):  # smooths the length before rounding and clamping
            ema = beta * state.ema + (1 - beta) * raw
    gamma = floor((raw if isnan(ema) else ema) + 0.5)
    gamma = gamma if settings.gamma_policy == "fixed" else min(max(gamma, low), high)
    needed = max(min(gamma, remaining - 1), 0)  # the target adds one token itself
    return GammaRecord(h=h, h_norm=h_norm, raw=raw, ema=ema, gamma=gamma, gamma_eff=needed)


def first_state(settings: GammaSettings) -> GammaState:
    gamma = min(max(settings.gamma, settings.gamma_min, 1), longest(settings))
    return GammaState(gamma, threshold=limit(settings))


def reach(
    settings: GammaSettings, state: GammaState, drafted: int, figures: DraftDistributions
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
    settings: GammaSettings,
    state: GammaState,
    length: GammaRecord,
    accepted: int,
    figures: DraftDistributions | None = None,
) -> GammaState:
    """The state after a round with `length.gamma_eff` drafts, of which `accepted` were accepted."""
    figures = figures or DraftDistributions()
    policy = settings.gamma_policy
    drafted = length.gamma_eff
    if policy == "egag":
        h = figures.h[min(accepted, len(figures.h) - 1)] if figures.h else state.h
        return replace(state, h=h, ema=length.ema)
    if policy == "heuristic" and drafted:
        gamma = state.gamma + (2 if accepted == drafted else -1)
        return replace(state, gamma=min(max(gamma, settings.gamma_min, 1), longest(settings)))
    if policy not in LIMITS or not figures.h:
        return state
    stop = reach(settings, state, drafted, figures)
    reached = max(2 * drafted, 1) if stop is None else stop
    gamma = min(LENGTH_DECAY * state.gamma + (1 - LENGTH_DECAY) * reached, longest(settings))
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
