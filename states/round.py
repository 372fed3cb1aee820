"""Reading a round on the host: which path each branch takes, and where its answer ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ops.draft.gamma import GammaRecord
from ..ops.host import HostReader
from ..ops.kv.slots import Ints
from ..ops.row_layout import AlignmentState, ContinuousDecodingState
from ..ops.types import NO_WORK, DraftSize, DraftWork
from ..ops.verify.verify import BROKEN, Accepted, DraftFigures, FirstTokens, GrammarRows, unpacked
from .blend import BlendSummary
from .request import Branch, Finish, Matcher, Stage

Ids = npt.NDArray[np.int64]
NO_NUMBERS = "the model's scores are no numbers (NaN)"


class BrokenRequest(ValueError):
    """What ends one request, with the reason, and no other."""


def _no_trees() -> Ids:
    return np.zeros((0, 1), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRows:
    """Rows of one segment that a forward of the target committed.

    owner: the segment. prefix: the segment that it continues, or itself. position: of the first
        row. tokens: of the rows; following: known tokens behind them without a row.
    rows: int32, flat indices in the forward. features_QF: the target's features of the whole
        forward, None without taps.
    is_path: the root and the accepted nodes of a tree, not a part of a prompt; its first token was
        in `following` before.
    branch: None for the rows of a prefix.
    """

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    following: Sequence[int] = ()
    rows: Ints
    features_QF: Tensor | None
    is_path: bool = False
    branch: Branch | None = None

    @classmethod
    def of_branch(
        cls,
        branch: Branch,
        position: int,
        tokens: Sequence[int],
        rows: Ints,
        *,
        features_QF: Tensor | None,
        is_path: bool = False,
    ) -> "CommittedRows":
        """The rows of a branch whose counts have advanced; nothing follows an ended branch."""
        prefix = branch.request.prefix_owner
        if branch.reads:  # it continues the longest part
            prefix = max(branch.reads, key=lambda part: part.start + part.own).owner
        return cls(
            owner=branch.owner,
            prefix=prefix,
            position=position,
            tokens=tokens,
            following=branch.pending if branch.stage is Stage.RUNNING else [],
            rows=rows,
            features_QF=features_QF,
            is_path=is_path,
            branch=branch,
        )

    @property
    def matter(self) -> bool:
        """Whether later tokens may depend on these rows: those of a prefix, an outline, a running
        branch, or a part that will be combined."""
        branch = self.branch
        if branch is None or branch.is_root:
            return True
        return branch.stage is Stage.RUNNING or branch.stays

    def features(self, columns_F: Tensor | None = None) -> Tensor | None:
        """[R, F] of these rows, all columns or some."""
        if self.features_QF is None:
            return None
        index = torch.tensor(self.rows, dtype=torch.int64, device=self.features_QF.device)
        features_RF = self.features_QF.index_select(0, index)
        return features_RF if columns_F is None else features_RF.index_select(1, columns_F)


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


# ways to accept drafts, beside the rules of rejection sampling
MATCH = "match"
GRAMMAR = "grammar"


class FinalToken(StrEnum):
    """How a round's final token came about.

    BONUS: behind a path of drafts that was accepted to its end. RESIDUAL: after a rejection, from
    what the rejected drafts leave of the target's distribution. OWN: the target's own token, where
    no draft had it, or there was none.
    """

    BONUS = "bonus"
    RESIDUAL = "residual"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class ExplainedDraft:
    """One drafted node.

    node, parent: numbers in the tree, whose root is 0; depth: 1 for children of the root.
    accepted: on the path that was taken; reached: it was asked for (its parent is on the path and,
        under rejection, no earlier sibling was accepted).
    """

    node: int
    parent: int
    depth: int
    token: int
    accepted: bool
    reached: bool
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class ExplainedRound:
    """One branch in one round.

    rule: MATCH, GRAMMAR (the host takes the best legal token at each node) or the `Rule` of
        rejection sampling.
    position, root: of the round's root token, which an earlier round committed. The final token's
        position is `position + accepted + 1`.
    committed: tokens appended. finish: why the branch ended with this round, if it did; a path may
        then hold more tokens than were appended.
    """

    branch: str
    rule: str
    position: int
    root: int
    drafts: tuple[ExplainedDraft, ...]
    accepted: int
    final: int
    came: FinalToken
    committed: int
    finish: str | None


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """What a branch was offered in one round, and what became of it, as the host has read it.

    position, root: of the round's root token, which an earlier round committed.
    tokens, parents: of each node, the root first; a negative token is padding.
    path: the nodes that were accepted, the root first. final: the token behind them.
    taken: how many of these tokens the branch took, which ends at a stop token and at its budget.
    forced: no drafter's, but all that a grammar leaves.
    """

    branch: str
    position: int
    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    final: int
    taken: int
    forced: bool = False


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What one forward committed: shown in the trace, counted in the metrics.

    branches: names; committed: tokens appended to each; accepted: drafts accepted by each (-1 for
    a branch that was only prefilled); drafted: tree nodes offered; target_length and draft_length:
    slots that requests need afterwards; rows: query rows of the forward, `padding` for nothing;
    alignment: how they were padded, None under ``bim``; gamma: how a draft-length policy decided
    for each branch that was drafted for; explained: each draft's figures, if somebody asked;
    blend: what was reused, None if nothing was; trees: of the branches that were drafted for;
    work: what drafting them cost; choices: of the drafters that choose what to draft.
    """

    branches: tuple[str, ...]
    committed: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted: int
    target_length: int
    draft_length: int
    rows: int
    padding: int = 0
    alignment: AlignmentState | ContinuousDecodingState | None = None
    gamma: tuple[GammaRecord, ...] = ()
    explained: tuple[ExplainedRound, ...] = ()
    blend: BlendSummary | None = None
    trees: tuple[VerifiedTree, ...] = ()
    work: DraftWork = NO_WORK
    choices: tuple[DraftSize, ...] = ()


