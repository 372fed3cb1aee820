"""What a drafter remembers between rounds: rows it has yet to take in, and what its drafts became.

What the target committed reaches the drafter at its next forward; how tokens and the target's
features are paired on the way is the drafter's own, one class for each kind of `takes`.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...ops.draft.gamma import GammaRecord, GammaState, first_state, next_state, records
from ...ops.draft.gamma_settings import GammaSettings
from ...ops.kv.slots import Ints
from ..layout.layout import PendingRows, Span
from .branch import Branch, Request, Stage
from .rounds import RoundResult


class Features:
    """The target's features of one forward; None if nobody asked for any."""

    def __init__(self, features_QF: Tensor | None) -> None:
        self.features_QF = features_QF

    def of(self, rows: Ints, columns_F: Tensor | None = None) -> Tensor | None:
        """[R, F] of these rows, all columns of them or some."""
        if self.features_QF is None:
            return None
        index = torch.tensor(rows, dtype=torch.int64, device=self.features_QF.device)
        features_RF = self.features_QF.index_select(0, index)
        return features_RF if columns_F is None else features_RF.index_select(1, columns_F)


def rows_needed(branch: Branch) -> bool:
    """Whether its rows are needed: it runs, or it is a root whose rows become the prefix."""
    return branch.stage is Stage.RUNNING or branch.is_root


class DraftState:
    """Of a drafter without a pool: nothing is taken in.

    Attributes:
        inbox: rows that the drafter has yet to take in.
        columns_F: int64, which of the target's features are its own, if it has not asked for all.
    """

    def __init__(self) -> None:
        self.inbox: list[PendingRows] = []
        self.columns_F: Tensor | None = None

    # -- what a forward of the target committed ---------------------------------------------------

    def prefix(self, request: Request, span: Span, rows: Ints, features: Features) -> None:
        """Shared rows, at flat indices `rows` of the forward."""

    def prompt(self, branch: Branch, rows: Ints, features: Features) -> None:
        """A branch's prompt; its root token is drawn already."""

    def path(self, branch: Branch, rows: Ints, features: Features) -> None:
        """The root and the accepted nodes of a tree, before the branch's counts move on."""

    def learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """What came of the drafts; `paths` are the nodes that each branch took."""
        return ()

    # -- who comes and goes -----------------------------------------------------------------------

    def promote(self, root: Branch) -> None:
        """An outline's rows become those of its request's prefix."""
        prefix = root.request.prefix_owner
        self.inbox = [
            PendingRows(prefix, prefix, one.position, one.tokens, one.features)
            if one.owner == root.owner
            else one
            for one in self.inbox
        ]

    def forget(self, owners: Iterable[int]) -> None:
        """Segments whose rows are given back."""
        gone = set(owners)
        self.inbox = [one for one in self.inbox if one.owner not in gone]

    def close(self, request: Request) -> None:
        """A request is done."""

    def _features(self, features: Features, rows: Ints) -> Tensor | None:
        return features.of(rows, self.columns_F)

    def _queue(
        self,
        owner: int,
        root: int,
        position: int,
        tokens: Sequence[int],
        features_RF: Tensor | None = None,
    ) -> None:
        if tokens:
            kept = None if features_RF is None else features_RF[: len(tokens)]
            self.inbox.append(PendingRows(owner, root, position, tokens, kept))

    def _queue_branch(
        self,
        branch: Branch,
        position: int,
        tokens: Sequence[int],
        features_RF: Tensor | None = None,
    ) -> None:
        self._queue(branch.owner, branch.request.prefix_owner, position, tokens, features_RF)


