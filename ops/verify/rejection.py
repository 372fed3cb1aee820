"""Rejection sampling of drafts: exact in distribution, with every random number an argument.

p is the target's distribution after a node, q the distribution that a draft was drawn from, both
after the same processors; q None means a draft that was not drawn: its q is one-hot. Products that
are compared are float64. A rule is lossless only for drafts of its kind (`settings.FITS`). Every
coin is used once: its key is (branch, position of the round's root, depth, rank, role)."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling.coins import CoinRole, round_keys, uniforms
from ..sampling.settings import CHAIN_RULES, Draws, Rule, fitting_rules
from ..types import Proposal


@dataclass(frozen=True, slots=True)
class Acceptance:
    """path_ST: bool, the root and the accepted nodes. bonus_S: int64, the token after the last one,
    drawn from weights_SV. chance_SN: probability of accepting each tried node; NaN for others.
    p_SN, q_SN: what each tried node was compared by, after earlier siblings' rejections."""

    path_ST: Tensor
    bonus_S: Tensor
    weights_SV: Tensor
    chance_SN: Tensor
    p_SN: Tensor
    q_SN: Tensor


def inverse_cdf(weights_RV: Tensor, u_R: Tensor) -> Tensor:
    """int64 [R]: smallest id whose cumulative weight is above u * total; never one of weight 0."""
    cumulative_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    aim_R1 = u_R.double()[:, None] * cumulative_RV[:, -1:]
    found_R = torch.searchsorted(cumulative_RV, aim_R1, right=True).squeeze(1)
    ids_V = torch.arange(weights_RV.shape[1], device=weights_RV.device)
    return torch.minimum(found_R, ((weights_RV > 0) * ids_V).amax(-1))


def accept_chain(
    p_STV: Tensor,
    q_SNV: Tensor | None,
    tokens_SN: Tensor,
    valid_SN: Tensor,
    r_SN: Tensor,
    u_S: Tensor,
    rule: Rule = Rule.CHAIN,
) -> Acceptance:
    """Accept the first drafts of a chain.

    CHAIN accepts one after another while q(x) > 0 and r q(x) < p(x): strictly, so that a token of
    target probability 0 is rejected even for r = 0. BLOCK accepts the longest prefix whose r is
    below its h, never fewer drafts than CHAIN; `chance_SN` is h.

    p_STV: target's distribution before the first draft, and after each. q_SNV: of each draft."""
    p_STV = _wide(p_STV)
    q_SNV = None if q_SNV is None else _wide(q_SNV)
    p_SN = p_STV[:, :-1].gather(2, tokens_SN[..., None]).squeeze(2)
    q_SN = _of_tokens(q_SNV, tokens_SN, p_SN)
    if rule is Rule.BLOCK:
        ratios = [torch.ones_like(p_STV[:, 0, 0])]  # of the shorter prefix times p / q, at most 1
        for ratio_S in torch.where(q_SN > 0, p_SN / q_SN, 0.0).unbind(1):
            ratios.append((ratios[-1] * ratio_S).clamp(max=1.0))
        ratio_ST = torch.stack(ratios, dim=1)
        # h of each prefix; the longest one's is its w
        inner_STV = p_STV[:, 1:-1] * ratio_ST[:, 1:-1, None]
        q_inner_SNV = None if q_SNV is None else q_SNV[:, 1:]
        excess_SN = _excess(inner_STV, q_inner_SNV, tokens_SN[:, 1:]).sum(-1)
        against_SN = excess_SN + 1 - ratio_ST[:, 1:-1]
        inner_SN = torch.where(against_SN > 0, excess_SN / against_SN, 1.0)
        inner_SN = inner_SN.where(valid_SN[:, 1:], ratio_ST[:, 1:-1])
        chance_SN = torch.cat([inner_SN, ratio_ST[:, -1:]], dim=1)
        accepted_SN = ((r_SN < chance_SN) & valid_SN).int().flip(1).cumsum(1).flip(1) > 0
        tried_SN = valid_SN
    else:
        ratio_ST = p_STV.new_ones(p_STV.shape[:2])
        chance_SN = _chance(p_SN, q_SN)
        accepted_SN = (_passes(p_SN, q_SN, r_SN) & valid_SN).int().cumprod(1).bool()
        tried_SN = valid_SN & F.pad(accepted_SN, (1, 0), value=True)[:, :-1]
    last_S = accepted_SN.sum(1)
    row_S = torch.arange(len(last_S), device=last_S.device)
    weights_SV = p_STV[row_S, last_S]
    if tokens_SN.shape[1]:  # after a rejected draft, the remainder of p
        next_S = last_S.clamp(max=tokens_SN.shape[1] - 1)
        q_SV = None if q_SNV is None else q_SNV[row_S, next_S]
        token_S = tokens_SN[row_S, next_S]
        excess_SV = _excess(weights_SV * ratio_ST[row_S, last_S][:, None], q_SV, token_S)
        rejected_S1 = (last_S < valid_SN.sum(1))[:, None]
        weights_SV = torch.where(rejected_S1, _normalised(excess_SV, weights_SV), weights_SV)
    return Acceptance(
        path_ST=F.pad(accepted_SN, (1, 0), value=True),
        bonus_S=inverse_cdf(weights_SV, u_S),
        weights_SV=weights_SV,
        chance_SN=chance_SN.where(tried_SN, torch.nan),
        p_SN=p_SN,
        q_SN=q_SN,
    )


