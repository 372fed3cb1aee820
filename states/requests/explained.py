"""What is told of a round by those who asked: each draft with its figures, and the final token."""

from dataclasses import dataclass
from enum import StrEnum

from ...ops.verify.explain import DraftFigures

MATCH, GRAMMAR = "match", "grammar"  # ways to accept drafts, beside the rules of rejection sampling


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
