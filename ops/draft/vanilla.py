"""Drafting with a small language model: a chain of its most likely tokens for every branch.

The model's pool holds the text itself, the root token included, so that a draft is simply what it
would write next. How many drafts a branch gets is a policy's business (`gamma.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kv.pool import KVCache
from ..masks import build
from ..types import DraftRows, LayerStatus, Proposal, Target
from .drawing import Drawing
from .gamma import GammaState, Lengths, entropy, packed, plan, stops_after, stops_before
from .gamma_settings import STOPPING, GammaSettings
from .workspace import Workspace


@dataclass(frozen=True, slots=True)
class ChainStart:
    """What a chain begins with: logits_SV behind each root, and how long each may become."""

    logits_SV: Tensor
    lengths: Lengths
    settings: GammaSettings
    states: tuple[GammaState, ...]
    draft_rows: DraftRows


def catch_up_(
    drafter: Target,
    draft_rows: DraftRows,
    kv: KVCache,
    settings: GammaSettings,
    states: Sequence[GammaState],
    remaining_S: Tensor,
) -> ChainStart:
    """Read what was committed, for all branches in one forward, and plan the chains.

    Args:
        remaining_S: int64, tokens that each branch may still emit.
    """
    rows = draft_rows.rows
    logits_SV = drafter.forward(
        rows.tokens_BQ,
        rows.positions_BQ,
        rows.slots_BQ,
        build(rows, kv, attention=draft_rows.attention),
        kv,
        (LayerStatus.DECODE,) * drafter.num_layers,
        rows.tips_R,
        (),
    ).logits_RV
    lengths = plan(settings, states, entropy(logits_SV), logits_SV.shape[-1], remaining_S)
    return ChainStart(logits_SV, lengths, settings, tuple(states), draft_rows)


def write_chain_(
    drafter: Target, start: ChainStart, kv: KVCache, drawing: Drawing | None = None
) -> Proposal:
    """One draft after another for all branches at once; a chain that is over is padded.

    Its notes are the planned lengths (`gamma.packed`) and the drafts made, for `gamma.records`.

    Args:
        drawing: None for the best token of every step.
    """
    work = Workspace(kv, start.draft_rows, max(start.settings.most - 1, 0))
    logits_SV, found = start.logits_SV, _Chain(drawing, start)
    alive_S = torch.ones(len(start.states), dtype=torch.bool, device=logits_SV.device)
    for step in range(1, start.settings.most + 1):
        chance_S = found.draft_(logits_SV)
        alive_S, ends_S = _stops(start, step, logits_SV, chance_S, alive_S)
        found.valid.append(alive_S)
        alive_S = alive_S & ~ends_S
        if step < start.settings.most:
            logits_SV = _next_logits(drafter, work, start, step, found.tokens)
    work.close_()
    return found.proposal()


class _Chain:
    """The drafts so far of all branches, each list by step: [S] each, laws [S, V]."""

    def __init__(self, drawing: Drawing | None, start: ChainStart) -> None:
        self.drawing, self.start = drawing, start
        self.branch_S = torch.arange(len(start.states), device=start.logits_SV.device)
        self.tokens: list[Tensor] = []
        self.valid: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.laws: list[Tensor] = []

    def draft_(self, logits_SV: Tensor) -> Tensor:
        """Choose the next draft of every branch; its probability under the drafter, [S]."""
        token_S = self._choose_(logits_SV)
        log_prob_S = logits_SV.log_softmax(-1).gather(1, token_S[:, None]).squeeze(1).float()
        self.tokens.append(token_S)
        self.scores.append(log_prob_S)
        return log_prob_S.exp()

    def _choose_(self, logits_SV: Tensor) -> Tensor:
        if self.drawing is None:
            return logits_SV.argmax(-1)
        behind_SC = torch.stack([self.drawing.root_S, *self.tokens], 1)
        scores_SV = self.drawing.scores(logits_SV, self.branch_S, behind_SC)
        if self.drawing.shows_probs:
            self.laws.append(self.drawing.laws(scores_SV, self.branch_S))
        depth_S = torch.full_like(self.branch_S, len(self.tokens) + 1)
        return self.drawing.one(scores_SV, self.branch_S, depth_S)

    def proposal(self) -> Proposal:
        levels = len(self.tokens)
        level_SN = torch.arange(levels, device=self.branch_S.device).expand(len(self.branch_S), -1)
        none_SN = level_SN[:, :0]
        valid_SN = torch.stack(self.valid, 1) if levels else none_SN.bool()
        drafted_S1 = valid_SN.sum(1, keepdim=True)
        return Proposal(
            torch.stack(self.tokens, 1) if levels else none_SN,
            level_SN - 1,
            level_SN + 1,
            valid_SN,
            torch.stack(self.scores, 1).cumsum(1) if levels else none_SN.float(),
            levels,
            torch.cat([packed(self.start.lengths), drafted_S1], 1),
            draft_probs_STV=torch.stack([*self.laws, self.laws[-1]], 1) if self.laws else None,
            is_chain=True,
        )


def _stops(
    start: ChainStart, step: int, logits_SV: Tensor, chance_S: Tensor, alive_S: Tensor
) -> tuple[Tensor, Tensor]:
    """(whether draft number `step` is made, whether it is the last one), bool [S]."""
    settings = start.settings
    alive_S = alive_S & (step <= start.lengths.gamma_eff_S)
    if settings.gamma_policy not in STOPPING:
        return alive_S, torch.zeros_like(alive_S)
    h_S = entropy(logits_SV)
    alive_S = alive_S & ~stops_before(settings, start.states, step - 1, h_S)
    return alive_S, stops_after(settings, step, h_S, chance_S)


def _next_logits(
    drafter: Target, work: Workspace, start: ChainStart, step: int, tokens: Sequence[Tensor]
) -> Tensor:
    """logits_SV behind draft number `step`, which is written as a fresh row."""
    frame, device = work.frame, start.logits_SV.device
    position_SM = start.draft_rows.position_S[:, None] + torch.arange(1, step + 1, device=device)
    seen_S1M = torch.ones(len(start.states), 1, step, dtype=torch.bool, device=device)
    return drafter.forward(
        frame.spread(tokens[-1][:, None]),
        *work.fresh(seen_S1M, position_SM),
        work.kv,
        (LayerStatus.DECODE,) * drafter.num_layers,
        frame.flat(),
        (),
    ).logits_RV
