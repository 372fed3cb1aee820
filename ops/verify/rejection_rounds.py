"""Rejection sampling of all trees of a round: which rule, with which coins.

The keys of the coins are (branch, position of the round's root, depth, rank among the siblings,
role): no coin is used twice, and no two siblings share one.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..sampling.coins import CoinRole, round_keys, uniforms
from ..sampling.settings import CHAIN_RULES, Draws, Rule, fitting_rules
from ..types import Proposal
from .rejection import Acceptance, TreeRule, accept_block, accept_chain, accept_tree, inverse_cdf


@dataclass(frozen=True, slots=True)
class RoundCoins:
    """Uniform numbers of one round: r_SN of the drafts, u_ST of the nodes where a path may end."""

    r_SN: Tensor
    u_ST: Tensor

    @classmethod
    def of(cls, key_S: Tensor, position_S: Tensor, proposal: Proposal) -> "RoundCoins":
        """Args:
        key_S: int64, keys of the branches. position_S: int64, positions of the roots.
        """
        depths_SN, ranks_SN = proposal.depths_SN, sibling_ranks(proposal.parents_SN)
        shape = depths_SN.shape
        key_SN, root_SN = (one[:, None].expand(shape) for one in (key_S, position_S))
        r_SN = uniforms(round_keys(key_SN, root_SN, depths_SN, ranks_SN, CoinRole.ACCEPT))
        zero_S1 = depths_SN.new_zeros(shape[0], 1)
        depths_ST, ranks_ST = (torch.cat([zero_S1, v], 1) for v in (depths_SN, ranks_SN))
        key_ST, root_ST = (one[:, None].expand(depths_ST.shape) for one in (key_S, position_S))
        return cls(r_SN, uniforms(round_keys(key_ST, root_ST, depths_ST, ranks_ST, CoinRole.FINAL)))


def sibling_ranks(parents_SN: Tensor) -> Tensor:
    """int64 [S, N]: how many earlier nodes have the same parent."""
    same_SNN = parents_SN[:, :, None] == parents_SN[:, None, :]
    return same_SNN.tril(-1).sum(-1)


def rule_for(proposal: Proposal, rule: str | None, draws: str) -> Rule:
    """The rule by its name; without one, the usual rule for drafts that were drawn like this.

    Where nobody drew, a tree is made of the best tokens.
    """
    chosen = Rule(rule) if rule else fitting_rules(Draws(draws), proposal.is_chain)[0]
    return Rule.TOPK if proposal.draft_probs_STV is None and chosen not in CHAIN_RULES else chosen


def accept_rejection(
    p_STV: Tensor,
    proposal: Proposal,
    coins: RoundCoins,
    rule: Rule,
    *,
    skip_sample_adjustment: bool = False,
) -> Acceptance:
    """Accept drafts of all trees against the target's distributions after each node.

    Args:
        rule: as `rule_for` has it.
        skip_sample_adjustment: draw the last token from the target's own distribution even where
            a draft was rejected. That is not lossless; it is there to be looked at.

    Raises:
        ValueError: the proposal does not bring what the rule needs.
    """
    draft_probs_STV = proposal.draft_probs_STV
    if rule in CHAIN_RULES:
        verdict = _judge_chain(p_STV, draft_probs_STV, proposal, coins, rule)
    else:
        verdict = accept_tree(
            p_STV,
            draft_probs_STV,
            proposal.tokens_SN,
            proposal.parents_SN,
            proposal.valid_SN,
            coins.r_SN,
            coins.u_ST,
            TreeRule(rule.value),
        )
    return _unadjusted(verdict, p_STV, coins) if skip_sample_adjustment else verdict


def _judge_chain(
    p_STV: Tensor, draft_probs_STV: Tensor | None, proposal: Proposal, coins: RoundCoins, rule: Rule
) -> Acceptance:
    if not proposal.is_chain:
        raise ValueError(f"rule {rule.value!r} is for chains, not for trees")
    accept = accept_chain if rule is Rule.CHAIN else accept_block
    laws_SNV = None if draft_probs_STV is None else draft_probs_STV[:, :-1]
    u_S = coins.u_ST[:, 0]  # a path may end anywhere, but only once
    return accept(p_STV, laws_SNV, proposal.tokens_SN, proposal.valid_SN, coins.r_SN, u_S)


def _unadjusted(verdict: Acceptance, p_STV: Tensor, coins: RoundCoins) -> Acceptance:
    row_S = torch.arange(len(p_STV), device=p_STV.device)
    node_T = torch.arange(p_STV.shape[1], device=p_STV.device)
    last_S = (verdict.path_ST * node_T).argmax(1)
    weights_SV = p_STV[row_S, last_S]
    bonus_S = inverse_cdf(weights_SV, coins.u_ST[row_S, last_S])
    return replace(verdict, bonus_S=bonus_S, weights_SV=weights_SV)
