"""Draft lengths: how many tokens a chain drafter offers each branch in a round.

Lossless whatever the policy: a length depends on the committed prefix, on earlier rounds, and on
tokens that stay drafted; a token is never thrown away for what it is.

==========  =====================================================================================
fixed       `gamma` tokens
egag        from the entropy of the drafter's law of the first draft, smoothed over rounds (EMA)
heuristic   two more after a round that accepted every draft, else one less (transformers)
svip        up to `gamma_max`; stops after a token drawn at high entropy (2411.18462)
confidence  up to `gamma_max`; stops after a token of low probability (2405.04304, transformers)
adaedl      up to `gamma_max`; stops before a token whose entropy bounds its acceptance below a
            threshold (2410.18351), which follows the observed acceptance (2309.08168)
==========  =====================================================================================

The first three plan a length before drafting; the others decide while drafting. All of it happens
on the device, and what the host wants to know comes with the round's one read (`packed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import isnan, log, nan

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .gamma_settings import STOPPING, GammaPolicy, GammaSettings

SVIP_SCALE, SVIP_LIMIT = 0.15, 0.3
CONFIDENCE_LIMIT = 0.4
ADAEDL_SCALE, ADAEDL_THRESHOLD = 0.2, 0.4
# Draft & Verify's adaptation: wanted acceptance, step, share of the old acceptance and threshold
WANTED, THRESHOLD_STEP, KEPT_ACCEPTANCE, KEPT_THRESHOLD = 0.9, 0.01, 0.5, 0.9


@dataclass(frozen=True, slots=True)
class GammaState:
    """What a branch carries from round to round; a fork copies it, a new request starts afresh.

    gamma: `heuristic`'s next length. ema: EGAG's moving average, NaN before the first round.
    acceptance, threshold: AdaEDL's moving acceptance (NaN at first) and stopping threshold.
    """

    gamma: int
    ema: float = nan
    acceptance: float = nan
    threshold: float = ADAEDL_THRESHOLD


@dataclass(frozen=True, slots=True)
class GammaRecord:
    """One branch in one round, for the trace; NaN where a policy does not look at entropy.

    h: entropy in nats of the first draft's law; h_norm: over the reference, cut to [0, 1].
    raw: the length before smoothing; ema: after it; gamma: rounded and clamped; gamma_eff: cut to
    what the answer still needs; accepted: drafts accepted.
    """

    h: float
    h_norm: float
    raw: float
    ema: float
    gamma: int
    gamma_eff: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """The planned lengths of all branches in a round: float64 [S], the last two int64 [S]."""

    h_S: Tensor
    h_norm_S: Tensor
    raw_S: Tensor
    ema_S: Tensor
    gamma_S: Tensor
    gamma_eff_S: Tensor


def entropy(logits_RV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, [R], of softmax(logits / temperature); masked entries (-inf) count 0."""
    logp_RV = (logits_RV / temperature).log_softmax(-1)
    terms_RV = torch.where(logp_RV > -torch.inf, logp_RV.exp() * logp_RV, 0.0)
    return (-terms_RV.sum(-1)).clamp(min=0)


def normalised(h_S: Tensor, h_ref: float | None, vocabulary: int) -> Tensor:
    """Entropy over its reference (ln V if None), cut to [0, 1]; 0 for a vocabulary of one."""
    reference = log(vocabulary) if h_ref is None else h_ref
    return (h_S / reference).clamp(0, 1) if reference > 0 else torch.zeros_like(h_S)


def plan(
    settings: GammaSettings,
    states: Sequence[GammaState],
    h_S: Tensor,
    vocabulary: int,
    remaining_S: Tensor,
) -> Lengths:
    """Lengths before anything is drafted; for the stopping policies the most they may draft.

    Args:
        h_S: entropy of the drafter's law of the first draft (`entropy`); only EGAG reads it.
        remaining_S: int64, tokens that each branch may still emit, the target's own included.
    """
    h_S = h_S.double()
    h_norm_S = normalised(h_S, settings.egag_h_ref, vocabulary)
    raw_S = _raw(settings, states, h_norm_S)
    ema_S, beta = raw_S, settings.egag_ema_beta
    if settings.gamma_policy == GammaPolicy.EGAG and beta:
        before_S = _column([state.ema for state in states], h_S)  # never the rounded or cut length
        ema_S = torch.where(before_S.isnan(), raw_S, beta * before_S + (1 - beta) * raw_S)
    gamma_S = (ema_S + 0.5).floor().long()
    if settings.gamma_policy != GammaPolicy.FIXED:
        gamma_S = gamma_S.clamp(settings.gamma_min, settings.longest)
    gamma_eff_S = torch.minimum(gamma_S, remaining_S - 1).clamp(min=0)
    return Lengths(h_S, h_norm_S, raw_S, ema_S, gamma_S, gamma_eff_S)


