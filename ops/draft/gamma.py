"""Draft lengths: how many tokens a chain drafter proposes for each branch in a round; no torch.

A length follows from earlier rounds, so the host knows it before the drafter runs, and the target
gets rows for these drafts alone. The policies, and those of `examples`: docs/drafters.md."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, isnan, log, nan
from typing import Any, Literal

Policy = Literal["fixed", "egag", "cost"]
GammaSettings = Any  # `VanillaSettings` of `states`, which ops do not import


@dataclass(frozen=True, slots=True)
class GammaState:
    """A policy's state for one branch between rounds, NaN before the first: the next length, not
    rounded; EGAG's last entropy and moving average."""

    gamma: float
    h: float = nan
    ema: float = nan


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
    high = settings.offered
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
    return GammaState(min(max(settings.gamma, settings.gamma_min, 1), settings.offered))


def next_state(
    settings: GammaSettings,
    state: GammaState,
    length: GammaRecord,
    accepted: int,
    figures: DraftDistributions,
) -> GammaState:
    """The state after a round with `length.gamma_eff` drafts, of which `accepted` were accepted."""
    if settings.gamma_policy != "egag":
        return state
    h = figures.h[min(accepted, len(figures.h) - 1)] if figures.h else state.h
    return replace(state, h=h, ema=length.ema)
