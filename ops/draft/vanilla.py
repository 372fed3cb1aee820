"""Drafting with a small language model: a chain of its most likely tokens for every branch.

The model's pool holds the text itself, the root token included. A policy sets the number of drafts
of a branch (`gamma.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention.backends import AttentionPlan
from ..forward import Target, plan_attention
from ..kv.pool import KVCache
from ..layer_plan import LayerStatus
from ..types import DraftRows, DraftWork, Proposal, single_path
from .drawing import Drawing
from .eagle import Workspace
from .gamma import DraftDistributions


@dataclass(frozen=True, slots=True)
class ChainStart:
    """logits_SV after each root, and the number of drafts of each branch.

    looks: whether the length policy reads the distributions of the drafts.
    """

    logits_SV: Tensor
    lengths: tuple[int, ...]
    looks: bool
    draft_rows: DraftRows

    @property
    def most(self) -> int:
        return max(self.lengths, default=0)


def logits_of(
    drafter: Target,
    tokens_BQ: Tensor,
    positions_BQ: Tensor,
    slots_BQ: Tensor,
    attention: AttentionPlan,
    kv: KVCache,
    logit_rows_R: Tensor,
) -> Tensor:
    """float32 [R, V]: the logits of some rows (flat indices) of one forward."""
    plan = (LayerStatus.DECODE,) * drafter.num_layers
    return drafter.forward(
        tokens_BQ, positions_BQ, slots_BQ, attention, kv, plan, logit_rows_R, ()
    ).logits_RV


def catch_up_(
    drafter: Target, draft_rows: DraftRows, kv: KVCache, lengths: Sequence[int], *, looks: bool
) -> ChainStart:
    """Read the committed rows of all branches in one forward.

    Args:
        lengths: drafts of each branch (host ints).
    """
    rows = draft_rows.rows
    attention = plan_attention(rows, kv, attention=draft_rows.attention)
    logits_SV = logits_of(
        drafter, rows.tokens_BQ, rows.positions_BQ, rows.slots_BQ, attention, kv, rows.tips_R
    )
    return ChainStart(logits_SV, tuple(lengths), looks, draft_rows)


def write_chain_(
    drafter: Target, start: ChainStart, kv: KVCache, drawing: Drawing | None = None
) -> Proposal:
    """One draft after another for all branches at once, up to the longest chain.

    With `start.looks` the side outputs are `packed` figures of as many drafts, at least one.

    Args:
        drawing: None for the best token of every step.
    """
    growth = _Growth(drafter, start, kv, drawing)
    for step in range(1, start.most + 1):
        growth.draft_(step)
    if growth.work is not None:
        growth.work.close_()
    return growth.proposal()


class _Growth:
    """The drafts so far of all branches, lists by step: [S, 1] each, distributions [S, V]."""

    def __init__(
        self, drafter: Target, start: ChainStart, kv: KVCache, drawing: Drawing | None
    ) -> None:
        self.drafter = drafter
        self.start = start
        self.drawing = drawing
        self.work = Workspace(kv, start.draft_rows, start.most - 1) if start.most > 1 else None
        self.logits_SV = start.logits_SV
        self.branch_S = torch.arange(len(start.lengths), device=start.logits_SV.device)
        none_S0 = self.branch_S[:, None][:, :0]
        self.tokens = [none_S0]
        self.scores = [none_S0.float()]
        self.entropies: list[Tensor] = []
        self.draft_probs: list[Tensor] = []

    def draft_(self, step: int) -> None:
        """Choose the next draft of every branch and, unless it is the last one, forward it."""
        token_S1 = self._choose_(step)[:, None]
        self.tokens.append(token_S1)
        self.scores.append(self.logits_SV.log_softmax(-1).gather(1, token_S1).float())
        if self.start.looks:
            self.entropies.append(entropy(self.logits_SV)[:, None])
        if step < self.start.most:
            self.logits_SV = self._forward(step)

    def _choose_(self, step: int) -> Tensor:
        """int64 [S], the drafts."""
        if self.drawing is None:
            return self.logits_SV.argmax(-1)
        behind_SC = torch.cat([self.drawing.root_S[:, None], *self.tokens], 1)
        scores_SV = self.drawing.scores(self.logits_SV, self.branch_S, behind_SC)
        if self.drawing.shows_probs:
            self.draft_probs.append(self.drawing.probabilities(scores_SV, self.branch_S))
        return self.drawing.draw(scores_SV, self.branch_S, torch.full_like(self.branch_S, step))

    def _forward(self, step: int) -> Tensor:
        """logits_SV behind draft number `step`, which is written as a fresh row."""
        assert self.work is not None
        frame = self.work.frame
        device = self.logits_SV.device
        step_M = torch.arange(1, step + 1, device=device)
        seen_S1M = torch.ones(len(self.branch_S), 1, step, dtype=torch.bool, device=device)
        tokens_BQ = frame.spread(self.tokens[-1])
        position_SM = self.start.draft_rows.position_S[:, None] + step_M
        positions_BQ, slots_BQ, attention = self.work.fresh(seen_S1M, position_SM)
        kv = self.work.kv
        return logits_of(
            self.drafter, tokens_BQ, positions_BQ, slots_BQ, attention, kv, frame.index_S
        )

    def proposal(self) -> Proposal:
        start = self.start
        scores_SN = torch.cat(self.scores, 1)
        lengths_S1 = torch.tensor(start.lengths, device=scores_SN.device)[:, None]
        step_N = torch.arange(start.most, device=scores_SN.device)
        draft_probs_STV = None
        if self.draft_probs:
            draft_probs_STV = torch.stack([*self.draft_probs, self.draft_probs[-1]], 1)
        return replace(
            single_path(torch.cat(self.tokens, 1), scores_SN),
            valid_SN=step_N < lengths_S1,
            side_outputs_SC=self._side_outputs(scores_SN) if start.looks else None,
            draft_probs_STV=draft_probs_STV,
            sizes=start.lengths,
            work=self._spent(),
        )

    def _side_outputs(self, scores_SN: Tensor) -> Tensor:
        if not self.entropies:  # without drafts, the distribution of the first one is known
            h_S1 = entropy(self.logits_SV)[:, None]
            return packed(h_S1, torch.full_like(h_S1, torch.nan))
        return packed(torch.cat(self.entropies, 1), scores_SN.exp())

    def _spent(self) -> DraftWork:
        """The forwards' rows; a finished chain's rows in the forwards of others are padding."""
        caught_up = self.start.draft_rows.work
        most = self.start.most
        if self.work is None:
            return caught_up
        idle = sum(max(most - 1 - max(length - 1, 0), 0) for length in self.start.lengths)
        return caught_up.plus(self.work.spent).plus(DraftWork(padding=idle))


def entropy(logits_RV: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, [R], of softmax(logits / temperature); masked entries (-inf) count 0."""
    logp_RV = (logits_RV / temperature).log_softmax(-1)
    terms_RV = torch.where(logp_RV > -torch.inf, logp_RV.exp() * logp_RV, 0.0)
    return (-terms_RV.sum(-1)).clamp(min=0)


def packed(h_SN: Tensor, chance_SN: Tensor) -> Tensor:
    """int64 [S, 2 N]: two tables of float64 as bits, for the round's one read."""
    return torch.cat([h_SN.double(), chance_SN.double()], 1).view(torch.int64)


def unpacked(bits_SC: npt.NDArray[np.int64], width: int) -> list[DraftDistributions]:
    """The figures of `packed` tables of this width on the host; empty ones of an empty table."""
    if bits_SC.shape[1] < 2 * width:
        return [DraftDistributions()] * len(bits_SC)
    floats_SC = np.ascontiguousarray(bits_SC[:, : 2 * width]).view(np.float64)
    return [DraftDistributions(row[:width], row[width:]) for row in floats_SC.tolist()]
