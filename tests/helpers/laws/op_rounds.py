"""Rounds on toy models through the ops of a run: drafts are drawn and judged as graphs do it.

`rounds` hands coins to the rules itself; here the keys, the processors, the order of the
siblings and the distributions that travel with a proposal are those of the ops.
"""

import torch
from torch import Tensor

from specsot.ops.draft.drawing import Drawing
from specsot.ops.sampling.processors import Sampler, columns
from specsot.ops.sampling.settings import Accept, Draws, Rule, SamplingRules
from specsot.ops.types import Proposal
from specsot.ops.verify.rejection import RoundCoins, accept_rejection

from .rounds import GAMMA, Round, Step
from .toys import Toy, emitted

WIDTH = 2  # children of every node of a tree


def judged_round(rule: Rule, draws: Draws, *, skip_sample_adjustment: bool = False) -> Step:
    """`GAMMA` levels, of one draft each for the rules of chains.

    Lossless only if the rule is exact for such draws (`sampling_settings.FITS`) and nothing is
    skipped.
    """
    width = 1 if rule in (Rule.CHAIN, Rule.BLOCK) else WIDTH

    def step(toy: Toy, now: Round) -> Tensor:
        drawing = Drawing(_sampler(toy, now), Accept.REJECTION, now.root_S, now.last_S)
        proposal = _proposal(toy, drawing, width, draws)
        before_ST = torch.cat([now.last_S[:, None], proposal.tokens_SN], 1)
        coins = RoundCoins.of(now.key_S, now.root_S, proposal)
        p_STV = toy.p_KV[before_ST]
        verdict = accept_rejection(
            p_STV, proposal, coins, rule, skip_sample_adjustment=skip_sample_adjustment
        )
        return emitted(verdict.path_ST, proposal.tokens_SN, verdict.bonus_S)

    return step


def judged_rounds() -> dict[str, Step]:
    """Every rule that a graph can name, with draws that it is exact for."""
    return {
        "chain, as run": judged_round(Rule.CHAIN, Draws.SAMPLED),
        "chain of best tokens, as run": judged_round(Rule.CHAIN, Draws.BEST),
        "block, as run": judged_round(Rule.BLOCK, Draws.SAMPLED),
        "tree with replacement, as run": judged_round(Rule.WITH_REPLACEMENT, Draws.SAMPLED),
        "tree without replacement, as run": judged_round(Rule.WITHOUT_REPLACEMENT, Draws.DISTINCT),
        "top-k tree, as run": judged_round(Rule.TOPK, Draws.BEST),
    }


def _sampler(toy: Toy, now: Round) -> Sampler:
    """Temperature 1 and nothing else."""
    count = len(now.key_S)
    rules = columns([SamplingRules(temperature=1.0)], [()], toy.size, now.key_S.device)
    none_SV = torch.zeros(count, toy.size, dtype=torch.int32)
    every = rules.of_rows(torch.zeros_like(now.key_S))
    return Sampler(every, now.key_S, none_SV.bool(), none_SV, torch.zeros_like(now.key_S))


def _proposal(toy: Toy, drawing: Drawing, width: int, draws: Draws) -> Proposal:
    """Trees of `GAMMA` levels, every node with as many children, level by level."""
    branch_S = torch.arange(len(drawing.root_S))
    tokens, valid, laws = [drawing.root_S], [torch.ones_like(branch_S, dtype=torch.bool)], []
    parents, depths, level = [-1], [0], [0]
    for depth in range(1, GAMMA + 1):
        for node in level:
            token_SC, law_SV = _children(toy, drawing, tokens[node], depth, width, draws)
            tokens += token_SC.clamp(min=0).unbind(1)
            valid += ((token_SC >= 0) & valid[node][:, None]).unbind(1)
            laws.append(law_SV)
        parents += [node for node in level for _ in range(width)]
        depths += [depth] * (width * len(level))
        level = [node for node, its_depth in enumerate(depths) if its_depth == depth]
    laws += [laws[0]] * len(level)  # leaves have no children
    shape = (len(branch_S), len(tokens) - 1)
    return Proposal(
        torch.stack(tokens[1:], 1),
        (torch.tensor(parents[1:]) - 1).expand(shape),
        torch.tensor(depths[1:]).expand(shape),
        torch.stack(valid[1:], 1),
        torch.zeros(shape),
        GAMMA,
        draft_probs_STV=None if draws is Draws.BEST else torch.stack(laws, 1),
        is_chain=width == 1,
    )


def _children(
    toy: Toy, drawing: Drawing, token_S: Tensor, depth: int, width: int, draws: Draws
) -> tuple[Tensor, Tensor]:
    """(tokens int64 [S, width], -1 for none; the law they come from) behind one node."""
    branch_S = torch.arange(len(token_S))
    behind_S1 = token_S.clamp(min=0)[:, None]  # no rule here looks back
    scores_SV = drawing.scores(toy.q_KV[token_S].log(), branch_S, behind_S1)
    law_SV = drawing.probabilities(scores_SV, branch_S)
    depth_S = torch.full_like(branch_S, depth)
    if draws is Draws.BEST:
        return scores_SV.topk(width).indices, law_SV
    if width == 1:
        return drawing.draw(scores_SV, branch_S, depth_S)[:, None], law_SV
    return drawing.children(scores_SV, branch_S, depth_S, width, draws), law_SV
