"""Toy models whose laws are known exactly, and drafts of them: every list they offer, and draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from specsot.ops.verify.rejection import inverse_cdf

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


class Choice(StrEnum):
    """How the siblings of a node are chosen."""

    WITH = "with replacement"
    WITHOUT = "without replacement"
    TOP = "the most likely"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Trees of one shape.

    tokens_SN: int64; valid_SN: bool, False where no draft was left to choose.
    chance_S: float64, with what probability the drafter offers each of them.
    parents: -1 for the root, parents first. kind: type of the probabilities that are judged.
    """

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


def sibling_law(
    q_KV: Tensor,
    tokens_SN: Tensor,
    parents: Sequence[int],
    choice: Choice,
    root_S: Tensor | None = None,
) -> Tensor:
    """[S, V]: law of the last node of `parents`, given the tokens of those before it.

    All zeros where the drafter has no further token. root_S: the roots' tokens, -1 by default.
    """
    *earlier, parent = parents
    last_S = tokens_SN.new_full((len(tokens_SN),), -1) if root_S is None else root_S
    law_SV = q_KV[last_S if parent < 0 else tokens_SN[:, parent]]
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


def drawn(law_SV: Tensor, u_S: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int64 [S], whether there was one to draw, bool [S])."""
    there_S = law_SV.any(1)
    law_SV = law_SV.where(there_S[:, None], _only_first(law_SV))
    return inverse_cdf(law_SV, u_S), there_S
