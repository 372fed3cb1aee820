"""Toy models with known laws, their drafts, and rounds on them with the coins of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial

import torch
from specsot_eagle1.draft import drawn_children
from torch import Tensor

from helpers.vanilla import tensor, vectors
from specsot.engine.certify.texts import chi_square, p_value
from specsot.ops.draft.mixed import ends, mix
from specsot.ops.draft.proposals import Drawing
from specsot.ops.draft.reliability import Reliability
from specsot.ops.sampling.coins import branch_key, ranked, token_keys
from specsot.ops.sampling.processors import Sampler, columns
from specsot.ops.sampling.settings import Accept, Draws, Rule, SamplingRules
from specsot.ops.types import Proposal, ancestors
from specsot.ops.verify.rejection import (
    Acceptance,
    accept_chain,
    accept_rejection,
    inverse_cdf,
    round_coins,
)
from specsot.ops.verify.verify import matching

ZEROS = 0.3  # share of the random toys that have zeros among their probabilities


@dataclass(frozen=True, slots=True)
class Toy:
    """A target and a drafter over V tokens that look at the last token alone.

    p_KV, q_KV: [V + 1, V], the next token's law after each token; row -1 (the last one) stands
        right after the prompt."""

    p_KV: Tensor
    q_KV: Tensor

    @property
    def size(self) -> int:
        return self.p_KV.shape[1]

    def to(self, dtype: torch.dtype) -> "Toy":
        return Toy(self.p_KV.to(dtype), self.q_KV.to(dtype))


def reference_toy() -> Toy:
    """Of the vectors, four tokens, float64: the drafter likes best what the target likes least.

    Wrong algorithms show on it; with three tokens a residual is often a single token, which hides
    a wrong rule. One pair of tokens never follows each other under the target, another one never
    under the drafter."""
    tables = vectors("enumeration")["model"]
    after = ("0", "1", "2", "3", "-1")
    target, draft = (
        tensor([[float(Fraction(x)) for x in tables[name][key]] for key in after])
        for name in ("target", "draft")
    )
    return Toy(target, draft)


def leftover_toy() -> Toy:
    """Four tokens, float64: what is left after a rejection is still likely to be drafted.

    So a second sibling is accepted with a probability that is neither 0 nor 1, and coins that
    siblings share show under every rule."""
    target, draft = torch.tensor([7, 2, 9, 2]), torch.tensor([1, 1, 8, 10])
    turned = [(target.roll(n), draft.roll(n)) for n in (1, 2, 3, 1, 0)]
    target_KV, draft_KV = (torch.stack(rows) for rows in zip(*turned, strict=True))
    return Toy(_law(target_KV), _law(draft_KV))


def random_toys(count: int, seed: int) -> list[Toy]:
    """Pairs of laws over 2 to 5 tokens, float64; zeros in the supports of some."""
    source = torch.Generator().manual_seed(seed)
    return [_random_toy(2 + number % 4, source) for number in range(count)]


def _random_toy(size: int, source: torch.Generator) -> Toy:
    tables = torch.rand(2, size + 1, size, generator=source, dtype=torch.float64)
    if torch.rand((), generator=source).item() < ZEROS:
        stays = torch.rand(tables.shape, generator=source) < 0.6
        always = torch.randint(size, (*tables.shape[:2], 1), generator=source)
        tables = tables.where(stays.scatter(2, always, True), 0.0)
    return Toy(_law(tables[0]), _law(tables[1]))


def _law(weights_KV: Tensor) -> Tensor:
    weights_KV = weights_KV.double()
    return weights_KV / weights_KV.sum(1, keepdim=True)


def joint(p_KV: Tensor, length: int) -> Tensor:
    """[V ** length]: law of the first tokens after the prompt, one after another; first slowest."""
    size = p_KV.shape[1]
    law_X = p_KV[-1]
    for _ in range(length - 1):
        law_X = (law_X.view(-1, size, 1) * p_KV[:size]).flatten()
    return law_X


def emitted(path_ST: Tensor, tokens_SN: Tensor, bonus_S: Tensor) -> Tensor:
    """int64 [S, T]: what a round says: the accepted tokens, the final one, then -1."""
    path_SN, count_S1 = path_ST[:, 1:], path_ST.sum(1, keepdim=True) - 1
    order_SN = (~path_SN).int().sort(dim=1, stable=True).indices
    said_SN = tokens_SN.where(path_SN, -1).gather(1, order_SN)
    said_ST = torch.cat([said_SN, torch.full_like(bonus_S[:, None], -1)], 1)
    return said_ST.scatter(1, count_S1, bonus_S[:, None])


class Choice(StrEnum):
    WITH = "with replacement"
    WITHOUT = "without replacement"
    TOP = "the most likely"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Trees of one shape.

    tokens_SN: int64; valid_SN: bool, False where no draft was left to choose.
    chance_S: float64, with what probability the drafter offers each of them.
    parents: -1 for the root, parents first. kind: type of the probabilities that are judged."""

    tokens_SN: Tensor
    valid_SN: Tensor
    chance_S: Tensor
    parents: Sequence[int]
    kind: torch.dtype

    def before(self) -> Tensor:
        """int64 [S, T]: the token at each node, -1 at the root: the row of the law after it."""
        return torch.cat([torch.full_like(self.tokens_SN[:, :1], -1), self.tokens_SN], 1)

    def repeated(self, times: int) -> "Drafts":
        """Each tree `times` times, one after another."""
        rows = len(self.chance_S)

        def more(value: Tensor) -> Tensor:
            return value.repeat_interleave(times, 0, output_size=rows * times)

        tokens_SN, valid_SN = more(self.tokens_SN), more(self.valid_SN)
        return Drafts(tokens_SN, valid_SN, more(self.chance_S), self.parents, self.kind)


