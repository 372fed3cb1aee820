"""One drafter's part of a run: the branches that it drafts for, its memory, its pool."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...ops.kv.pool import KVCache
from ...ops.types import DraftRows
from ..layout.layout import Layout
from .branch import Branch, Stage
from .draft_state import DraftState
from .request_table import RequestTable
from .samplers import Samplers


@dataclass(eq=False, slots=True)
class Drafting:
    """What the ops `branch.intake_` and `draft.*` of one drafter know of the run.

    Attributes:
        memory: what it remembers between rounds. kv_draft: its pool, None for drafters without one.
        outlines: whether it drafts for outlines only (True), for everything else only (False), or
            for everybody (None).
    """

    table: RequestTable
    layout: Layout
    samplers: Samplers
    memory: DraftState
    kv_draft: KVCache | None
    outlines: bool | None = None

    @property
    def device(self) -> torch.device:
        return self.layout.device

    def serves(self, branch: Branch) -> bool:
        return self.outlines in (None, branch.is_root)

    def reads(self, branch: Branch) -> bool:
        """Whether it takes in a branch's rows: an outline's become those of everybody."""
        return branch.is_root or (branch.stage is Stage.RUNNING and self.serves(branch))

    @property
    def active(self) -> list[Branch]:
        """The branches that run and are drafted for, in the order of its [S, ...] tensors."""
        return [branch for branch in self.table.active if self.serves(branch)]

    def intake_(self, attention: str = "auto") -> DraftRows | tuple[Branch, ...]:
        """Hand the drafter everything committed since its last forward."""
        active = self.active
        if self.kv_draft is None:
            return tuple(active)
        pending, self.memory.inbox = self.memory.inbox, []
        tips = [(branch.owner, branch.length, branch.tokens[-1]) for branch in active]
        rows = self.layout.place_draft_(self.kv_draft, pending, tips)
        return replace(rows, sampler=self.samplers.of(active), attention=attention)


@dataclass(frozen=True, slots=True)
class OutlineSide:
    """The second drafter of a graph with `skeleton.drafter`; the names are those of the blackboard
    keys that it has in their place."""

    drafter: Any
    kv_draft: KVCache | None
    drafting: Drafting
