"""What the target committed on its way to the drafter: one way of pairing per kind of drafter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.kv.pool import NOBODY, Ints
from ..graph.drafter_spec import Takes
from ..layout.layout import Segment, Span
from .branch import Branch, Request, Stage


class DraftInputs:
    """Rows of one forward that the drafter has to take in; a drafter without a pool takes none.

    A branch that ended needs nothing more, but what an outline's root branch committed becomes the
    prefix of others.
    """

    def __init__(self, features_QF: Tensor | None) -> None:
        self.features_QF = features_QF
        self.segments: list[Segment] = []

    def prefix(self, request: Request, span: Span, rows: Ints) -> None:
        """Shared rows, at flat indices `rows` of the forward."""

    def prompt(self, branch: Branch, rows: Ints) -> None:
        """A branch's prompt; its root token is drawn already."""

    def path(self, branch: Branch, rows: Ints) -> None:
        """The root and the accepted nodes of a tree, before the branch's counts move on."""

    def features(self, rows: Ints) -> list[Tensor]:
        """[R, F] of these rows, for another forward; nothing if nobody asked for any."""
        return [] if self.features_QF is None else [self._features(rows)]

    def _features(self, rows: Ints) -> Tensor:
        assert self.features_QF is not None
        index = torch.tensor(rows, dtype=torch.int64, device=self.features_QF.device)
        return self.features_QF.index_select(0, index)

    def _add(
        self,
        branch: Branch,
        position: int,
        tokens: Sequence[int],
        features_RF: Tensor | None = None,
    ) -> None:
        owner, prefix = branch.owner, branch.request.prefix_owner
        self._append(owner, prefix, position, tokens, features_RF)

    def _append(
        self,
        owner: int,
        prefix: int,
        position: int,
        tokens: Sequence[int],
        features_RF: Tensor | None,
    ) -> None:
        if tokens:
            kept = None if features_RF is None else features_RF[: len(tokens)]
            self.segments.append(Segment(owner, prefix, position, tokens, kept))


def rows_needed(branch: Branch) -> bool:
    """Whether its rows are needed: it runs, or it is a root whose rows become the prefix."""
    return branch.stage is Stage.RUNNING or branch.is_root


class EaglePairing(DraftInputs):
    """Row j pairs the feature of token j with token j + 1: a prefix ends with a feature whose
    partner is not known yet; whoever continues there pairs it with its own first token."""

    def prefix(self, request: Request, span: Span, rows: Ints) -> None:
        features_RF, shared = self._features(rows), request.prefix_feature
        owner = span.owner
        if shared is not None:
            self._append(owner, NOBODY, span.position - 1, span.tokens[:1], shared[None])
        self._append(owner, NOBODY, span.position, span.tokens[1:], features_RF)
        request.prefix_feature = features_RF[-1]

    def prompt(self, branch: Branch, rows: Ints) -> None:
        shared = branch.request.prefix_feature
        if shared is not None:
            self._add(branch, branch.start - 1, branch.prompt[:1], shared[None])
        self._pair(branch, branch.start, [*branch.prompt[1:], *branch.tokens], rows)

    def path(self, branch: Branch, rows: Ints) -> None:
        first = branch.kept + 1
        self._pair(branch, branch.length, branch.tokens[first : first + len(rows)], rows)

    def _pair(self, branch: Branch, position: int, following: Sequence[int], rows: Ints) -> None:
        features_RF = self._features(rows)
        branch.feature = features_RF[-1]
        if branch.stage is Stage.RUNNING:
            self._add(branch, position, following, features_RF)
        elif branch.is_root:
            self._add(branch, position, following[: len(rows) - 1], features_RF)


class FeatureFeed(DraftInputs):
    """Every committed token with its own feature, at its own position (DFlash)."""

    def prefix(self, request: Request, span: Span, rows: Ints) -> None:
        features_RF = self._features(rows)
        self._append(span.owner, NOBODY, span.position, span.tokens, features_RF)

    def prompt(self, branch: Branch, rows: Ints) -> None:
        if rows_needed(branch):
            self._add(branch, branch.start, branch.prompt, self._features(rows))

    def path(self, branch: Branch, rows: Ints) -> None:
        if rows_needed(branch):
            tokens = branch.tokens[branch.kept : branch.kept + len(rows)]
            self._add(branch, branch.length, tokens, self._features(rows))


class TokenFeed(DraftInputs):
    """Token ids alone, the next root included: a small language model reads the text itself."""

    def prefix(self, request: Request, span: Span, rows: Ints) -> None:
        self._append(span.owner, NOBODY, span.position, span.tokens, None)

    def prompt(self, branch: Branch, rows: Ints) -> None:
        if rows_needed(branch):
            root = branch.tokens if branch.stage is Stage.RUNNING else []
            self._add(branch, branch.start, [*branch.prompt, *root])

    def path(self, branch: Branch, rows: Ints) -> None:
        """The root itself was taken in when it was drawn."""
        if rows_needed(branch):
            running = branch.stage is Stage.RUNNING
            first = branch.kept + 1
            tokens = branch.tokens[first : first + len(rows) - 1 + running]
            self._add(branch, branch.length + 1, tokens)


DRAFT_INPUTS: dict[Takes, type[DraftInputs]] = {
    "nothing": DraftInputs,
    "pairs": EaglePairing,
    "features": FeatureFeed,
    "text": TokenFeed,
}
"""By what a kind of drafter takes (`Drafter.takes`)."""