def draft_lists(
    toy: Toy, parents: Sequence[int], choice: Choice, length: int | None = None
) -> Drafts:
    """All trees of this shape that the toy's drafter can offer; only the first `length` nodes."""
    tokens_SN = torch.empty(1, 0, dtype=torch.int64)
    valid_SN, chance_S = tokens_SN.bool(), torch.ones(1, dtype=torch.float64)
    for node, parent in enumerate(parents):
        law_SV = sibling_law(toy.q_KV, tokens_SN, parents[: node + 1], choice).double()
        offered_S = (law_SV.sum(1) > 0) & (parent < 0 or valid_SN[:, parent])
        offered_S &= length is None or node < length
        law_SV = law_SV.where(offered_S[:, None], _only_first(law_SV))
        row_C, token_C = torch.nonzero(law_SV, as_tuple=True)
        chance_S = chance_S[row_C] * law_SV[row_C, token_C]
        tokens_SN = torch.cat([tokens_SN[row_C], token_C[:, None]], 1)
        valid_SN = torch.cat([valid_SN[row_C], offered_S[row_C, None]], 1)
    return Drafts(tokens_SN, valid_SN, chance_S, parents, toy.q_KV.dtype)


def sibling_law(q_KV: Tensor, tokens_SN: Tensor, parents: Sequence[int], choice: Choice) -> Tensor:
    """[S, V]: law of the last node of `parents`, given the tokens of those before it; all zeros
    where the drafter has no further token."""
    *earlier, parent = parents
    law_SV = q_KV[tokens_SN.new_full((len(tokens_SN),), -1) if parent < 0 else tokens_SN[:, parent]]
    if choice is Choice.WITH:
        return law_SV
    siblings = [node for node, above in enumerate(earlier) if above == parent]
    if choice is Choice.TOP:
        order_SV = law_SV.sort(dim=1, descending=True, stable=True).indices
        return torch.zeros_like(law_SV).scatter(1, order_SV[:, len(siblings), None], 1.0)
    left_SV = law_SV.scatter(1, tokens_SN[:, siblings], 0.0)
    return left_SV / left_SV.sum(1, keepdim=True).where(left_SV.any(1, keepdim=True), 1.0)


def _only_first(law_SV: Tensor) -> Tensor:
    return torch.zeros_like(law_SV).index_fill(1, torch.tensor([0]), 1.0)


