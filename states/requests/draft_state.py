"""One drafter's part of a run: whom it drafts for, and what it remembers between rounds.

What the target committed reaches the drafter at its next forward; how tokens and the target's
features are paired on the way is the drafter's own, one class for each kind of `takes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...ops.draft.choice import ChainChooser, Chooser, RoundCosts, TreeChooser
from ...ops.draft.gamma import GammaRecord
from ...ops.drafted import Choice
from ...ops.kv.pool import KVCache
from ...ops.kv.slots import Ints
from ...ops.types import DraftRows
from ..graph.drafter_spec import Drafter, most_of
from ..layout.layout import Layout, PendingRows
from .branch import Branch, Request, Stage
from .request_table import RequestTable
from .rounds import RoundResult
from .samplers import Samplers


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
        owner, prefix = branch.owner, branch.request.prefix_owner
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
        last: [F] the target's feature of the last committed row of each segment.
    """

    back = 1

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[int, Tensor] = {}

    def take_in(self, part: CommittedRows) -> None:
        features_RF = part.features(self.columns_F)
        assert features_RF is not None, "this drafter's taps are the target's features"
        shared_F = None if part.is_path else self.last.get(part.prefix)
        if shared_F is not None:
            self._queue(part, part.position - 1, part.tokens[:1], shared_F[None])
        self._queue(part, part.position, [*part.tokens[1:], *part.following], features_RF)
        self.last[part.owner] = features_RF[-1]

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


@dataclass(eq=False, slots=True)
class Drafting:
    """What the ops `branch.intake_` and `draft.*` of one drafter know of the run.

    Attributes:
        memory: what it remembers between rounds. kv_draft: its pool, None for drafters without one.
        outlines: whether it drafts for outlines only (True), for everything else only (False), or
            for everybody (None).
        chooser: says how much a round drafts, if the graph does not.
    """

    table: RequestTable
    layout: Layout
    samplers: Samplers
    memory: DraftState
    kv_draft: KVCache | None
    outlines: bool | None = None
    chooser: Chooser | None = None

    @property
    def choice(self) -> Choice | None:
        """What was chosen for this round, if the graph does not say what to draft."""
        return None if self.chooser is None else self.chooser.choice

    def serves(self, branch: Branch) -> bool:
        return self.outlines in (None, branch.is_root)

    def reads(self, branch: Branch) -> bool:
        """Whether it takes in a branch's rows: an outline's become those of everybody, and a
        finished part's may be read by the branch that combines it."""
        goes_on = branch.stage is Stage.RUNNING or branch.stays
        return branch.is_root or (goes_on and self.serves(branch))

    @property
    def active(self) -> list[Branch]:
        """The branches that run and are drafted for, in the order of its [S, ...] tensors."""
        return [branch for branch in self.table.active if self.serves(branch)]

    def intake_(self, attention: str = "auto") -> DraftRows | tuple[Branch, ...]:
        """Hand the drafter everything committed since its last forward.

        Where a round drafts nothing, the branches alone: a forward that nobody asks anything of can
        wait, unless a prompt is in it, which others may go on from.
        """
        active = self.active
        if self.chooser is not None and active:
            room = [branch.budget - len(branch.tokens) - 1 for branch in active]
            self.chooser.choose_([branch.owner for branch in active], room)
        if self.kv_draft is None or self._rests(active):
            return tuple(active)
        pending, self.memory.inbox = self.memory.inbox, []
        tips = [(branch.owner, branch.length, branch.tokens[-1]) for branch in active]
        rows = self.layout.place_draft_(self.kv_draft, pending, tips)
        sampler = self.samplers.of(active)
        return replace(rows, sampler=sampler, attention=attention, choice=self.choice)

    def _rests(self, active: Sequence[Branch]) -> bool:
        if self.choice is None or self.choice.size or not active:
            return False
        begins = {one.owner: one.start + len(one.prompt) for one in active}
        inbox = self.memory.inbox
        return all(one.owner in begins and one.position >= begins[one.owner] for one in inbox)

    def learn(
        self, ran: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """Tell the drafter, and whoever chooses, of its own trees in a round."""
        own = [at for at, branch in enumerate(ran) if self.serves(branch)]
        trees, nodes = [ran[at] for at in own], [paths[at] for at in own]
        if self.chooser is not None and trees:
            self.chooser.learn_([branch.owner for branch in trees], nodes)
        return self.memory.learn(trees, result.some(own), nodes)

    def forget(self, owners: Sequence[int]) -> None:
        """Segments whose rows are given back."""
        self.memory.forget(owners)
        if self.chooser is not None:
            self.chooser.forget_(owners)


def chooser_of(block: Drafter, costs: RoundCosts | None) -> Chooser | None:
    """Who says how much a round drafts, if the graph leaves it open."""
    if not block.chooses or costs is None:
        return None
    if block.lengths is not None:
        return ChainChooser(costs, block.lengths.most)
    levels: int = getattr(block, "levels", 1)
    return TreeChooser(costs, most_of(block.offered), levels, block.forward_rows)


@dataclass(frozen=True, slots=True)
class OutlineSide:
    """The second drafter of a graph with `skeleton.drafter`; the names are those of the blackboard
    keys that it has in their place."""

    drafter: Any
    kv_draft: KVCache | None
    drafting: Drafting
