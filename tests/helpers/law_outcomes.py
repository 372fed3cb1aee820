"""Rejection sampling is exact: laws by enumeration on toy models, with no random number in sight.

Forcing each node's coin to 0 or 1 makes it accepted or rejected, and the verdict says with what
probability each would have happened; so the sum over all drafts and all patterns of coins is the
law of what is emitted. That the decisions really change at these probabilities is tried on both
sides of each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from helpers.laws import (
    ChainRule,
    Choice,
    Drafts,
    Toy,
    accept_block,
    draft_lists,
    joint,
    target_match,
)
from specsot.ops.sampling.settings import Rule
from specsot.ops.verify.rejection import Acceptance, accept_chain, accept_tree

CHAIN = (-1, 0, 1)
TREE = (-1, -1, 0, 0)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
ASIDE = {torch.float64: 1e-9, torch.float32: 1e-6}  # of a coin, from where a decision changes

Accept = Callable[[Drafts, Tensor], Acceptance]
"""What the rule under test says of drafts under coins [S, N]."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Everything that one round can say.

    path_ST: bool, the accepted nodes of each outcome. tokens_SN: its drafts.
    weights_SV: law of its final token. chance_S: its probability.
    strays: outcomes whose decisions do not change where the probabilities say."""

    path_ST: Tensor
    tokens_SN: Tensor
    weights_SV: Tensor
    chance_S: Tensor
    strays: int = 0

    def lengths(self) -> Tensor:
        """[T]: law of the number of accepted drafts."""
        law_T = torch.zeros(self.path_ST.shape[1], dtype=torch.float64)
        return law_T.index_add(0, self.path_ST.sum(1) - 1, self.chance_S)

    def joint(self, p_KV: Tensor) -> Tensor:
        """[V ** T]: law of the first T tokens; after the round the target goes on alone."""
        size, length = p_KV.shape[1], self.path_ST.shape[1]
        law_X = torch.zeros(size**length, dtype=torch.float64)
        order_SN = (~self.path_ST[:, 1:]).int().sort(dim=1, stable=True).indices
        front_SN = self.tokens_SN.gather(1, order_SN)
        count_S = self.path_ST.sum(1) - 1
        for count in range(length):
            here_S = count_S == count
            place_S = _place(front_SN[here_S, :count], size)
            final_RV = self.chance_S[here_S, None] * self.weights_SV[here_S].double()
            head_XV = torch.zeros(size**count, size, dtype=torch.float64)
            head_XV = head_XV.index_add(0, place_S, final_RV)
            law_X += (head_XV[:, :, None] * _onward(p_KV, length - count - 1)).flatten()
        return law_X


def outcomes(accept: Accept, drafts: Drafts) -> Outcomes:
    nodes, kind = drafts.tokens_SN.shape[1], drafts.kind
    patterns = torch.tensor(list(product((0.0, 1.0), repeat=nodes)), dtype=torch.float64)
    coin_SN = patterns.repeat(len(drafts.chance_S), 1)
    every = drafts.repeated(len(patterns))
    verdict = accept(every, coin_SN)
    tried_SN = ~verdict.chance_SN.isnan()
    happens_SN = torch.where(coin_SN == 0, verdict.chance_SN, 1 - verdict.chance_SN).double()
    chance_S = every.chance_S * happens_SN.where(tried_SN, 0.5).prod(1)  # untried: either coin
    aside_SN = (verdict.chance_SN + (2 * coin_SN - 1) * ASIDE[kind]).double().clamp(0, 1)
    near = accept(every, aside_SN.where(tried_SN, coin_SN))
    strays = ((near.path_ST != verdict.path_ST).any(1) & (chance_S > 0)).sum()
    return Outcomes(
        verdict.path_ST, every.tokens_SN, verdict.weights_SV, chance_S, int(strays.item())
    )


def chain_outcomes(rule: ChainRule, toy: Toy, drafts: Drafts, *, drawn: bool = True) -> Outcomes:
    """What a rule makes of chains; drawn: they were drawn from q, which the rule is told."""

    def accept(every: Drafts, coin_SN: Tensor) -> Acceptance:
        before_ST = every.before()
        return rule(
            toy.p_KV[before_ST],
            toy.q_KV[before_ST[:, :-1]] if drawn else None,
            every.tokens_SN,
            every.valid_SN,
            coin_SN,
            torch.zeros(len(coin_SN)),
        )

    return outcomes(accept, drafts)


def tree_outcomes(rule: Rule, toy: Toy, drafts: Drafts) -> Outcomes:
    """What a rule with coins of its own for every node makes of trees."""

    def accept(every: Drafts, coin_SN: Tensor) -> Acceptance:
        before_ST = every.before()
        drawn = rule in (Rule.WITH_REPLACEMENT, Rule.WITHOUT_REPLACEMENT)
        return accept_tree(
            toy.p_KV[before_ST],
            toy.q_KV[before_ST] if drawn else None,
            every.tokens_SN,
            torch.tensor(every.parents).expand(every.tokens_SN.shape),
            every.valid_SN,
            coin_SN,
            torch.zeros(before_ST.shape),
            rule,
        )

    return outcomes(accept, drafts)


def match_outcomes(toy: Toy, drafts: Drafts) -> Outcomes:
    """Where the target draws at every node and its tokens are matched: all it can draw there."""
    nodes = drafts.tokens_SN.shape[1] + 1
    drawn = torch.cartesian_prod(*[torch.arange(toy.size)] * nodes)
    every = drafts.repeated(len(drawn))
    drawn_ST = drawn.repeat(len(drafts.chance_S), 1)
    p_STV = toy.p_KV[every.before()].double()
    through_STV = p_STV.cumsum(-1)
    middle_STV = (through_STV - p_STV / 2) / through_STV[..., -1:]
    u_ST = middle_STV.gather(2, drawn_ST[..., None]).squeeze(2)
    chance_S = every.chance_S * p_STV.gather(2, drawn_ST[..., None]).squeeze(2).prod(1)
    parents_SN = torch.tensor(every.parents).expand(every.tokens_SN.shape)
    p_STV = toy.p_KV[every.before()]
    verdict = target_match(p_STV, every.tokens_SN, parents_SN, every.valid_SN, u_ST)
    final_SV = torch.nn.functional.one_hot(verdict.bonus_S, toy.size).double()
    return Outcomes(verdict.path_ST, every.tokens_SN, final_SV, chance_S)


def _place(tokens_SC: Tensor, size: int) -> Tensor:
    """int64 [S]: which of the size ** C lists of tokens each row is."""
    powers_C = size ** torch.arange(tokens_SC.shape[1] - 1, -1, -1)
    return (tokens_SC * powers_C).sum(1)


def _onward(p_KV: Tensor, length: int) -> Tensor:
    """[V, V ** length]: law of what the target says after each token."""
    size = p_KV.shape[1]
    if length == 0:
        return torch.ones(size, 1, dtype=torch.float64)
    rows = [torch.cat([p_KV[:size], p_KV[token : token + 1]]) for token in range(size)]
    return torch.stack([joint(row.double(), length) for row in rows])


Enumerate = Callable[[Toy, int], Outcomes]
"""All outcomes on a toy with chains of this many drafts (trees have one shape)."""


def law_error(rule: Enumerate, toys: Iterable[Toy], kind: torch.dtype) -> tuple[float, int]:
    """The largest difference between what is emitted and the target's own joint law, and the number
    of decisions that do not change where their probability says."""
    worst, strays = 0.0, 0
    for number, toy in enumerate(toys):
        toy = toy.to(kind)
        found = rule(toy, len(CHAIN) - number % len(CHAIN))
        target_X = joint(toy.p_KV.double(), found.path_ST.shape[1])
        worst = max(worst, (found.joint(toy.p_KV) - target_X).abs().max().item())
        strays += found.strays
    return worst, strays


def of_chains(rule: ChainRule, choice: Choice, *, drawn: bool = True) -> Enumerate:
    """A rule of chains whose drafts are chosen so; drawn: it is told that q drew them."""
    return lambda toy, length: chain_outcomes(
        rule, toy, draft_lists(toy, CHAIN, choice, length), drawn=drawn
    )


def of_trees(rule: Rule, choice: Choice) -> Enumerate:
    return lambda toy, _: tree_outcomes(rule, toy, draft_lists(toy, TREE, choice))


RULES: dict[str, Enumerate] = {
    "chain": of_chains(accept_chain, Choice.WITH),
    "chain of drafts that were not drawn": of_chains(accept_chain, Choice.TOP, drawn=False),
    "block": of_chains(accept_block, Choice.WITH),
    "block of drafts that were not drawn": of_chains(accept_block, Choice.TOP, drawn=False),
    "tree with replacement": of_trees(Rule.WITH_REPLACEMENT, Choice.WITH),
    "tree without replacement": of_trees(Rule.WITHOUT_REPLACEMENT, Choice.WITHOUT),
    "top-k tree": of_trees(Rule.TOPK, Choice.TOP),
    "target match": lambda toy, _: match_outcomes(toy, draft_lists(toy, TREE, Choice.TOP)),
}
"""Every rule with drafts that it is lossless for."""
