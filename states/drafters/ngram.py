"""N-grams: drafts are what followed the last tokens of a branch before; no model, no forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...ops.draft.ngram import CountTable, HostTree, SuffixIndex, count_tree, lookup_tree
from ..drafter import DraftContext, Drafter
from ..graph.drafter_settings import Nodes, TreeSettings
from ..yaml.spec import Int

if TYPE_CHECKING:
    from ...ops.draft.gamma import GammaRecord
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
    """Drafts from committed tokens: those of a branch (`indices`), or their counts. tables: by
    request, of which a branch has its own table over a read-only one of the prompt, or all have
    one, by the scope; of the session under ()."""

    Settings = NgramSettings
    settings: NgramSettings

    def __init__(self, settings: NgramSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.indices: dict[int, SuffixIndex] = {}
        table = partial(CountTable, settings.longest + 1, width=settings.width)
        self.tables: defaultdict[tuple[str | int, ...], CountTable] = defaultdict(table)
        self._counted: dict[int, int] = {}  # tokens of its context that a branch has counted
        self._fillers: dict[int, list[Sequence[int]]] = {}
        self._open: set[int] = set()

    def tree_(self, branch: Branch, nodes: int) -> HostTree:
        draft = self.lookup_ if self.settings.method == "lookup" else self.count_
        return draft(branch, nodes)

    def lookup_(self, branch: Branch, nodes: int) -> HostTree:
        """Prompt lookup: what followed the last tokens of the branch before."""
        index = self.indices.setdefault(branch.owner, SuffixIndex(self.settings.longest))
        index.append_(branch.context(len(index.ids)))
        return lookup_tree(
            index,
            nodes=nodes,
            levels=self.settings.draft_depth,
            matches=self.settings.width,
            stop_ids=branch.request.stop_ids,
        )

    def count_(self, branch: Branch, nodes: int) -> HostTree:
        """NASD: what mostly followed, by the counts of the settings' scope."""
        tables = self.tables_(branch)
        start = self._counted.get(branch.owner, len(branch.request.context))
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
            stop_ids=branch.request.stop_ids,
        )

    def tables_(self, branch: Branch) -> list[CountTable]:
        """The tables a branch drafts from; the last one is the one that it adds to."""
        request = branch.request
        shared = self.tables[() if self.settings.scope == "session" else (request.key,)]
        if request.prefix_owner not in self._open:
            self._open.add(request.prefix_owner)
            shared.learn_(request.context)
        is_own = self.settings.scope == "branch"
        return [shared, self.tables[request.key, branch.owner]] if is_own else [shared]

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """Also keep the target's other likely tokens at each accepted position."""
        if self.settings.method == "nasd" and self.settings.filler_top_k > 1:
            nodes = result.tokens_ST.shape[1]
            sides_SC = result.side_outputs_SC[:, -2 * self.settings.filler_top_k * nodes :]
            for branch, row, path in zip(branches, sides_SC, paths, strict=True):
                self._fillers[branch.owner] = row.reshape(nodes, 2, -1)[list(path), 0].tolist()
        return super().learn(branches, result, paths)

    def close(self, request: Request) -> None:
        self._open.discard(request.prefix_owner)
        for key in [key for key in self.tables if key[:1] == (request.key,)]:
            del self.tables[key]
        for branch in request.all_branches():
            for memory in (self.indices, self._counted, self._fillers):
                memory.pop(branch.owner, None)
