"""Draft lengths: how many tokens a chain drafter offers each branch in a round.

A length is known on the host before anything is drafted, from what the last round's read told, so
that nothing is computed that nobody looks at: the drafter makes as many steps as the longest chain
has drafts, and the target gets rows for these drafts alone. Lossless whatever the policy: a length
depends on earlier rounds only; a token is never thrown away for what it is.

==========  =====================================================================================
fixed       `gamma` tokens
egag        from the entropy of the drafter's law where the last round ended, smoothed over rounds
heuristic   two more after a round that accepted every draft, else one less (transformers)
svip        as far as drafts went in the last rounds until one was drawn at high entropy
            (2411.18462)
confidence  the same until one had a low probability (2405.04304, transformers)
adaedl      the same until before one whose entropy bounds its acceptance below a threshold
            (2410.18351), which follows the observed acceptance (2309.08168)
cost        what is expected to give most tokens in a millisecond (`choice.py`)
==========  =====================================================================================

As published, svip, confidence and adaedl stop inside a round. That takes a read of the device for
every draft, or drafts for nothing; here the rule's verdict on a round is the length of later ones:
half of it is the last verdict (twice the length where nothing stopped it), half what was before.
"""

from dataclasses import dataclass, replace
from math import floor, isnan, log, nan, sqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .gamma_settings import LIMITS, GammaPolicy, GammaSettings

SVIP_SCALE = 0.15
ADAEDL_SCALE = 0.2
KEPT_REACH = 0.5  # share of the past in how far drafts go
# Draft & Verify's adaptation: wanted acceptance, step, share of the old acceptance and threshold
WANTED = 0.9
THRESHOLD_STEP = 0.01
KEPT_ACCEPTANCE = 0.5
KEPT_THRESHOLD = 0.9

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GammaState:
    """What a branch carries from round to round; a new request starts afresh.

    gamma: the next length before it is rounded, of all policies but egag and cost. h: entropy of
    the drafter's law where the last round ended, NaN before. ema: EGAG's moving average, NaN before
    the first. acceptance, threshold: AdaEDL's moving acceptance (NaN at first) and threshold.
    """

    gamma: float
    h: float = nan
    ema: float = nan
    acceptance: float = nan
    threshold: float = LIMITS[GammaPolicy.ADAEDL]


@dataclass(frozen=True, slots=True)
class Length:
    """The planned length of one branch's chain.

    h: entropy in nats, NaN where a policy does not look at it (or has not seen any); h_norm: over
    the reference, cut to [0, 1]. raw: the length before smoothing; ema: after it; gamma: rounded
    and clamped; gamma_eff: cut to what the answer still needs.
    """

    h: float
    h_norm: float
    raw: float
    ema: float
    gamma: int
    gamma_eff: int


@dataclass(frozen=True, slots=True)
class GammaRecord(Length):
    """The same after the round, for the trace; accepted: drafts accepted."""

    accepted: int


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """What the host is told of a chain's laws, host float64 [n]; both empty if nobody asked.

    h: entropies in nats, of the law of the first draft on, one at least. chance: the probability of
    each draft under its own.
    """

    h: Floats
    chance: Floats


NO_LAWS = DraftLaws(np.zeros(0), np.zeros(0))