def accept_tree(
    p_STV: Tensor,
    q_STV: Tensor | None,
    tokens_SN: Tensor,
    parents_SN: Tensor,
    valid_SN: Tensor,
    r_SN: Tensor,
    u_ST: Tensor,
    rule: Rule,
) -> Acceptance:
    """From the root on: try a node's children in order, step to the first accepted one.

    p_STV, q_STV: after each node, node 0 being the root; q None for TOPK. u_ST: uniform numbers of
    the nodes where a path can end. Raises ValueError: the rule and q do not fit."""
    if (q_STV is not None) != (rule in (Rule.WITH_REPLACEMENT, Rule.WITHOUT_REPLACEMENT)):
        raise ValueError(f"rule {rule!r} and {'no ' if q_STV is None else ''}q do not fit")
    p_STV = _wide(p_STV)
    q_STV = None if q_STV is None else _wide(q_STV)
    p_SV = p_STV[:, 0]  # p and q of the current node, without its rejected children
    q_SV = None if q_STV is None else q_STV[:, 0]
    at_S = torch.zeros(len(p_STV), dtype=torch.int64, device=p_STV.device)
    path = [torch.ones_like(at_S, dtype=torch.bool)]
    tried: list[tuple[Tensor, Tensor, Tensor]] = []
    for node, token_S in enumerate(tokens_SN.unbind(1)):
        open_S = valid_SN[:, node] & (parents_SN[:, node] + 1 == at_S)
        p_S = p_SV.gather(1, token_S[:, None]).squeeze(1)
        q_S = _of_tokens(q_SV, token_S, p_S)
        passes_S = _passes(p_S, q_S, r_SN[:, node])
        accepted_S = open_S & passes_S
        rejected_S1 = (open_S & ~passes_S)[:, None]
        p_SV = _normalised(_excess(p_SV, q_SV, token_S), p_SV).where(rejected_S1, p_SV)
        if q_SV is not None and rule is Rule.WITHOUT_REPLACEMENT:
            rest_SV = q_SV.scatter(1, token_S[:, None], 0.0)
            q_SV = _normalised(rest_SV, rest_SV).where(rejected_S1, q_SV)  # of no mass it stays 0
        at_S = torch.where(accepted_S, node + 1, at_S)
        p_SV = p_STV[:, node + 1].where(accepted_S[:, None], p_SV)
        if q_STV is not None and q_SV is not None:
            q_SV = q_STV[:, node + 1].where(accepted_S[:, None], q_SV)
        path.append(accepted_S)
        tried.append((p_S, q_S, open_S))
    p_SN = q_SN = chance_SN = p_SV[:, :0]
    if tried:
        p_SN, q_SN, open_SN = (torch.stack(values, 1) for values in zip(*tried, strict=True))
        chance_SN = _chance(p_SN, q_SN).where(open_SN, torch.nan)
    return Acceptance(
        path_ST=torch.stack(path, 1),
        bonus_S=inverse_cdf(p_SV, u_ST.gather(1, at_S[:, None]).squeeze(1)),
        weights_SV=p_SV,
        chance_SN=chance_SN,
        p_SN=p_SN,
        q_SN=q_SN,
    )


