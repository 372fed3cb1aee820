"""From what a round's one read brought to what is told of it."""

from collections.abc import Sequence
from dataclasses import replace

from ...ops.verify.explain import DraftFigures, TreeFigures, unpacked
from .branch import Branch
from .explained import GRAMMAR, MATCH, ExplainedDraft, ExplainedRound, FinalToken
from .rounds import RoundResult, Walk


def explain(
    ran: Sequence[Branch],
    walks: Sequence[Walk],
    verdict: RoundResult,
    figures: TreeFigures | None,
    bound_trees: Sequence[int],
) -> tuple[ExplainedRound, ...]:
    """One record per tree; nothing if nobody asked.

    Args:
        ran: the branches of the trees, after the round. figures: as the round's `Accepted` has it.
    """
    if figures is None:
        return ()
    told = []
    for tree, (branch, walk) in enumerate(zip(ran, walks, strict=True)):
        rule = MATCH if figures.rule is None else str(figures.rule)
        rule = GRAMMAR if tree in bound_trees else rule
        drafts = _drafts(verdict, tree, walk, rule)
        told.append(_explained(branch, walk, drafts, rule, figures.adjusted))
    return tuple(told)


def _explained(
    branch: Branch, walk: Walk, drafts: tuple[ExplainedDraft, ...], rule: str, adjusted: bool
) -> ExplainedRound:
    return ExplainedRound(
        branch.name,
        rule,
        walk.position,
        walk.root,
        drafts,
        len(walk.nodes) - 1,
        walk.tokens[-1],
        _came(walk, drafts, rule not in (MATCH, GRAMMAR) and adjusted),
        walk.taken,
        None if branch.finish is None else str(branch.finish),
    )


def _came(walk: Walk, drafts: Sequence[ExplainedDraft], adjusted: bool) -> FinalToken:
    if any(draft.parent == walk.nodes[-1] for draft in drafts):
        return FinalToken.RESIDUAL if adjusted else FinalToken.OWN
    return FinalToken.BONUS if drafts else FinalToken.OWN


def _drafts(verdict: RoundResult, tree: int, walk: Walk, rule: str) -> tuple[ExplainedDraft, ...]:
    """The nodes that stand for something, in the tree's order."""
    assert verdict.figures_SNC is not None
    tokens, parents = verdict.tokens_ST[tree].tolist(), verdict.parents_ST[tree].tolist()
    path, depths, drafts = set(walk.nodes), [0], []
    for node, found in enumerate(unpacked(verdict.figures_SNC[tree]), 1):
        parent = parents[node]
        depths.append(depths[parent] + 1)
        if tokens[node] < 0:
            continue
        known = _relevant(found, walk, parent, rule)
        reached = parent in path if rule in (MATCH, GRAMMAR) else known.chance is not None
        drafts.append(
            ExplainedDraft(node, parent, depths[node], tokens[node], node in path, reached, known)
        )
    return tuple(drafts)


def _relevant(found: DraftFigures, walk: Walk, parent: int, rule: str) -> DraftFigures:
    """Without the figures that had no part in the decision."""
    if rule == MATCH:
        return found
    if rule != GRAMMAR:
        return replace(found, draw=None, coin=None)
    legal = walk.tokens[walk.nodes.index(parent)] if parent in walk.nodes else None
    return replace(found, draw=legal, p=None, q=None, r=None, chance=None)
