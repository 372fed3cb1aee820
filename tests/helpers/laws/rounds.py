"""One round of drafting and accepting on a toy model, with the coins that a real run would use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specsot.ops.sampling.coins import CoinRole, branch_key, draw, round_keys, token_keys, uniforms
from specsot.ops.sampling.settings import Rule
from specsot.ops.types import Proposal, ancestors
from specsot.ops.verify.rejection import Acceptance, accept_chain, accept_tree, inverse_cdf
from specsot.ops.verify.verify import matching

from .drafts import Choice, drawn, sibling_law
from .toys import Toy, emitted

GAMMA = 2
TREE = (-1, -1, 0, 0, 1, 1)
PROMPT = 7  # position of the prompt's last token
BRANCHES = 20  # per seed: the keys of a run differ in both

Keys = Callable[[Tensor, Tensor, Tensor, Tensor, CoinRole], Tensor]
"""(branch key, root position, depth, sibling rank, role) -> the coin's key; as `round_keys`."""

ChainRule = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor], Acceptance]
accept_block: ChainRule = partial(accept_chain, rule=Rule.BLOCK)


@dataclass(frozen=True, slots=True)
class Round:
    """Where every sample stands, and its coins.

    last_S: int64, the root token; -1 is the prompt's last one. root_S: its position.
    key_S: int64, the keys of the branches.
    """

    last_S: Tensor
    root_S: Tensor
    key_S: Tensor
    keys: Keys = round_keys

    def coin(self, depth: int, rank: int, role: CoinRole) -> Tensor:
        """Uniform numbers, float64 [S]."""
        depth_S, rank_S = torch.full_like(self.key_S, depth), torch.full_like(self.key_S, rank)
        return uniforms(self.keys(self.key_S, self.root_S, depth_S, rank_S, role))


Step = Callable[[Toy, Round], Tensor]
"""What is said in one round, int64 [S, T]: at least one token each, -1 behind them."""


def chain_round(rule: ChainRule) -> Step:
    """A chain of drafts drawn from q."""

    def step(toy: Toy, now: Round) -> Tensor:
        parents = tuple(range(-1, GAMMA - 1))
        tokens_SN, valid_SN = drafted(toy, now, parents, Choice.WITH)
        before_ST = torch.cat([now.last_S[:, None], tokens_SN], 1)
        r_SN = torch.stack([now.coin(n + 1, 0, CoinRole.ACCEPT) for n in range(GAMMA)], 1)
        p_STV, q_SNV = toy.p_KV[before_ST], toy.q_KV[before_ST[:, :-1]]
        u_S = now.coin(0, 0, CoinRole.FINAL)
        verdict = rule(p_STV, q_SNV, tokens_SN, valid_SN, r_SN, u_S)
        return emitted(verdict.path_ST, tokens_SN, verdict.bonus_S)

    return step


def tree_round(rule: Rule, choice: Choice, parents: Sequence[int] = TREE) -> Step:
    """A tree of drafts; lossless only if the rule is one for drafts chosen like this."""

    def step(toy: Toy, now: Round) -> Tensor:
        tokens_SN, valid_SN = drafted(toy, now, parents, choice)
        before_ST = torch.cat([now.last_S[:, None], tokens_SN], 1)
        places = [(0, 0), *places_of(parents)]
        r_SN = torch.stack([now.coin(d, k, CoinRole.ACCEPT) for d, k in places[1:]], 1)
        u_ST = torch.stack([now.coin(d, k, CoinRole.FINAL) for d, k in places], 1)
        told = rule in (Rule.WITH_REPLACEMENT, Rule.WITHOUT_REPLACEMENT)
        parents_SN = torch.tensor(parents).expand(tokens_SN.shape)
        q_STV = toy.q_KV[before_ST] if told else None
        p_STV = toy.p_KV[before_ST]
        verdict = accept_tree(p_STV, q_STV, tokens_SN, parents_SN, valid_SN, r_SN, u_ST, rule)
        return emitted(verdict.path_ST, tokens_SN, verdict.bonus_S)

    return step


