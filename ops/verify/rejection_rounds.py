"""Rejection sampling of all trees of a round: which rule, with which coins.

The keys of the coins are (branch, position of the round's root, depth, rank among the siblings,
role): no coin is used twice, and no two siblings share one.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling.coins import CoinRole, round_keys, uniforms
from ..sampling.settings import CHAIN_RULES, Draws, Rule, fitting_rules
from ..types import Proposal
from .rejection import Acceptance, accept_chain, accept_tree, inverse_cdf


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
        nodes = (proposal.depths_SN, sibling_ranks(proposal.parents_SN))
        depths_ST, ranks_ST = (F.pad(value_SN, (1, 0)) for value_SN in nodes)  # the root has 0, 0
        key_S1 = key_S[:, None]
        root_S1 = position_S[:, None]
        return cls(
            uniforms(round_keys(key_S1, root_S1, *nodes, CoinRole.ACCEPT)),
            uniforms(round_keys(key_S1, root_S1, depths_ST, ranks_ST, CoinRole.FINAL)),
        )


def sibling_ranks(parents_SN: Tensor) -> Tensor:
    """int64 [S, N]: how many earlier nodes have the same parent."""
    same_SNN = parents_SN[:, :, None] == parents_SN[:, None, :]
    return same_SNN.tril(-1).sum(-1)


def rule_for(proposal: Proposal, rule: str | None, draws: str) -> Rule:
    """The rule by its name; without one, the usual rule for drafts that were drawn like this.

    Where nobody drew, a tree is made of the best tokens.
    """
    usual = Rule(rule) if rule else fitting_rules(Draws(draws), proposal.is_chain)[0]
    return Rule.TOPK if proposal.draft_probs_STV is None and usual not in CHAIN_RULES else usual


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
    q_STV = proposal.draft_probs_STV
    tokens_SN = proposal.tokens_SN
    valid_SN = proposal.valid_SN
    r_SN = coins.r_SN
    u_ST = coins.u_ST
    if rule not in CHAIN_RULES:
        parents_SN = proposal.parents_SN
        verdict = accept_tree(p_STV, q_STV, tokens_SN, parents_SN, valid_SN, r_SN, u_ST, rule)
    elif proposal.is_chain:
        q_SNV = None if q_STV is None else q_STV[:, :-1]
        u_S = u_ST[:, 0]  # a path may end anywhere, but only once
        verdict = accept_chain(p_STV, q_SNV, tokens_SN, valid_SN, r_SN, u_S, rule)
    else:
        raise ValueError(f"rule {rule.value!r} is for chains, not for trees")
    if not skip_sample_adjustment:
        return verdict
    row_S = torch.arange(len(p_STV), device=p_STV.device)
    node_T = torch.arange(p_STV.shape[1], device=p_STV.device)
    last_S = (verdict.path_ST * node_T).argmax(1)
    weights_SV = p_STV[row_S, last_S]
    bonus_S = inverse_cdf(weights_SV, u_ST[row_S, last_S])
    return replace(verdict, bonus_S=bonus_S, weights_SV=weights_SV)
