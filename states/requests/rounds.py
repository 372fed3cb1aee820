"""Reading a round on the host: which path each branch takes, and where its answer ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ops.host import HostReader
from ...ops.verify.score import GrammarRows
from ...ops.verify.verify import Accepted, FirstTokens
from .branch import Branch, Finish, Matcher

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round as host arrays (shapes as in `Accepted` and `FirstTokens`).

    picked_P: flat indices of the cached rows that were recomputed, None if no row was cached.
    """

    path_ST: Ids
    tokens_ST: Ids
    bonus_S: Ids
    parents_ST: Ids
    side_outputs_SC: Ids
    best_GTC: Ids
    drawn_R: Ids
    best_GC: Ids
    figures_SNC: Ids | None = None
    picked_P: Ids | None = None

    def some(self, trees: Sequence[int]) -> "RoundResult":
        """What there is of some trees for a drafter to learn from."""
        own = list(trees)
        return replace(
            self, side_outputs_SC=self.side_outputs_SC[own], tokens_ST=self.tokens_ST[own]
        )


class Walk(NamedTuple):
    """The way through a tree: nodes from the root on, tokens with the final one behind them.

    root, position: of the root token. taken: how many of the tokens were appended.
    """

    root: int
    position: int
    nodes: list[int]
    tokens: list[int]
    taken: int


def read_round(
    host: HostReader, accepted: Accepted | None, roots: FirstTokens, picked_P: Tensor | None = None
) -> RoundResult:
    """Everything the host decides on, in one read; and what it tells of cached rows."""
    parts = [roots.drawn_R, roots.bound.best_GC]
    if accepted is not None:
        parts += [accepted.path_ST, accepted.tokens_ST, accepted.bonus_S]
        parts += [accepted.parents_ST, accepted.side_outputs_SC, accepted.bound.best_GC]
        parts += [accepted.figures.bits_SNC] if accepted.figures is not None else []
    parts += [picked_P] if picked_P is not None else []
    flat = host.read(torch.cat([part.reshape(-1).long() for part in parts]))
    arrays = split(flat, [tuple(part.shape) for part in parts])
    picked = arrays.pop() if picked_P is not None else None
    if accepted is None:
        none = np.zeros((0, 1), np.int64)
        trees = (none, none, none[:, 0], none, none, none[..., None])
        return replace(RoundResult(*trees, *arrays), picked_P=picked)
    drawn_R, best_GC, path_ST, tokens_ST, bonus_S, parents_ST, side_outputs_SC, best_NC, *told = (
        arrays
    )
    best_GTC = best_NC.reshape(-1, path_ST.shape[1], best_NC.shape[1])
    trees = (path_ST, tokens_ST, bonus_S, parents_ST, side_outputs_SC, best_GTC)
    return replace(RoundResult(*trees, drawn_R, best_GC, *told), picked_P=picked)


def split(flat: Ids, shapes: Sequence[tuple[int, ...]]) -> list[Ids]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Pick(Protocol):
    """Chooses a legal token: from a row's best tokens, or from all of them."""

    def __call__(self, matcher: Matcher, best_C: Ids, bound: GrammarRows, row: int) -> int: ...


def legal_pick(host: HostReader) -> Pick:
    """The best legal token of a row; a whole row is read only when none of the best is legal."""

    def pick(matcher: Matcher, best_C: Ids, bound: GrammarRows, row: int) -> int:
        for token in best_C:
            if token >= 0 and matcher.is_legal(int(token)):
                return int(token)
        for token in host.read_order(bound.whole(row)):
            if matcher.is_legal(int(token)):
                return int(token)
        raise AssertionError("the grammar has a dead end")

    return pick


def free_path(verdict: RoundResult, tree: int) -> tuple[list[int], list[int]]:
    """(nodes from the root on, new tokens incl. the bonus) of a tree without a grammar."""
    nodes = [int(n) for n in np.flatnonzero(verdict.path_ST[tree])]
    tokens = [int(verdict.tokens_ST[tree, n]) for n in nodes[1:]]
    return nodes, [*tokens, int(verdict.bonus_S[tree])]


def bound_path(
    verdict: RoundResult, tree: int, at: int, branch: Branch, bound: GrammarRows, pick: Pick
) -> tuple[list[int], list[int]]:
    """The same walk under a grammar: at each node the best legal token, masked on the host.

    Args:
        at: number of the tree among those under a grammar.
    """
    assert branch.matcher is not None
    size = verdict.path_ST.shape[1]
    nodes, tokens = [0], []
    while True:
        node = nodes[-1]
        token = pick(branch.matcher, verdict.best_GTC[at, node], bound, at * size + node)
        branch.matcher.advance(token)
        tokens.append(token)
        child = _child(verdict, tree, node, token)
        if child is None or token in branch.request.stop_ids:
            return nodes, tokens
        nodes.append(child)


def _child(verdict: RoundResult, tree: int, node: int, token: int) -> int | None:
    fits = (verdict.parents_ST[tree] == node) & (verdict.tokens_ST[tree] == token)
    fits[0] = False
    found = np.flatnonzero(fits)
    return int(found[0]) if found.size else None


def take(branch: Branch, tokens: Sequence[int]) -> int:
    """Append tokens up to a stop id or the budget; ends the branch there.

    Stop ids are looked for inside the accepted path, not only at its end.

    Returns:
        How many tokens were appended.
    """
    for count, token in enumerate(tokens):
        if token in branch.request.stop_ids:
            branch.end(Finish.STOP)
            return count
        branch.tokens.append(token)
        if len(branch.tokens) >= branch.budget:
            branch.end(Finish.LENGTH, branch.note)
            return count + 1
    return len(tokens)