def _raw(settings: GammaSettings, states: Sequence[GammaState], h_norm_S: Tensor) -> Tensor:
    low, high = settings.gamma_min, settings.longest
    policy = settings.gamma_policy
    if policy == GammaPolicy.EGAG and settings.egag_mode == "seed":
        return ((1 - h_norm_S) * high).floor().clamp(low, high)
    if policy == GammaPolicy.EGAG:
        return low + (1 - h_norm_S) * (high - low)
    if policy == GammaPolicy.HEURISTIC:
        return _column([state.gamma for state in states], h_norm_S)
    return torch.full_like(h_norm_S, high if policy in STOPPING else settings.gamma)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(like.device)


def stops_before(
    settings: GammaSettings, states: Sequence[GammaState], step: int, h_S: Tensor
) -> Tensor:
    """bool [S]: no further token, judged by the law it would be drawn from (AdaEDL).

    Args:
        step: drafts made in this round; below `gamma_min` nothing stops.
        h_S: entropy of the law of the next draft.
    """
    if settings.gamma_policy != GammaPolicy.ADAEDL or step < settings.gamma_min:
        return torch.zeros_like(h_S, dtype=torch.bool)
    limit_S = _column([state.threshold for state in states], h_S)
    return 1 - (ADAEDL_SCALE * h_S.double()).sqrt() < limit_S


def stops_after(settings: GammaSettings, step: int, h_S: Tensor, chance_S: Tensor) -> Tensor:
    """bool [S]: this token, which stays drafted, is the last one (SVIP, confidence).

    Args:
        step: drafts made in this round, this one included.
        h_S: entropy of the law it was drawn from. chance_S: its probability there.
    """
    policy = settings.gamma_policy
    if step >= settings.gamma_min and policy == GammaPolicy.SVIP:
        return (SVIP_SCALE * h_S.double()).sqrt() > SVIP_LIMIT
    if step >= settings.gamma_min and policy == GammaPolicy.CONFIDENCE:
        return chance_S < CONFIDENCE_LIMIT
    return torch.zeros_like(h_S, dtype=torch.bool)


def first_state(settings: GammaSettings) -> GammaState:
    """The state of a branch that has not drafted yet."""
    return GammaState(min(max(settings.gamma, settings.gamma_min, 1), settings.longest))


def next_state(
    settings: GammaSettings, state: GammaState, drafted: int, accepted: int, ema: float
) -> GammaState:
    """The state after a round that drafted and accepted so many tokens; ema as in its record."""
    if settings.gamma_policy == GammaPolicy.EGAG:
        return replace(state, ema=ema)
    if drafted == 0:  # nothing was learnt
        return state
    if settings.gamma_policy == GammaPolicy.HEURISTIC:
        gamma = state.gamma + (2 if accepted == drafted else -1)
        return GammaState(min(max(gamma, settings.gamma_min, 1), settings.longest))
    if settings.gamma_policy == GammaPolicy.ADAEDL:
        return _adapted(state, accepted / drafted)
    return state


def _adapted(state: GammaState, seen: float) -> GammaState:
    """Too many rejections: stop earlier. Hardly any: draft further."""
    kept = KEPT_ACCEPTANCE
    acceptance = seen if isnan(state.acceptance) else kept * state.acceptance + (1 - kept) * seen
    aim = state.threshold + (THRESHOLD_STEP if acceptance <= WANTED else -THRESHOLD_STEP)
    threshold = KEPT_THRESHOLD * state.threshold + (1 - KEPT_THRESHOLD) * aim
    return replace(state, acceptance=acceptance, threshold=threshold)


def packed(lengths: Lengths) -> Tensor:
    """int64 [S, 6]: lengths as bits, to travel in the round's one read of integers."""
    parts = [getattr(lengths, one.name) for one in fields(Lengths)]
    bits = [part.view(torch.int64) if part.is_floating_point() else part for part in parts]
    return torch.stack(bits, dim=1)


def records(bits_SC: npt.NDArray[np.int64], accepted: Sequence[int]) -> list[GammaRecord]:
    """The records of a round from what was read of `packed` and the accepted counts."""
    floats = np.ascontiguousarray(bits_SC[:, :4]).view(np.float64).tolist()
    rows = zip(floats, bits_SC[:, 4:].tolist(), accepted, strict=True)
    return [
        GammaRecord(h, h_norm, raw, ema, gamma, gamma_eff, count)
        for (h, h_norm, raw, ema), (gamma, gamma_eff), count in rows
    ]
