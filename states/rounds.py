"""Reading a round on the host: which path each branch takes, and where its answer ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ops.host import HostReader
from ..ops.verify import Accepted, Roots
from .branches import Branch, Finish, Matcher

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One round as host arrays (shapes as in `Accepted` and `Roots`)."""

    path_ST: Ids
    tokens_ST: Ids
    bonus_S: Ids
    parents_ST: Ids
    notes_SC: Ids
    best_GTC: Ids
    drawn_R: Ids
    best_RC: Ids


def read_round(host: HostReader, accepted: Accepted | None, roots: Roots) -> Verdict:
    """Everything the host decides on, in one read."""
    parts = [roots.drawn_R, roots.best_GC]
    if accepted is not None:
        parts += [accepted.path_ST, accepted.tokens_ST, accepted.bonus_S]
        parts += [accepted.parents_ST, accepted.notes_SC, accepted.best_GTC]
    flat = host.read(torch.cat([part.reshape(-1).long() for part in parts]))
    arrays = _split(flat, [tuple(part.shape) for part in parts])
    if accepted is None:
        none = np.zeros((0, 1), np.int64)
        drawn_R, best_RC = arrays
        return Verdict(none, none, none[:, 0], none, none, none[..., None], drawn_R, best_RC)
    drawn_R, best_RC, path_ST, tokens_ST, bonus_S, parents_ST, notes_SC, best_GTC = arrays
    return Verdict(path_ST, tokens_ST, bonus_S, parents_ST, notes_SC, best_GTC, drawn_R, best_RC)


def _split(flat: Ids, shapes: Sequence[tuple[int, ...]]) -> list[Ids]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Pick(Protocol):
    """Chooses a legal token from a row's best tokens, or from all of them (`scores_V`)."""

    def __call__(self, matcher: Matcher, best_C: Ids, scores_V: Tensor) -> int: ...


def legal_pick(host: HostReader) -> Pick:
    """The best legal token of a row; a whole row is read only when none of the best is legal."""

    def pick(matcher: Matcher, best_C: Ids, scores_V: Tensor) -> int:
        for token in best_C:
            if matcher.is_legal(int(token)):
                return int(token)
        for token in host.read_order(scores_V):
            if matcher.is_legal(int(token)):
                return int(token)
        raise AssertionError("the grammar has a dead end")

    return pick


def free_path(verdict: Verdict, tree: int) -> tuple[list[int], list[int]]:
    """(nodes from the root on, new tokens incl. the bonus) of a tree without a grammar."""
    nodes = [int(n) for n in np.flatnonzero(verdict.path_ST[tree])]
    tokens = [int(verdict.tokens_ST[tree, n]) for n in nodes[1:]]
    return nodes, [*tokens, int(verdict.bonus_S[tree])]


def bound_path(
    verdict: Verdict, tree: int, bound: int, branch: Branch, scores_GTV: Tensor, pick: Pick
) -> tuple[list[int], list[int]]:
    """The same walk under a grammar: at each node the best legal token, masked on the host."""
    assert branch.matcher is not None
    nodes, tokens = [0], []
    while True:
        node = nodes[-1]
        token = pick(branch.matcher, verdict.best_GTC[bound, node], scores_GTV[bound, node])
        branch.matcher.advance(token)
        tokens.append(token)
        child = _child(verdict, tree, node, token)
        if child is None or token in branch.request.stop_ids:
            return nodes, tokens
        nodes.append(child)


def _child(verdict: Verdict, tree: int, node: int, token: int) -> int | None:
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
