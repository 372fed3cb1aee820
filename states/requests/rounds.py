"""Reading a round on the host: which path each branch takes, and where its answer ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...ops.host import HostReader
from ...ops.verify.verify import BROKEN, Accepted, FirstTokens, GrammarRows
from .branch import Branch, Finish
from .matcher import Matcher

Ids = npt.NDArray[np.int64]
NO_NUMBERS = "the model's scores are no numbers (NaN)"


class BrokenRequest(ValueError):
    """What ends one request, with the reason, and no other."""


def _no_trees() -> Ids:
    return np.zeros((0, 1), np.int64)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round as host arrays (shapes as in `Accepted` and `FirstTokens`).

    best_RC, best_GC: the best ids of prompts' and of trees' rows under a grammar.
    picked_P: flat indices of the cached rows that were recomputed, None if no row was cached.
    """

    drawn_R: Ids
    best_RC: Ids
    path_ST: Ids = field(default_factory=_no_trees)
    tokens_ST: Ids = field(default_factory=_no_trees)
    bonus_S: Ids = field(default_factory=_no_trees)
    parents_ST: Ids = field(default_factory=_no_trees)
    side_outputs_SC: Ids = field(default_factory=_no_trees)
    best_GC: Ids = field(default_factory=_no_trees)
    figures_SNC: Ids | None = None
    picked_P: Ids | None = None

    def some(self, trees: list[int]) -> "RoundResult":
        """What there is of some trees for a drafter to learn from."""
        tokens_ST = self.tokens_ST[trees]
        side_outputs_SC = self.side_outputs_SC[trees]
        return replace(self, tokens_ST=tokens_ST, side_outputs_SC=side_outputs_SC)


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
    parts = {"drawn_R": roots.drawn_R, "best_RC": roots.bound.best_GC}
    if accepted is not None:
        names = ("path_ST", "tokens_ST", "bonus_S", "parents_ST", "side_outputs_SC")
        parts |= {name: getattr(accepted, name) for name in names}
        parts["best_GC"] = accepted.bound.best_GC
        if accepted.figures is not None:
            parts["figures_SNC"] = accepted.figures.bits_SNC
    if picked_P is not None:
        parts["picked_P"] = picked_P
    return RoundResult(**dict(zip(parts, read_all(host, parts.values()), strict=True)))


def read_all(host: HostReader, values: Iterable[Tensor]) -> list[Ids]:
    """Integers of several tensors, in one read."""
    parts = list(values)
    there = [part.reshape(-1).long() for part in parts if part.numel()] or [parts[0].reshape(-1)]
    flat = host.read(torch.cat(there))
    arrays = list[Ids]()
    at = 0
    for part in parts:
        arrays.append(flat[at : at + part.numel()].reshape(part.shape))
        at += part.numel()
    return arrays


def take_legal_(
    matcher: Matcher, best_GC: Ids, bound: GrammarRows, row: int, host: HostReader
) -> int:
    """The best legal token of a row; a whole row is read only when none of the best is legal.

    Raises:
        BrokenRequest: the row's scores are no numbers.
    """
    if best_GC[row, 0] == BROKEN:
        raise BrokenRequest(NO_NUMBERS)

    def legal(ids: Ids) -> int | None:
        return next((i for i in map(int, ids) if i >= 0 and matcher.is_legal(i)), None)

    token = legal(best_GC[row])
    if token is None:
        token = legal(host.read_order(bound.whole(row)))
    assert token is not None, "the grammar has a dead end"
    matcher.advance(token)
    return token


def free_path(verdict: RoundResult, tree: int) -> tuple[list[int], list[int]]:
    """(nodes from the root on, new tokens incl. the bonus) of a tree without a grammar."""
    node_L = verdict.path_ST[tree].nonzero()[0]
    drafts = verdict.tokens_ST[tree, node_L[1:]]
    return node_L.tolist(), [*drafts.tolist(), int(verdict.bonus_S[tree])]


def bound_path(
    verdict: RoundResult, tree: int, at: int, branch: Branch, bound: GrammarRows, host: HostReader
) -> tuple[list[int], list[int]]:
    """The same walk under a grammar: at each node the best legal token, masked on the host.

    Args:
        at: number of the tree among those under a grammar.
    """
    assert branch.matcher is not None
    first = at * verdict.path_ST.shape[1]
    nodes = [0]
    tokens = []
    while True:
        node = nodes[-1]
        token = take_legal_(branch.matcher, verdict.best_GC, bound, first + node, host)
        tokens.append(token)
        child = _child(verdict, tree, node, token)
        if child is None or token in _closing(branch):
            return nodes, tokens
        nodes.append(child)


def _child(verdict: RoundResult, tree: int, node: int, token: int) -> int | None:
    fits = (verdict.parents_ST[tree] == node) & (verdict.tokens_ST[tree] == token)
    fits[0] = False
    return int(fits.argmax()) if fits.any() else None


def take(branch: Branch, tokens: Sequence[int]) -> int:
    """Append tokens up to a stop id or the budget; ends the branch there.

    Stop ids are looked for inside the accepted path, not only at its end. A token that could not be
    drawn ends the branch as well.

    Returns:
        How many tokens were appended.
    """
    for count, token in enumerate(tokens):
        if token == BROKEN:
            branch.end(Finish.FAILED, NO_NUMBERS)
            return count
        if token in _closing(branch):
            branch.end(Finish.STOP)
            return count
        branch.tokens.append(token)
        if len(branch.tokens) >= branch.budget:
            branch.end(Finish.LENGTH, branch.note)
            return count + 1
    return len(tokens)


def _closing(branch: Branch) -> frozenset[int]:
    """Tokens that end it: behind the end of a grammar nothing can come, whatever is ignored."""
    closing = branch.request.closing_ids if branch.matcher is not None else None
    return closing or branch.request.stop_ids
