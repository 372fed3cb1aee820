"""The records of a round on the host: its rows and their places, its results, and its summary."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..ops.draft.gamma import GammaRecord
from ..ops.kv.pool import Ints
from ..ops.types import (
    NO_WORK,
    AlignmentState,
    ContinuousDecodingState,
    DraftSize,
    DraftWork,
    Proposal,
    Rows,
)
from ..ops.verify.verify import DraftFigures, TreeFigures, unpacked
from .request import Branch
from .text.tokens import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Prefill rows of one segment, in reading order. request: prefix owner of its request. branch:
    None for rows of a prefix. draws: the last row's logits draw a root token; bound: a grammar
    restricts it. chunks: document chunks in `tokens`."""

    owner: int
    request: int
    position: int
    tokens: Sequence[int]
    branch: Branch | None = None
    draws: bool = False
    bound: bool = False
    chunks: tuple[Chunk, ...] = ()

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + len(self.tokens)))


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Committed rows that the drafter has not read yet, from `position` on: tokens and, for
    drafters that read features, `features` [n, F]; the drafter defines how they are paired."""

    owner: int
    position: int
    tokens: Sequence[int]
    features: Tensor | None

    def before(self, position: int) -> "PendingRows":
        count = max(position - self.position, 0)
        features = None if self.features is None else self.features[:count]
        return PendingRows(self.owner, self.position, self.tokens[:count], features)


@dataclass(frozen=True, slots=True)
class Trees:
    """The active branches as roots of token trees, in the proposal's order. bound: trees under a
    grammar. segments: for each tree the segments that its nodes see; None for its owner's."""

    roots: Sequence[int]
    positions: Sequence[int]
    owners: Sequence[int]
    bound: tuple[int, ...]
    proposal: Proposal
    segments: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class SpanSlots:
    """The place of a span: slots and flat row indices of each of its copies."""

    slots_Cn: Ints
    flat_Cn: Ints


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a forward; fresh: slots of tree nodes; paddings: at the start of tensor rows."""

    rows: Rows
    fresh: Ints
    spans: tuple[SpanSlots, ...]
    paddings: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one target forward and their owners; on the blackboard until it is committed.
    rows: those of `placed`, with sampling parameters and cached rows. ran: branches with a tree, in
    the proposal's order; newcomers: branches that start. forced: trees that a grammar forces."""

    rows: Rows
    placed: PlacedRows
    ran: tuple[Branch, ...]
    newcomers: tuple[Branch, ...]
    branches: tuple[Branch, ...]
    spans: tuple[Span, ...]
    forced: tuple[int, ...] = ()
    work: DraftWork = NO_WORK


Ids = npt.NDArray[np.int64]