class PairState(DraftState):
    """EAGLE: row j pairs the feature of token j with token j + 1. A prefix ends with a feature
    whose partner is not known yet; whoever continues there pairs it with its own first token.

    Attributes:
        last: [F] the target's feature of the last committed row of each segment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, Tensor] = {}

    def prefix(self, request: Request, span: Span, rows: Ints, features: Features) -> None:
        features_RF, owner = _given(self._features(features, rows)), span.owner
        shared = self.last.get(owner)
        if shared is not None:
            self._queue(owner, owner, span.position - 1, span.tokens[:1], shared[None])
        self._queue(owner, owner, span.position, span.tokens[1:], features_RF)
        self.last[owner] = features_RF[-1]

    def prompt(self, branch: Branch, rows: Ints, features: Features) -> None:
        shared = self.last.get(branch.request.prefix_owner)
        if shared is not None:
            self._queue_branch(branch, branch.start - 1, branch.prompt[:1], shared[None])
        following = [*branch.prompt[1:], *branch.tokens]
        self._pair(branch, branch.start, following, _given(self._features(features, rows)))

    def path(self, branch: Branch, rows: Ints, features: Features) -> None:
        first = branch.kept + 1
        following = branch.tokens[first : first + len(rows)]
        self._pair(branch, branch.length, following, _given(self._features(features, rows)))

    def _pair(
        self, branch: Branch, position: int, following: Sequence[int], features_RF: Tensor
    ) -> None:
        self.last[branch.owner] = features_RF[-1]
        if branch.stage is Stage.RUNNING:
            self._queue_branch(branch, position, following, features_RF)
        elif branch.is_root:
            self._queue_branch(branch, position, following[: len(features_RF) - 1], features_RF)

    def promote(self, root: Branch) -> None:
        super().promote(root)
        if root.owner in self.last:
            self.last[root.request.prefix_owner] = self.last.pop(root.owner)

    def forget(self, owners: Iterable[int]) -> None:
        owners = list(owners)
        super().forget(owners)
        for owner in owners:
            self.last.pop(owner, None)


class FeatureState(DraftState):
    """Every committed token with its own feature, at its own position (DFlash)."""

    def prefix(self, request: Request, span: Span, rows: Ints, features: Features) -> None:
        self._queue(
            span.owner, span.owner, span.position, span.tokens, self._features(features, rows)
        )

    def prompt(self, branch: Branch, rows: Ints, features: Features) -> None:
        if rows_needed(branch):
            self._queue_branch(
                branch, branch.start, branch.prompt.ids, self._features(features, rows)
            )

    def path(self, branch: Branch, rows: Ints, features: Features) -> None:
        if rows_needed(branch):
            tokens = branch.tokens[branch.kept : branch.kept + len(rows)]
            self._queue_branch(branch, branch.length, tokens, self._features(features, rows))


class TextState(DraftState):
    """Token ids alone, the next root included: a small language model reads the text itself.

    Attributes:
        settings: the length policy of the round; lengths: what it remembers of each branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings: GammaSettings | None = None
        self.lengths: dict[int, GammaState] = {}

    def plan_(self, branches: Sequence[Branch], settings: GammaSettings) -> list[GammaState]:
        """What the policy of this round knows of each branch."""
        self.settings = settings
        return [self.lengths.get(b.owner) or first_state(settings) for b in branches]

    def learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        side_outputs_SC, settings = result.side_outputs_SC, self.settings
        if settings is None or not side_outputs_SC.size:
            return ()
        rounds = records(side_outputs_SC[:, :-1], [len(path) - 1 for path in paths])
        drafted = side_outputs_SC[:, -1].tolist()
        for branch, one, count in zip(ran, rounds, drafted, strict=True):
            state = self.lengths.get(branch.owner) or first_state(settings)
            self.lengths[branch.owner] = next_state(settings, state, count, one.accepted, one.ema)
        return tuple(rounds)

    def prefix(self, request: Request, span: Span, rows: Ints, features: Features) -> None:
        self._queue(span.owner, span.owner, span.position, span.tokens)

    def prompt(self, branch: Branch, rows: Ints, features: Features) -> None:
        if rows_needed(branch):
            root = branch.tokens if branch.stage is Stage.RUNNING else []
            self._queue_branch(branch, branch.start, [*branch.prompt, *root])

    def path(self, branch: Branch, rows: Ints, features: Features) -> None:
        """The root itself was taken in when it was drawn."""
        if rows_needed(branch):
            running = branch.stage is Stage.RUNNING
            first = branch.kept + 1
            tokens = branch.tokens[first : first + len(rows) - 1 + running]
            self._queue_branch(branch, branch.length + 1, tokens)

    def forget(self, owners: Iterable[int]) -> None:
        owners = list(owners)
        super().forget(owners)
        for owner in owners:
            self.lengths.pop(owner, None)


def _given(features_RF: Tensor | None) -> Tensor:
    assert features_RF is not None, "this drafter's taps are the target's features"
    return features_RF
