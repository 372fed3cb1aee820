"""Drafting with a small language model: a chain of its tokens for every branch, as long as a policy
says (`gamma.py`). Its pool holds the text itself, the root token included."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention.backends import AttentionPlan
from ..forward import Target, largest
from ..kv.pool import KVCache
from ..layer_plan import decode_plan
from ..types import DraftRows, DraftWork, Proposal, single_path
from .eagle import Workspace
from .gamma import DraftDistributions
from .proposals import Drawing


@dataclass(frozen=True, slots=True)
class ChainStart:
    """logits_SV after each root, each branch's number of drafts, whether figures are needed."""

    logits_SV: Tensor
    lengths: tuple[int, ...]
    looks: bool
    draft_rows: DraftRows


def logits_of(
    drafter: Target,
    tokens_BQ: Tensor,
    positions_BQ: Tensor,
    slots_BQ: Tensor,
    attention: AttentionPlan,
    kv: KVCache,
    rows_R: Tensor,
) -> Tensor:
    """float32 [R, V]: the logits of some rows (flat indices) of one forward."""
    plan = decode_plan(drafter.num_layers)
    logits_RV: Tensor = drafter.forward(
        tokens_BQ, positions_BQ, slots_BQ, attention, kv=kv, plan=plan, logit_rows_R=rows_R, taps=()
    ).logits_RV
    return logits_RV


def write_chain_(
    drafter: Target, start: ChainStart, kv: KVCache, drawing: Drawing | None = None
) -> Proposal:
    """One draft after another for all branches at once, up to the longest chain: the best token of
    every step, or a draw. With `start.looks` the side outputs are figures of each draft, or one."""
    logits_SV = start.logits_SV
    lengths = start.lengths
    most = max(lengths, default=0)
    draft_rows = start.draft_rows
    frame = draft_rows.frame
    device = logits_SV.device
    branch_S = torch.arange(len(lengths), device=device)
    none_S0 = branch_S[:, None][:, :0]
    tokens = [none_S0]
    scores = [none_S0.float()]
    entropies: list[Tensor] = []
    probs: list[Tensor] = []
    spent = draft_rows.work
    work = Workspace(kv, draft_rows, most - 1) if most > 1 else None
    for step in range(1, most + 1):
        if drawing is None:
            token_S = largest(logits_SV)
        else:
            behind_SC = torch.cat([drawing.root_S[:, None], *tokens], 1)
            scores_SV = drawing.scores(logits_SV, branch_S, behind_SC)
            token_S = drawing.draw(scores_SV, branch_S, torch.full_like(branch_S, step))
            if drawing.shows_probs:
                probs.append(drawing.probabilities(scores_SV, branch_S))
        tokens.append(token_S[:, None])
        scores.append(logits_SV.log_softmax(-1).gather(1, token_S[:, None]).float())
        if start.looks:
            entropies.append(entropy(logits_SV)[:, None])
        if work is not None and step < most:
            position_SM = draft_rows.position_S[:, None] + torch.arange(1, step + 1, device=device)
            seen_S1M = torch.ones(len(lengths), 1, step, dtype=torch.bool, device=device)
            tokens_BQ = frame.spread(tokens[-1])
            inputs = work.fresh(seen_S1M, position_SM)
            logits_SV = logits_of(drafter, tokens_BQ, *inputs, kv=kv, rows_R=frame.index_S)
    if work is not None:
        kv.release_(work.slots)
        # rows of finished chains in the forwards of longer ones are padding
        idle = sum(most - max(length, 1) for length in lengths)
        spent = spent.plus(work.spent).plus(DraftWork(padding=idle))
    scores_SN = torch.cat(scores, 1)
    side_outputs_SC = None
    if start.looks:  # without drafts, the distribution of the first one is known
        h_SN = torch.cat(entropies or [entropy(logits_SV)[:, None]], 1)
        chance_SN = scores_SN.exp() if entropies else torch.full_like(h_SN, torch.nan)
        side_outputs_SC = packed(h_SN, chance_SN)
    return replace(
        single_path(torch.cat(tokens, 1), scores_SN),
        valid_SN=torch.arange(most, device=device) < torch.tensor(lengths, device=device)[:, None],
        side_outputs_SC=side_outputs_SC,
        draft_probs_STV=torch.stack([*probs, probs[-1]], 1) if probs else None,
        sizes=lengths,
        work=spent,
    )


def entropy(logits_RV: Tensor) -> Tensor:
    """Entropy in nats, [R], of softmax(logits)."""
    logp_RV = logits_RV.log_softmax(-1)
    terms_RV = torch.where(logp_RV > -torch.inf, logp_RV.exp() * logp_RV, 0.0)
    return (-terms_RV.sum(-1)).clamp(min=0)


def packed(h_SN: Tensor, chance_SN: Tensor) -> Tensor:
    """int64 [S, 2 N]: two tables of float64 as bits, for the round's one read."""
    return torch.cat([h_SN.double(), chance_SN.double()], 1).view(torch.int64)


def unpacked(bits_SC: npt.NDArray[np.int64], width: int) -> list[DraftDistributions]:
    """The figures of `packed` tables of this width; empty ones of an empty table."""
    if bits_SC.shape[1] < 2 * width:
        return [DraftDistributions()] * len(bits_SC)
    floats_SC = np.ascontiguousarray(bits_SC[:, : 2 * width]).view(np.float64)
    return [DraftDistributions(row[:width], row[width:]) for row in floats_SC.tolist()]
