"""Toy models whose laws are known exactly."""

from dataclasses import dataclass

import torch
from torch import Tensor

ZEROS = 0.3  # share of the random toys that have zeros among their probabilities


@dataclass(frozen=True, slots=True)
class Toy:
    """A target and a drafter over V tokens that look at the last token alone.

    p_KV, q_KV: [V + 1, V], the next token's law after each token; row -1 (the last one) stands
        right after the prompt.
    """

    p_KV: Tensor
    q_KV: Tensor

    @property
    def size(self) -> int:
        return self.p_KV.shape[1]

    def to(self, dtype: torch.dtype) -> "Toy":
        return Toy(self.p_KV.to(dtype), self.q_KV.to(dtype))


def reference_toy() -> Toy:
    """Four tokens, float64: the drafter likes best what the target likes least.

    Wrong algorithms show on it; with three tokens a residual is often a single token, which hides
    a wrong rule. One pair of tokens never follows each other under the target, another one never
    under the drafter.
    """
    target = [[2, 2, 12, 4], [5, 5, 5, 5], [0, 10, 6, 4], [14, 2, 2, 2], [8, 6, 4, 2]]
    draft = [[4, 4, 10, 2], [10, 0, 4, 6], [2, 8, 6, 4], [8, 4, 4, 4], [2, 4, 6, 8]]
    return Toy(_law(torch.tensor(target)), _law(torch.tensor(draft)))


def leftover_toy() -> Toy:
    """Four tokens, float64: what is left after a rejection is still likely to be drafted.

    So a second sibling is accepted with a probability that is neither 0 nor 1, and coins that
    siblings share show under every rule.
    """
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
