"""Drafts of a toy model: every list that it can offer, and draws with coins."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from specsot.ops.verify.rejection import inverse_cdf

from .toys import Toy


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
