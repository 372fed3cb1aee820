"""A drafter in a run: whom it drafts for, what it is told, and how much a round drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ops.draft.choice import ChainChooser, Chooser, TreeChooser
from ..ops.draft.costs import RoundCosts
from ..ops.draft.gamma import GammaRecord
from ..ops.kv.pool import KVCache
from ..ops.types import DraftRows, DraftSize
from .draft_state import DraftState
from .graph.drafter_spec import Drafter, most_of
from .layout import Layout
from .request import Branch, Stage
from .request_table import RequestTable
from .round import RoundResult
from .sampling import Samplers


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
    def choice(self) -> DraftSize | None:
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
            unread = sum(len(one.tokens) for one in self.memory.inbox)
            self.chooser.choose_([branch.owner for branch in active], room, unread)
        if self.kv_draft is None or self._rests(active):
            return tuple(active)
        pending = self.memory.inbox
        self.memory.inbox = []
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
        mine = result if len(own) == len(ran) else result.some(own)
        trees = [ran[at] for at in own]
        nodes = [paths[at] for at in own]
        if self.chooser is not None and trees:
            self.chooser.learn_([branch.owner for branch in trees], nodes)
        return self.memory.learn(trees, mine, nodes)

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