def _no_trees() -> Ids:
    return np.zeros((0, 1), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRows:
    """Rows of one segment that a forward of the target committed.

    owner: the segment. prefix: the segment that it continues, or itself. following: known tokens
    behind `tokens`, without a row. rows: int32, flat indices in the forward. features_QF: of the
    whole forward, None without taps. is_path: the root and the accepted nodes of a tree, not a part
    of a prompt; its first token was in `following` before. branch: None for rows of a prefix."""

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    following: Sequence[int] = ()
    rows: Ints
    features_QF: Tensor | None
    is_path: bool = False
    branch: Branch | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round as host arrays (shapes as in `Accepted` and `FirstTokens`). best_RC, best_GC: best
    ids of prompts' and trees' rows under a grammar. picked_P: flat indices of recomputed rows."""

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


MATCH = "match"  # how drafts are accepted, besides the rules of rejection sampling
GRAMMAR = "grammar"


class FinalToken(StrEnum):
    """The origin of a round's final token."""

    BONUS = "bonus"  # it follows a path of drafts that was accepted to its leaf
    RESIDUAL = "residual"  # drawn after a rejection, from the residual distribution
    TARGET = "own"  # the target's token, which no draft proposed


@dataclass(frozen=True, slots=True)
class VerifiedTree:
    """A verified tree of one branch in one round.

    position, root: of the round's root token. tokens, parents: of each node, the root first; a
    negative token is padding. path: the accepted nodes, the root first; empty if the tree is not
    verified yet. final: the token after them. num_committed: how many of these tokens were
    appended; fewer if the branch ended. forced: the tree is the only continuation of a grammar
    instead of a draft.

    Where rounds are explained also rule: MATCH, GRAMMAR (the host takes the best legal token at
    each node) or the `Rule` of rejection sampling. came: the origin of `final`. finish: why the
    branch ended. figures: of each node but the root."""

    branch: str
    position: int
    root: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]
    final: int
    num_committed: int
    forced: bool = False
    rule: str = ""
    came: FinalToken | None = None
    finish: str | None = None
    figures: tuple[DraftFigures, ...] = ()

    @property
    def drafts(self) -> list[int]:
        """The drafted nodes, without padding."""
        return [node for node in range(1, len(self.tokens)) if self.tokens[node] >= 0]

    @property
    def rejected(self) -> list[int]:
        """The tokens that were drafted after the accepted path, the first child of each node; none
        if the branch ended on the path."""
        tokens: list[int] = []
        node = self.path[-1] if len(self.path) <= self.num_committed else -1
        for draft in self.drafts:
            if self.parents[draft] == node:
                tokens.append(self.tokens[draft])
                node = draft
        return tokens

    @property
    def depths(self) -> list[int]:
        """Of each node; parents are before their children."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def reached(self, node: int) -> bool:
        """Whether a draft of an explained tree was tested: its parent is on the path and, under
        rejection, no earlier sibling was accepted."""
        if self.rule in (MATCH, GRAMMAR):
            return self.parents[node] in self.path
        return self.figures[node - 1].chance is not None


@dataclass(frozen=True, slots=True)
class BlendSummary:
    """What a forward with cached rows did, in host ints; see `ops.blend.BlendReport`. picked: rows
    that each check layer went on with, the suffix not counted. parts: cached and computed rows of
    every prompt, or part of one, that had cached rows."""

    plan: tuple[int, ...]
    live: tuple[int, ...]
    picked: tuple[int, ...]
    reused: int
    protected: int
    suffix: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """What one forward committed; the trace and the metrics are made of it.

    committed: tokens appended to each branch; accepted: drafts accepted by each (-1 for a branch
    that was only prefilled). drafted: proposed tree nodes. target_length, draft_length: slots in
    use afterwards. rows: query rows, `padding` of which are padding. gamma: the decision of a
    draft-length policy for each drafted branch. choices: the sizes that drafters chose."""

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
    blend: BlendSummary | None = None
    trees: tuple[VerifiedTree, ...] = ()
    work: DraftWork = NO_WORK
    choices: tuple[DraftSize, ...] = ()


def explain(
    batch: Batch, trees: Sequence[VerifiedTree], result: RoundResult, figures: TreeFigures
) -> list[VerifiedTree]:
    """The trees after the round, with the figures that decided on each draft."""
    assert result.figures_SNC is not None
    explained = []
    for number, (branch, tree) in enumerate(zip(batch.ran, trees, strict=True)):
        rule = GRAMMAR if number in batch.rows.bound_trees else str(figures.rule or MATCH)
        judged = unpacked(result.figures_SNC[number])
        if rule == GRAMMAR:
            chosen = [*(tree.tokens[node] for node in tree.path[1:]), tree.final]
            legal_of = dict(zip(tree.path, chosen, strict=True))
            for at, parent in enumerate(tree.parents[1:]):
                draw = legal_of.get(parent)
                judged[at] = replace(judged[at], draw=draw, p=None, q=None, r=None, chance=None)
        elif rule != MATCH:
            judged = [replace(one, draw=None, coin=None) for one in judged]
        came = FinalToken.BONUS if tree.drafts else FinalToken.TARGET
        if any(tree.parents[node] == tree.path[-1] for node in tree.drafts):
            adjusted = rule not in (MATCH, GRAMMAR) and figures.adjusted
            came = FinalToken.RESIDUAL if adjusted else FinalToken.TARGET
        finish = None if branch.finish is None else str(branch.finish)
        explained.append(replace(tree, rule=rule, came=came, finish=finish, figures=tuple(judged)))
    return explained