def target_match_round(toy: Toy, now: Round) -> Tensor:
    """The target draws at every node with a coin of its own; the children with its tokens stay."""
    tokens_SN, valid_SN = drafted(toy, now, TREE, Choice.WITH)
    before_ST = torch.cat([now.last_S[:, None], tokens_SN], 1)
    places = [(0, 0), *places_of(TREE)]
    u_ST = torch.stack([now.coin(d, k, CoinRole.FINAL) for d, k in places], 1)
    parents_SN = torch.tensor(TREE).expand(tokens_SN.shape)
    verdict = target_match(toy.p_KV[before_ST], tokens_SN, parents_SN, valid_SN, u_ST)
    return emitted(verdict.path_ST, tokens_SN, verdict.bonus_S)


def target_match(
    p_STV: Tensor, tokens_SN: Tensor, parents_SN: Tensor, valid_SN: Tensor, u_ST: Tensor
) -> Acceptance:
    """Trees of one shape are matched with what the target draws at every node by inverse CDF."""
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
        said.append(draw(toy.p_KV[tokens_ST[:, -1]].log(), key_S, toy.size))
        draft_S = draw(toy.q_KV[tokens_ST[:, -1]].log(), key_S, toy.size)
        tokens_ST = torch.cat([tokens_ST, draft_S[:, None]], 1)
        agrees.append(said[-1] == draft_S)
    path_SN = torch.stack(agrees[:GAMMA], 1).int().cumprod(1).bool()
    path_ST = torch.cat([torch.ones_like(path_SN[:, :1]), path_SN], 1)
    bonus_S = torch.stack(said, 1).gather(1, path_SN.sum(1, keepdim=True)).squeeze(1)
    return emitted(path_ST, tokens_ST[:, 1 : GAMMA + 1], bonus_S)


def drafted(toy: Toy, now: Round, parents: Sequence[int], choice: Choice) -> tuple[Tensor, Tensor]:
    """(tokens int64 [S, N], valid bool [S, N]) of trees of this shape."""
    tokens_SN = now.last_S.new_empty(len(now.last_S), 0)
    valid_SN = tokens_SN.bool()
    for node, (depth, rank) in enumerate(places_of(parents)):
        law_SV = sibling_law(toy.q_KV, tokens_SN, parents[: node + 1], choice, now.last_S)
        token_S, there_S = drawn(law_SV, now.coin(depth, rank, CoinRole.DRAFT))
        tokens_SN = torch.cat([tokens_SN, token_S[:, None]], 1)
        valid_SN = torch.cat([valid_SN, there_S[:, None]], 1)
    return tokens_SN, valid_SN


def places_of(parents: Sequence[int]) -> list[tuple[int, int]]:
    """(depth, rank among its siblings) of every drafted node."""
    found: list[tuple[int, int]] = []
    for node, parent in enumerate(parents):
        depth = 1 if parent < 0 else found[parent][0] + 1
        found.append((depth, list(parents[:node]).count(parent)))
    return found


def sample(
    step: Step, toy: Toy, length: int, count: int, seed: int, keys: Keys = round_keys
) -> Tensor:
    """int64 [count, length]: the first tokens of so many branches, rounds one after another."""
    key_S = torch.tensor([branch_key(seed + n // BRANCHES, n % BRANCHES) for n in range(count)])
    now = Round(torch.full_like(key_S, -1), torch.full_like(key_S, PROMPT), key_S, keys)
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


def rounds() -> dict[str, Step]:
    """Every way of accepting, with drafts that it is lossless for."""
    return {
        "chain": chain_round(accept_chain),
        "block": chain_round(accept_block),
        "tree with replacement": tree_round(Rule.WITH_REPLACEMENT, Choice.WITH),
        "tree without replacement": tree_round(Rule.WITHOUT_REPLACEMENT, Choice.WITHOUT),
        "top-k tree": tree_round(Rule.TOPK, Choice.TOP),
        "target match": target_match_round,
        "match": match_round,
    }
