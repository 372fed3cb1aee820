"""What is told of a forward that was committed, and of each draft to those who asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ...ops.draft.gamma import GammaRecord
from ...ops.row_layout import AlignmentState, ContinuousDecodingState
from ...ops.types import NO_WORK, DraftSize, DraftWork
from ...ops.verify.verify import Accepted, DraftFigures, unpacked
from .branch import Branch
from .rounds import RoundResult, Walk

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
class BlendSummary:
    """What a forward with cached rows did, in host ints; see `ops.blend.BlendReport`.

    plan: one status per layer. live: rows that each layer wrote anew. picked: rows that each check
    layer went on with, the suffix not counted. reused, protected, suffix: rows of each kind.
    parts: cached and computed rows of every prompt, or part of one, that had cached rows.
    """

    plan: tuple[int, ...]
    live: tuple[int, ...]
    picked: tuple[int, ...]
    reused: int
    protected: int
    suffix: int
    parts: tuple[tuple[int, int], ...]


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
