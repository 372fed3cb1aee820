"""One drafter's part of a run: whom it drafts for, and what it remembers between rounds.

What the target committed reaches the drafter at its next forward; how tokens and the target's
features are paired on the way is the drafter's own, one class for each kind of `takes`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import nan

import torch
from torch import Tensor

from ..ops.draft.gamma import (
    GammaRecord,
    GammaState,
    Length,
    first_state,
    next_state,
    plan,
    unpacked,
)
from ..ops.draft.gamma_settings import GammaSettings
from ..ops.kv.slots import Ints
from ..ops.types import DraftSize
from .layout import PendingRows
from .request import Branch, Request, Stage
from .round import RoundResult


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of one segment that a forward of the target committed, side by side.

    owner: the segment; prefix: the one that it goes on from, or itself. position: of the first row.
    tokens: of the rows; following: what stands behind them and is known, but has no row yet.
    rows: flat indices in the forward. features_QF: the target's features of the whole forward, None
        if nobody asked for any.
    is_path: the root and the accepted nodes of a tree, not a part of a prompt; its first token was
        `following` before.
    """

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    following: Sequence[int]
    rows: Ints
    features_QF: Tensor | None
    is_path: bool = False

    @classmethod
    def of_branch(
        cls,
        branch: Branch,
        position: int,
        tokens: Sequence[int],
        rows: Ints,
        features_QF: Tensor | None,
        is_path: bool = False,
    ) -> "CommittedRows":
        """A branch's rows, its counts having moved on; nothing follows one that has ended."""
        following = branch.pending if branch.stage is Stage.RUNNING else []
        owner = branch.owner
        prefix = branch.request.prefix_owner
        if branch.reads:  # it goes on from the longest part
            prefix = max(branch.reads, key=lambda one: one.start + one.own).owner
        return cls(owner, prefix, position, tokens, following, rows, features_QF, is_path)

    def features(self, columns_F: Tensor | None = None) -> Tensor | None:
        """[R, F] of these rows, all columns of them or some."""
        if self.features_QF is None:
            return None
        index = torch.tensor(self.rows, dtype=torch.int64, device=self.features_QF.device)
        features_RF = self.features_QF.index_select(0, index)
        return features_RF if columns_F is None else features_RF.index_select(1, columns_F)


class DraftState:
    """Of a drafter without a pool: nothing is taken in.

    Attributes:
        inbox: rows that the drafter has yet to take in.
        columns_F: int64, which of the target's features are its own, if it has not asked for all.
        back: how many tokens after a row decide on it beside those before; see `PrefixCache`.
    """

    back = 0

    def __init__(self) -> None:
        self.inbox: list[PendingRows] = []
        self.columns_F: Tensor | None = None

    # -- what a forward of the target committed ---------------------------------------------------

    def take_in(self, part: CommittedRows) -> None:
        """Rows of a prefix, of a branch that runs, or of an outline."""

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
            replace(one, owner=prefix) if one.owner == root.owner else one for one in self.inbox
        ]

    def cut(self, owner: int, length: int) -> None:
        """A segment ends at position `length` from now on, as if nothing behind it was known."""
        self.inbox = [one if one.owner != owner else one.before(length) for one in self.inbox]

    def forget(self, owners: Sequence[int]) -> None:
        """Segments whose rows are given back."""
        self.inbox = [one for one in self.inbox if one.owner not in owners]

    def close(self, request: Request) -> None:
        """A request is done."""

    def _queue(
        self,
        part: CommittedRows,
        position: int,
        tokens: Sequence[int],
        features_RF: Tensor | None = None,
    ) -> None:
        if tokens:
            own_RF = None if features_RF is None else features_RF[: len(tokens)]
            self.inbox.append(PendingRows(part.owner, position, tokens, own_RF))


class PairState(DraftState):
    """EAGLE: row j pairs the feature of token j with token j + 1. A prefix ends with a feature
    whose partner is not known yet; whoever continues there pairs it with its own first token.

    Attributes:
        last: of the last committed row of each segment: its position, and the target's feature [F].
    """

    back = 1

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, tuple[int, Tensor]] = {}

    def take_in(self, part: CommittedRows) -> None:
        features_RF = part.features(self.columns_F)
        assert features_RF is not None, "this drafter's taps are the target's features"
        before = None if part.is_path else self.last.get(part.prefix)
        if before is not None and before[0] == part.position - 1:
            self._queue(part, part.position - 1, part.tokens[:1], before[1][None])
        self._queue(part, part.position, [*part.tokens[1:], *part.following], features_RF)
        self.last[part.owner] = part.position + len(part.tokens) - 1, features_RF[-1]

    def promote(self, root: Branch) -> None:
        super().promote(root)
        if root.owner in self.last:
            self.last[root.request.prefix_owner] = self.last.pop(root.owner)

    def cut(self, owner: int, length: int) -> None:
        super().cut(owner, length)
        self.last.pop(owner, None)

    def forget(self, owners: Sequence[int]) -> None:
        super().forget(owners)
        for owner in owners:
            self.last.pop(owner, None)


class FeatureState(DraftState):
    """Every committed token with its own feature, at its own position (DFlash)."""

    def take_in(self, part: CommittedRows) -> None:
        self._queue(part, part.position, part.tokens, part.features(self.columns_F))


class TextState(DraftState):
    """Token ids alone, the next root included: a small language model reads the text itself.

    Attributes:
        settings: the length policy of the round; planned: the lengths that it gave.
        lengths: what it remembers of each branch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings: GammaSettings | None = None
        self.planned: list[Length] = []
        self.lengths: dict[int, GammaState] = {}

    def plan_(
        self,
        branches: Sequence[Branch],
        settings: GammaSettings,
        vocabulary: int,
        choice: DraftSize | None = None,
    ) -> tuple[int, ...]:
        """How many drafts each branch gets in this round; choice: if somebody else says it."""
        self.settings = settings
        if choice is not None:
            self.planned = [Length(nan, nan, one, nan, one, one) for one in choice.lengths]
            return choice.lengths
        self.planned = [
            plan(settings, self._state(one), vocabulary, one.budget - len(one.tokens))
            for one in branches
        ]
        return tuple(one.gamma_eff for one in self.planned)

    def _state(self, branch: Branch) -> GammaState:
        assert self.settings is not None
        return self.lengths.get(branch.owner) or first_state(self.settings)

    def learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        settings = self.settings
        rounds = []
        if settings is None or not ran:
            return ()
        width = max(1, *(one.gamma_eff for one in self.planned))
        seen = unpacked(result.side_outputs_SC, width)
        for branch, one, laws, path in zip(ran, self.planned, seen, paths, strict=True):
            accepted = len(path) - 1
            state = next_state(settings, self._state(branch), one, accepted, laws)
            self.lengths[branch.owner] = state
            rounds.append(GammaRecord(**asdict(one), accepted=accepted))
        return tuple(rounds)

    def take_in(self, part: CommittedRows) -> None:
        first = 1 if part.is_path else 0  # the root was taken in when it was drawn
        self._queue(part, part.position + first, [*part.tokens[first:], *part.following])

    def forget(self, owners: Sequence[int]) -> None:
        super().forget(owners)
        for owner in owners:
            self.lengths.pop(owner, None)