GAMMA = 2
PROMPT = 7  # position of the prompt's last token
BRANCHES = 20  # per seed: the keys of a run differ in both


@dataclass(frozen=True, slots=True)
class Round:
    """Where every sample stands: int64, the root token (-1 is the prompt's last one), its position,
    and the keys of the branches."""

    last_S: Tensor
    root_S: Tensor
    key_S: Tensor


Step = Callable[[Toy, Round], Tensor]
"""What is said in one round, int64 [S, T]: at least one token each, -1 behind them."""

ChainRule = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Acceptance]
accept_block: ChainRule = partial(accept_chain, rule=Rule.BLOCK)


def target_match(
    p_STV: Tensor, tokens_SN: Tensor, parents_SN: Tensor, valid_SN: Tensor, u_ST: Tensor
) -> Acceptance:
    """Trees of one shape are matched with what the target draws at every node by inverse CDF, each
    with a coin of its own."""
    drawn_ST = inverse_cdf(p_STV.flatten(0, 1), u_ST.flatten()).view(u_ST.shape)
    depths = [depth for depth, _ in places_of(parents_SN[0].tolist())]
    depths_SN = torch.tensor(depths, dtype=torch.int64).expand(tokens_SN.shape)
    nan_SN = torch.full(tokens_SN.shape, torch.nan)
    trees = Proposal(tokens_SN, parents_SN, depths_SN, valid_SN, nan_SN, len(depths))
    path_ST, bonus_S = matching(trees, ancestors(parents_SN, len(depths)), drawn_ST)
    last_S = (path_ST * torch.arange(path_ST.shape[1])).argmax(1)
    weights_SV = p_STV[torch.arange(len(p_STV)), last_S]
    return Acceptance(path_ST, bonus_S, weights_SV, nan_SN, nan_SN, nan_SN)


def match_round(toy: Toy, now: Round) -> Tensor:
    """`accept: match`: target and drafter draw with the same coin at each position."""
    tokens_ST, agrees = now.last_S[:, None], []
    said = []
    for depth in range(GAMMA + 1):
        key_S = token_keys(now.key_S, now.root_S + depth + 1)
        said.append(ranked(toy.p_KV[tokens_ST[:, -1]].log(), key_S, toy.size, 1)[:, 0])
        draft_S = ranked(toy.q_KV[tokens_ST[:, -1]].log(), key_S, toy.size, 1)[:, 0]
        tokens_ST = torch.cat([tokens_ST, draft_S[:, None]], 1)
        agrees.append(said[-1] == draft_S)
    path_SN = torch.stack(agrees[:GAMMA], 1).int().cumprod(1).bool()
    path_ST = torch.cat([torch.ones_like(path_SN[:, :1]), path_SN], 1)
    bonus_S = torch.stack(said, 1).gather(1, path_SN.sum(1, keepdim=True)).squeeze(1)
    return emitted(path_ST, tokens_ST[:, 1 : GAMMA + 1], bonus_S)


def places_of(parents: Sequence[int]) -> list[tuple[int, int]]:
    """(depth, rank among its siblings) of every drafted node."""
    found: list[tuple[int, int]] = []
    for node, parent in enumerate(parents):
        depth = 1 if parent < 0 else found[parent][0] + 1
        found.append((depth, list(parents[:node]).count(parent)))
    return found