def _wide(probs: Tensor) -> Tensor:
    return probs.to(torch.promote_types(probs.dtype, torch.float32))


def _of_tokens(q: Tensor | None, tokens: Tensor, like: Tensor) -> Tensor:
    """q of the drafted tokens; 1 where q is one-hot."""
    return torch.ones_like(like) if q is None else q.gather(-1, tokens[..., None]).squeeze(-1)


def _passes(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return (q > 0) & (r.double() * q.double() < p.double())


def _chance(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(q > 0, (p / q).clamp(max=1.0), 0.0)


def _excess(p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
    """[..., V]: max(0, p - q); of a one-hot q this is p without the token."""
    return p.scatter(-1, tokens[..., None], 0.0) if q is None else (p - q).clamp(min=0)


def _normalised(weights_RV: Tensor, otherwise_RV: Tensor) -> Tensor:
    total_R1 = weights_RV.sum(-1, keepdim=True)
    return torch.where(total_R1 > 0, weights_RV / total_R1, otherwise_RV)


def round_coins(key_S: Tensor, position_S: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Uniform numbers of a round: r_SN of the drafts, u_ST of the nodes where a path may end; from
    int64, the keys of the branches and the positions of the roots."""
    nodes = (proposal.depths_SN, sibling_ranks(proposal.parents_SN))
    depths_ST, ranks_ST = (F.pad(value_SN, (1, 0)) for value_SN in nodes)  # the root has 0, 0
    key_S1 = key_S[:, None]
    root_S1 = position_S[:, None]
    r_SN = uniforms(round_keys(key_S1, root_S1, *nodes, CoinRole.ACCEPT))
    u_ST = uniforms(round_keys(key_S1, root_S1, depths_ST, ranks_ST, role=CoinRole.FINAL))
    return r_SN, u_ST


def sibling_ranks(parents_SN: Tensor) -> Tensor:
    """int64 [S, N]: how many earlier nodes have the same parent."""
    return (parents_SN[:, :, None] == parents_SN[:, None, :]).tril(-1).sum(-1)


def rule_for(proposal: Proposal, rule: str | None, draws: str) -> Rule:
    """The rule by its name, or the usual one; a tree without drawn drafts has the best tokens."""
    usual = Rule(rule) if rule else fitting_rules(Draws(draws), proposal.is_chain)[0]
    return Rule.TOPK if proposal.draft_probs_STV is None and usual not in CHAIN_RULES else usual


def accept_rejection(
    p_STV: Tensor,
    proposal: Proposal,
    coins: tuple[Tensor, Tensor],
    rule: Rule,
    *,
    skip_sample_adjustment: bool = False,
) -> Acceptance:
    """Accept drafts of all trees against the target's distributions after each node. coins: of
    `round_coins`. skip_sample_adjustment: draw the last token from p even after a rejected draft;
    not lossless."""
    q_STV = proposal.draft_probs_STV
    tokens_SN = proposal.tokens_SN
    valid_SN = proposal.valid_SN
    r_SN, u_ST = coins
    if rule in CHAIN_RULES and not proposal.is_chain:
        raise ValueError(f"rule {rule.value!r} is for chains, not for trees")
    if rule in CHAIN_RULES:
        q_SNV = None if q_STV is None else q_STV[:, :-1]
        u_S = u_ST[:, 0]  # a path may end anywhere, but only once
        verdict = accept_chain(p_STV, q_SNV, tokens_SN, valid_SN, r_SN=r_SN, u_S=u_S, rule=rule)
    else:
        parents_SN = proposal.parents_SN
        verdict = accept_tree(
            p_STV, q_STV, tokens_SN, parents_SN, valid_SN=valid_SN, r_SN=r_SN, u_ST=u_ST, rule=rule
        )
    if not skip_sample_adjustment:
        return verdict
    row_S = torch.arange(len(p_STV), device=p_STV.device)
    node_T = torch.arange(p_STV.shape[1], device=p_STV.device)
    last_S = (verdict.path_ST * node_T).argmax(1)
    weights_SV = p_STV[row_S, last_S]
    bonus_S = inverse_cdf(weights_SV, u_ST[row_S, last_S])
    return replace(verdict, bonus_S=bonus_S, weights_SV=weights_SV)