def verified_trees(
    ran: Sequence[Branch], walks: Sequence[Walk], verdict: RoundResult, forced: Sequence[int]
) -> tuple[VerifiedTree, ...]:
    """One record per tree; ran: their branches."""
    offered = zip(verdict.tokens_ST.tolist(), verdict.parents_ST.tolist(), strict=True)
    return tuple(
        VerifiedTree(
            branch.name,
            walk.position,
            walk.root,
            tuple(tokens),
            tuple(parents),
            tuple(walk.nodes),
            walk.tokens[-1],
            walk.taken,
            tree in forced,
        )
        for tree, (branch, walk, (tokens, parents)) in enumerate(
            zip(ran, walks, offered, strict=True)
        )
    )


def explain(
    ran: Sequence[Branch],
    walks: Sequence[Walk],
    verdict: RoundResult,
    accepted: Accepted | None,
    bound_trees: Sequence[int],
) -> tuple[ExplainedRound, ...]:
    """One record per tree; nothing if nobody asked.

    Args:
        ran: the branches of the trees, after the round.
    """
    if accepted is None or accepted.figures is None:
        return ()
    figures = accepted.figures
    rounds = []
    for tree, (branch, walk) in enumerate(zip(ran, walks, strict=True)):
        rule = GRAMMAR if tree in bound_trees else str(figures.rule or MATCH)
        drafts = _drafts(verdict, tree, walk, rule)
        explained = ExplainedRound(
            branch.name,
            rule,
            walk.position,
            walk.root,
            drafts,
            len(walk.nodes) - 1,
            walk.tokens[-1],
            _came(walk, drafts, rule not in (MATCH, GRAMMAR) and figures.adjusted),
            walk.taken,
            None if branch.finish is None else str(branch.finish),
        )
        rounds.append(explained)
    return tuple(rounds)


def _came(walk: Walk, drafts: Sequence[ExplainedDraft], adjusted: bool) -> FinalToken:
    if any(draft.parent == walk.nodes[-1] for draft in drafts):
        return FinalToken.RESIDUAL if adjusted else FinalToken.OWN
    return FinalToken.BONUS if drafts else FinalToken.OWN


def _drafts(verdict: RoundResult, tree: int, walk: Walk, rule: str) -> tuple[ExplainedDraft, ...]:
    """The nodes that stand for something, in the tree's order."""
    assert verdict.figures_SNC is not None
    tokens = verdict.tokens_ST[tree].tolist()
    parents = verdict.parents_ST[tree].tolist()
    path = set(walk.nodes)
    depths = [0]
    drafts = []
    for node, figures in enumerate(unpacked(verdict.figures_SNC[tree]), 1):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        if tokens[node] < 0:
            continue
        own = _relevant(figures, walk, parent, rule)
        reached = parent in path if rule in (MATCH, GRAMMAR) else own.chance is not None
        draft = ExplainedDraft(node, parent, depths[node], tokens[node], node in path, reached, own)
        drafts.append(draft)
    return tuple(drafts)


def _relevant(figures: DraftFigures, walk: Walk, parent: int, rule: str) -> DraftFigures:
    """Without the figures that had no part in the decision."""
    if rule == MATCH:
        return figures
    if rule != GRAMMAR:
        return replace(figures, draw=None, coin=None)
    legal = walk.tokens[walk.nodes.index(parent)] if parent in walk.nodes else None
    return replace(figures, draw=legal, p=None, q=None, r=None, chance=None)
