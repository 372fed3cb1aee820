"""N-grams: drafts are what followed the last tokens of a branch before; no model, no forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..drafter import DraftContext, Drafter
from ..graph.drafter_settings import Nodes, TreeSettings
from ..yaml.spec import Int

if TYPE_CHECKING:
    from ...ops.draft.gamma import GammaRecord
    from ...ops.draft.ngram import SuffixIndex
    from ...ops.draft.proposals import HostTree
    from ...ops.types import Proposal
    from ..request import Branch, Request
    from ..round import RoundResult


class NgramSettings(TreeSettings):
    """Drafts are what followed the last tokens before: no model, no forward."""

    kind: Literal["ngram"]
    method: Literal["lookup", "nasd"] = "lookup"
    """prompt lookup, or count tables filled as the target speaks"""
    num_draft_tokens: Nodes = 6
    """drafted tokens of a tree, or {active branches: nodes}"""
    draft_depth: Int = Field(6, ge=1, le=256)
    """drafted levels of a tree"""
    longest: Int = Field(3, ge=1, le=32)
    """most context tokens that must match"""
    width: Int = Field(2, ge=1, le=64)
    """continuations side by side; 1 drafts a chain"""
    scope: Literal["branch", "request", "session"] = "request"
    """whose text NASD counts together"""
    filler_top_k: Int = Field(1, ge=1, le=64)
    """NASD also counts the target's best tokens, if above 1"""


class NgramDrafter(Drafter):
    """Drafts from committed tokens: those of a branch (`indices`), or their counts (`tables`)."""

    Settings = NgramSettings
    settings: NgramSettings

    def __init__(self, settings: NgramSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        from ...ops.draft.ngram import CountTables, Scope

        self.indices: dict[int, SuffixIndex] = {}
        self.tables = CountTables(Scope(settings.scope), settings.longest + 1, settings.width)
        self._counted: dict[int, int] = {}  # tokens of its context that a branch has counted
        self._fillers: dict[int, list[Sequence[int]]] = {}
        self._open: set[int] = set()

    def grow(self, frontier: tuple[Branch, ...]) -> Proposal:
        from ...ops.draft.proposals import pack

        nodes = self.num_nodes(len(frontier))
        if not nodes:
            return self.no_drafts(len(frontier))
        draft = self.lookup_ if self.settings.method == "lookup" else self.count_
        return pack([draft(branch, nodes) for branch in frontier], self.context.layout.device)

    def lookup_(self, branch: Branch, nodes: int) -> HostTree:
        """Prompt lookup: what followed the last tokens of the branch before."""
        from ...ops.draft.ngram import SuffixIndex, lookup_tree

        index = self.indices.setdefault(branch.owner, SuffixIndex(self.settings.longest))
        index.append_(branch.context(len(index)))
        return lookup_tree(
            index,
            nodes=nodes,
            levels=self.settings.draft_depth,
            matches=self.settings.width,
            stop_ids=branch.request.stop_ids,
        )

    def count_(self, branch: Branch, nodes: int) -> HostTree:
        """NASD: what mostly followed, by the counts of the settings' scope."""
        from ...ops.draft.ngram import count_tree

        request = branch.request
        if request.prefix_owner not in self._open:
            self._open.add(request.prefix_owner)
            self.tables.open_(request.key, request.context)
        tables = self.tables.tables_(request.key, branch.owner)
        start = self._counted.get(branch.owner, len(request.context))
        fillers = self._fillers.pop(branch.owner, [])
        missing = branch.size - start - len(fillers)  # a root token was drawn without any
        first = max(start - self.settings.longest, 0)  # contexts of what follows
        padded = [*[()] * missing, *fillers] if fillers else ()
        tables[-1].learn_(branch.context(first), start - first, padded)
        self._counted[branch.owner] = branch.size
        return count_tree(
            tables,
            branch.context(branch.size - self.settings.longest),
            nodes=nodes,
            levels=self.settings.draft_depth,
            width=self.settings.width,
            stop_ids=request.stop_ids,
        )

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """Also keep the target's other likely tokens at each accepted position."""
        if self.settings.method == "nasd" and result.side_outputs_SC.size:
            nodes = result.tokens_ST.shape[1]
            for branch, row, path in zip(branches, result.side_outputs_SC, paths, strict=True):
                self._fillers[branch.owner] = row.reshape(nodes, -1)[list(path)].tolist()
        return super().learn(branches, result, paths)

    def close(self, request: Request) -> None:
        self._open.discard(request.prefix_owner)
        self.tables.close_(request.key)
        for branch in request.all_branches():
            for memory in (self.indices, self._counted, self._fillers):
                memory.pop(branch.owner, None)