def sample(step: Step, toy: Toy, length: int, count: int, seed: int) -> Tensor:
    """int64 [count, length]: the first tokens of so many branches, rounds one after another."""
    key_S = torch.tensor([branch_key(seed + n // BRANCHES, n % BRANCHES) for n in range(count)])
    now = Round(torch.full_like(key_S, -1), torch.full_like(key_S, PROMPT), key_S)
    said_SC = torch.full((count, length + 1), -1)  # the last column takes what is too much
    while (said_SC[:, :length] < 0).any():
        more_ST = step(toy, now)
        real_ST = more_ST >= 0
        first_S1 = (now.root_S - PROMPT)[:, None]
        place_ST = (first_S1 + torch.arange(more_ST.shape[1])).where(real_ST, length)
        said_SC = said_SC.scatter(1, place_ST.clamp(max=length), more_ST)
        grown_S = real_ST.sum(1)
        last_S = more_ST.gather(1, grown_S[:, None] - 1).squeeze(1)
        now = replace(now, last_S=last_S, root_S=now.root_S + grown_S)
    return said_SC[:, :length]


WIDTH = 2  # children of every node of a tree


def judged_round(rule: Rule, draws: Draws, *, skip_sample_adjustment: bool = False) -> Step:
    """`GAMMA` levels, of one draft each for the rules of chains.

    Lossless only if the rule is exact for such draws (`sampling_settings.FITS`) and nothing is
    skipped."""
    width = 1 if rule in (Rule.CHAIN, Rule.BLOCK) else WIDTH

    def step(toy: Toy, now: Round) -> Tensor:
        drawing = Drawing(_sampler(toy, now), Accept.REJECTION, now.root_S, now.last_S)
        proposal = _proposal(toy, drawing, width, draws)
        before_ST = torch.cat([now.last_S[:, None], proposal.tokens_SN], 1)
        coins = round_coins(now.key_S, now.root_S, proposal)
        p_STV = toy.p_KV[before_ST]
        verdict = accept_rejection(
            p_STV, proposal, coins, rule, skip_sample_adjustment=skip_sample_adjustment
        )
        return emitted(verdict.path_ST, proposal.tokens_SN, verdict.bonus_S)

    return step


def mixed_round(toy: Toy, now: Round) -> Tensor:
    """The five best nodes of two drafters' trees, some paths of which are the same."""
    drawing = Drawing(_sampler(toy, now), Accept.REJECTION, now.root_S, now.last_S)
    other = replace(toy, q_KV=(toy.q_KV + toy.q_KV.roll(1, 1)) / 2)
    trees = [_proposal(one, drawing, WIDTH, Draws.BEST) for one in (toy, other)]
    depths = [replace(tree, scores_SN=-tree.depths_SN.float()) for tree in trees]
    logs = [ends(Reliability(), now.root_S.device)] * 2
    proposal = mix(depths, logs, nodes=5)
    before_ST = torch.cat([now.last_S[:, None], proposal.tokens_SN.clamp(min=0)], 1)
    coins = round_coins(now.key_S, now.root_S, proposal)
    verdict = accept_rejection(toy.p_KV[before_ST], proposal, coins, Rule.TOPK)
    return emitted(verdict.path_ST, proposal.tokens_SN, verdict.bonus_S)


def rounds() -> dict[str, Step]:
    """Every way of accepting that a graph can name, with draws that it is exact for."""
    return {
        "chain": judged_round(Rule.CHAIN, Draws.SAMPLED),
        "chain of best tokens": judged_round(Rule.CHAIN, Draws.BEST),
        "block": judged_round(Rule.BLOCK, Draws.SAMPLED),
        "tree with replacement": judged_round(Rule.WITH_REPLACEMENT, Draws.SAMPLED),
        "tree without replacement": judged_round(Rule.WITHOUT_REPLACEMENT, Draws.DISTINCT),
        "top-k tree": judged_round(Rule.TOPK, Draws.BEST),
        "top-k tree of two drafters": mixed_round,
        "match": match_round,
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
    return drawn_children(drawing, scores_SV, branch_S, depth_S, width, draws), law_SV


SAMPLES = 10_000
SEED = 2026
LENGTHS = (1, 2, GAMMA + 2)
TOYS = {"reversed toy": reference_toy(), "leftover toy": leftover_toy()}


def p_values(step: Step, toy: Toy, *, samples: int = SAMPLES, seed: int = SEED) -> list[float]:
    said_SC = sample(step, toy, max(LENGTHS), samples, seed)
    return [_p_value(said_SC[:, :length], toy) for length in LENGTHS]


def _p_value(said_SC: Tensor, toy: Toy) -> float:
    samples, length = said_SC.shape
    powers_C = toy.size ** torch.arange(length - 1, -1, -1)
    seen_X = torch.bincount((said_SC * powers_C).sum(1), minlength=toy.size**length)
    return p_value(*chi_square(seen_X.double(), samples * joint(toy.p_KV, length)))
