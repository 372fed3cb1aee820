"""Token Recycling: drafts are the target's candidates of earlier rows; no model, no forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ...ops.draft.ngram import Gram, HostTree
from ...ops.draft.recycle import CONTEXT, LEAST, RecycleTable, recycled_tree
from ..drafter import DraftContext, Drafter, remembered_
from ..graph.drafter_settings import Nodes, TreeSettings
from ..yaml.spec import Int

if TYPE_CHECKING:
    from ...ops.draft.gamma import GammaRecord
    from ..request import Branch, Request
    from ..round import RoundResult


class RecycleSettings(TreeSettings):
    """Drafts are what the target found likely after the same tokens before: no model."""

    kind: Literal["recycle"]
    num_draft_tokens: Nodes = 16
    """drafted tokens of a tree, or {active branches: nodes}"""
    draft_depth: Int = Field(6, ge=1, le=256)
    """drafted levels of a tree"""
    filler_top_k: Int = Field(8, ge=2, le=64)
    """the target's best tokens that are kept for each context"""
    most_contexts: Int = Field(100_000, ge=16, le=1 << 24)
    """contexts of one or two tokens that are kept; the oldest are forgotten"""


class RecycleDrafter(Drafter):
    """Its tables are shared by all requests of an engine with the same cache salt.

    Attributes:
        tables: by cache salt."""

    Settings = RecycleSettings
    learns = True
    settings: RecycleSettings

    def __init__(self, settings: RecycleSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.tables: dict[str, RecycleTable] = {}
        self._read: set[int] = set()  # prefixes whose text the table has

    def table_(self, request: Request) -> RecycleTable:
        make = partial(RecycleTable, self.settings.most_contexts, self.settings.filler_top_k)
        return remembered_(self.tables, request.cache_salt, make)

    def tree_(self, branch: Branch, nodes: int) -> HostTree:
        request = branch.request
        table = self.table_(request)
        if request.prefix_owner not in self._read:
            self._read.add(request.prefix_owner)
            table.read_(request.context)
        return recycled_tree(
            table,
            tuple(branch.context(branch.size - CONTEXT)),
            nodes=nodes,
            levels=self.settings.draft_depth,
            stop_ids=request.stop_ids,
        )

    def learn(
        self, branches: Sequence[Branch], result: RoundResult, paths: Sequence[Sequence[int]]
    ) -> tuple[GammaRecord, ...]:
        """Keep the target's candidates after all nodes, and guess those after its own token."""
        import numpy as np

        trees = zip(branches, result.tokens_ST, result.parents_ST, strict=True)
        width = self.settings.filler_top_k
        for tree, (branch, tokens_T, parents_T) in enumerate(trees):
            if not result.side_outputs_SC.size:
                continue
            end = branch.size - branch.emitted[-1]  # of the text in front of the round
            context: Gram = tuple(branch.context(end - CONTEXT)[: min(end, CONTEXT)])
            table = self.table_(branch.request)
            path = paths[tree]
            tokens = tokens_T.tolist()
            parents = parents_T.tolist()
            contexts = [context]
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                contexts.append((*contexts[parent], token)[-CONTEXT:])
            sides_C = result.side_outputs_SC[tree, -2 * width * len(tokens) :]
            sides_T2K = sides_C.reshape(len(tokens), 2, width)
            scores_TK = np.ascontiguousarray(sides_T2K[:, 1]).view(np.float64)
            sides = zip(sides_T2K[:, 0].tolist(), np.exp(scores_TK).tolist(), strict=True)
            rows = [
                {token: chance for token, chance in zip(*side, strict=True) if chance > 0}
                for side in sides
            ]
            for node, token in enumerate(tokens):
                if token >= 0:
                    table.put_(contexts[node], rows[node], accepted=node in path)
            last = path[-1]
            others = [  # drafts in the place of the target's own token
                (rows[last].get(tokens[node], LEAST), rows[node])
                for node in range(1, len(tokens))
                if parents[node] == last and tokens[node] >= 0
            ]
            after = (*contexts[last], int(result.bonus_S[tree]))
            table.guess_(after[-CONTEXT:], others)
        return super().learn(branches, result, paths)

    def close(self, request: Request) -> None:
        self._read.discard(request.prefix_owner)
