"""Drafting with a small language model: a chain of its most likely tokens for every branch.

The model's pool holds the text itself, the root token included, so that a draft is simply what it
would write next. How many drafts a branch gets is a policy's business (`gamma.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kv.pool import KVCache
from ..masks import build
from ..tree import single_path
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
    growth = _Growth(drafter, start, kv, drawing)
    for step in range(1, start.settings.most + 1):
        growth.draft_(step)
    growth.work.close_()
    return growth.proposal()


class _Growth:
    """The drafts so far of all branches, each list by step: [S, 1] each, laws [S, V]."""

    def __init__(
        self, drafter: Target, start: ChainStart, kv: KVCache, drawing: Drawing | None
    ) -> None:
        self.drafter, self.start, self.drawing = drafter, start, drawing
        self.work = Workspace(kv, start.draft_rows, max(start.settings.most - 1, 0))
        self.logits_SV = start.logits_SV
        self.branch_S = torch.arange(len(start.states), device=start.logits_SV.device)
        self.alive_S = torch.ones_like(self.branch_S, dtype=torch.bool)
        none_S0 = self.branch_S[:, None][:, :0]
        self.tokens, self.valid, self.scores = [none_S0], [none_S0.bool()], [none_S0.float()]
        self.laws: list[Tensor] = []

    def draft_(self, step: int) -> None:
        """Choose the next draft of every branch and, unless it is the last one, forward it."""
        token_S1 = self._choose_(step)[:, None]
        log_prob_S1 = self.logits_SV.log_softmax(-1).gather(1, token_S1).float()
        self._stop_(step, log_prob_S1.squeeze(1).exp())
        self.tokens.append(token_S1)
        self.scores.append(log_prob_S1)
        if step < self.start.settings.most:
            self.logits_SV = self._forward(step)

    def _choose_(self, step: int) -> Tensor:
        """int64 [S], the drafts."""
        if self.drawing is None:
            return self.logits_SV.argmax(-1)
        behind_SC = torch.cat([self.drawing.root_S[:, None], *self.tokens], 1)
        scores_SV = self.drawing.scores(self.logits_SV, self.branch_S, behind_SC)
        if self.drawing.shows_probs:
            self.laws.append(self.drawing.laws(scores_SV, self.branch_S))
        return self.drawing.one(scores_SV, self.branch_S, torch.full_like(self.branch_S, step))

    def _stop_(self, step: int, chance_S: Tensor) -> None:
        """Note which drafts are made, and which chains go on; chance_S: of the drafts."""
        start, settings = self.start, self.start.settings
        self.alive_S = self.alive_S & (step <= start.lengths.gamma_eff_S)
        if settings.gamma_policy not in STOPPING:
            self.valid.append(self.alive_S[:, None])
            return
        h_S = entropy(self.logits_SV)
        self.alive_S = self.alive_S & ~stops_before(settings, start.states, step - 1, h_S)
        self.valid.append(self.alive_S[:, None])
        self.alive_S = self.alive_S & ~stops_after(settings, step, h_S, chance_S)

    def _forward(self, step: int) -> Tensor:
        """logits_SV behind draft number `step`, which is written as a fresh row."""
        frame, device = self.work.frame, self.logits_SV.device
        step_M = torch.arange(1, step + 1, device=device)
        seen_S1M = torch.ones(len(self.branch_S), 1, step, dtype=torch.bool, device=device)
        return self.drafter.forward(
            frame.spread(self.tokens[-1]),
            *self.work.fresh(seen_S1M, self.start.draft_rows.position_S[:, None] + step_M),
            self.work.kv,
            (LayerStatus.DECODE,) * self.drafter.num_layers,
            frame.index_S,
            (),
        ).logits_RV

    def proposal(self) -> Proposal:
        valid_SN = torch.cat(self.valid, 1)
        notes = [packed(self.start.lengths), valid_SN.sum(1, keepdim=True)]
        return replace(
            single_path(torch.cat(self.tokens, 1), torch.cat(self.scores, 1)),
            valid_SN=valid_SN,
            side_outputs_SC=torch.cat(notes, 1),
            draft_probs_STV=torch.stack([*self.laws, self.laws[-1]], 1) if self.laws else None,
        )