def entropy(logits_RV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, [R], of softmax(logits / temperature); masked entries (-inf) count 0."""
    logp_RV = (logits_RV / temperature).log_softmax(-1)
    terms_RV = torch.where(logp_RV > -torch.inf, logp_RV.exp() * logp_RV, 0.0)
    return (-terms_RV.sum(-1)).clamp(min=0)


def normalised(h: float, h_ref: float | None, vocabulary: int) -> float:
    """Entropy over its reference (ln V if None), cut to [0, 1]; 0 for a vocabulary of one."""
    reference = log(vocabulary) if h_ref is None else h_ref
    return min(max(h / reference, 0.0), 1.0) if reference > 0 else 0.0


def plan(settings: GammaSettings, state: GammaState, vocabulary: int, remaining: int) -> Length:
    """A chain's length, before anything is drafted.

    Args:
        remaining: tokens that the branch may still emit, the target's own included.
    """
    h = nan
    h_norm = nan
    ema = nan
    low = settings.gamma_min
    high = settings.longest
    policy = settings.gamma_policy
    raw = settings.gamma if policy == GammaPolicy.FIXED else state.gamma
    if policy == GammaPolicy.EGAG and not isnan(state.h):
        h = state.h
        h_norm = normalised(state.h, settings.egag_h_ref, vocabulary)
        raw = low + (1 - h_norm) * (high - low)
        if settings.egag_mode == "seed":
            raw = min(max(floor((1 - h_norm) * high), low), high)
        ema = raw
        beta = settings.egag_ema_beta
        if beta and not isnan(state.ema):  # never of the rounded or cut length
            ema = beta * state.ema + (1 - beta) * raw
    gamma = floor((raw if isnan(ema) else ema) + 0.5)
    if policy != GammaPolicy.FIXED:
        gamma = min(max(gamma, low), high)
    return Length(h, h_norm, raw, ema, gamma, cut(gamma, remaining))


def cut(gamma: int, remaining: int) -> int:
    """A length, cut to what an answer still needs: the target adds one token itself."""
    return max(min(gamma, remaining - 1), 0)


def first_state(settings: GammaSettings) -> GammaState:
    """The state of a branch that has not drafted yet."""
    gamma = min(max(settings.gamma, settings.gamma_min, 1), settings.longest)
    return GammaState(gamma, threshold=settings.limit)


def reach(settings: GammaSettings, state: GammaState, drafted: int, laws: DraftLaws) -> int | None:
    """How many of the drafts the rule of the policy would have made; None if it stops at none."""
    policy = settings.gamma_policy
    for made, h in enumerate(laws.h.tolist()):  # before draft number made + 1
        bound = 1 - sqrt(ADAEDL_SCALE * h) if policy == GammaPolicy.ADAEDL else 1.0
        if bound < state.threshold and made >= settings.gamma_min:
            return made
        if made == drafted:
            break
        if made + 1 < settings.gamma_min:
            continue
        if policy == GammaPolicy.SVIP and sqrt(SVIP_SCALE * h) > settings.limit:
            return made + 1
        if policy == GammaPolicy.CONFIDENCE and laws.chance[made] < settings.limit:
            return made + 1
    return None


def next_state(
    settings: GammaSettings,
    state: GammaState,
    length: Length,
    accepted: int,
    laws: DraftLaws = NO_LAWS,
) -> GammaState:
    """The state after a round that drafted `length.gamma_eff` tokens and accepted so many."""
    policy = settings.gamma_policy
    drafted = length.gamma_eff
    if policy == GammaPolicy.EGAG:
        h = float(laws.h[min(accepted, len(laws.h) - 1)]) if len(laws.h) else state.h
        return replace(state, h=h, ema=length.ema)
    if policy == GammaPolicy.HEURISTIC and drafted:
        gamma = state.gamma + (2 if accepted == drafted else -1)
        return replace(state, gamma=min(max(gamma, settings.gamma_min, 1), settings.longest))
    if policy not in LIMITS or not len(laws.h):
        return state
    stop = reach(settings, state, drafted, laws)
    went = max(2 * drafted, 1) if stop is None else stop
    gamma = min(KEPT_REACH * state.gamma + (1 - KEPT_REACH) * went, settings.longest)
    state = replace(state, gamma=gamma)
    adapts = policy == GammaPolicy.ADAEDL and drafted
    return _adapted(state, accepted / drafted) if adapts else state


def _adapted(state: GammaState, seen: float) -> GammaState:
    """Too many rejections: stop earlier. Hardly any: draft further."""
    kept = KEPT_ACCEPTANCE
    acceptance = seen if isnan(state.acceptance) else kept * state.acceptance + (1 - kept) * seen
    aim = state.threshold + (THRESHOLD_STEP if acceptance <= WANTED else -THRESHOLD_STEP)
    threshold = KEPT_THRESHOLD * state.threshold + (1 - KEPT_THRESHOLD) * aim
    return replace(state, acceptance=acceptance, threshold=threshold)


def packed(h_SN: Tensor, chance_SN: Tensor) -> Tensor:
    """int64 [S, 2 N]: two tables of float64 as bits, to travel in the round's one read."""
    return torch.cat([h_SN.double(), chance_SN.double()], 1).view(torch.int64)


def unpacked(bits_SC: npt.NDArray[np.int64], width: int) -> list[DraftLaws]:
    """What was read of `packed` tables that are so wide, or nothing of an empty one."""
    if bits_SC.shape[1] < 2 * width:
        return [NO_LAWS] * len(bits_SC)
    floats_SC = np.ascontiguousarray(bits_SC[:, : 2 * width]).view(np.float64)
    return [DraftLaws(row[:width], row[width:]) for row in floats_SC]
