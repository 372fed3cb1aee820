"""DFlash: a model fills a block of masks per branch in one forward; a chain or a tree of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ...ops.sampling.settings import Draws
from ..drafter import Drafter, TextRows, committed_features
from ..graph.drafter_settings import DrafterSettings, Nodes, TreeSettings
from ..yaml.spec import Int, Text

if TYPE_CHECKING:
    from torch import Tensor

    from ...ops.kv.pool import KVCache
    from ...ops.types import DraftRows, Proposal
    from ..request import Branch
    from ..round import CommittedRows


class DFlashSettings(TreeSettings):
    """A DFlash model fills a block of masks per branch in one forward (arXiv 2602.06036)."""

    kind: Literal["dflash"]
    has_model: ClassVar[bool] = True
    block_size: Int | None = Field(None, ge=2, le=1024)
    """rows of a block, with its root token; by default those of the checkpoint"""
    grow: Literal["chain", "ddtree"] = "chain"
    """one path through the block, or its best tree (DDTree)"""
    draws: Literal["best", "sampled"] = "best"
    """tokens of a chain: the best, as published, or drawn, if the target's are; a DDTree is made of
    the best"""
    num_draft_tokens: Nodes = 16
    """drafted tokens of a DDTree, or a map {active branches: nodes}; a chain has block_size - 1"""
    model: Text | None = None
    """checkpoint of the drafter"""

    @property
    def rows(self) -> int:
        return self.block_size or 8  # in the checks of a graph, before its checkpoint is known

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.rows - 1 if self.is_chain else super().offered

    @property
    def chooses(self) -> bool:
        return not self.is_chain and super().chooses

    @property
    def draft_depth(self) -> int:
        """Drafted levels of a tree."""
        return self.rows - 1

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        return (self.rows,)

    @property
    def is_chain(self) -> bool:
        return self.grow == "chain"

    @property
    def draws_as(self) -> Draws:
        return Draws(self.draws) if self.is_chain else Draws.BEST

    @property
    def scratch(self) -> int:
        return self.rows


class DFlashDrafter(Drafter):
    """Keeps every committed token's own feature as context; drafts in one block forward."""

    Settings = DFlashSettings
    settings: DFlashSettings
    loader = "load_dflash"

    @classmethod
    def completed(cls, settings: DrafterSettings, model: Any) -> DrafterSettings:
        if getattr(settings, "block_size", None) is not None:
            return settings
        return settings.model_copy(update={"block_size": model.block_size})

    @classmethod
    def logits(cls, model: Any, text: TextRows) -> Tensor:
        slots_1Q = text.slots_1Q
        out_1QH = model.forward(text.tokens_1Q, slots_1Q, slots_1Q, text.attention, kv=text.kv)
        logits_QV: Tensor = model.logits(out_1QH.flatten(0, 1))
        return logits_QV

    def write_rows_(
        self, tokens_1Q: Tensor, rows: int, features_QF: Tensor | None, kv: KVCache
    ) -> None:
        import torch

        steps_Q = torch.arange(rows, device=tokens_1Q.device)
        self.model.write_context_(self.model.fuse(features_QF), steps_Q, steps_Q, kv)

    def observe(self, rows: CommittedRows) -> None:
        self.queue(rows.owner, rows.position, rows.tokens, committed_features(rows, self.columns_F))

    def root(self, batch: DraftRows | tuple[Branch, ...]) -> DraftRows | tuple[Branch, ...]:
        if not isinstance(batch, tuple):
            positions_N = batch.rows.positions_BQ.view(-1)[batch.index_N]
            slots_N = batch.rows.slots_BQ.view(-1)[batch.index_N]
            context_NH = self.model.fuse(batch.features_NF)
            self.model.write_context_(context_NH, positions_N, slots_N, self.kv)
        return batch

    def grow(self, frontier: DraftRows | tuple[Branch, ...]) -> Proposal:
        from ...ops.draft.dflash import draft_chain_, draft_tree_

        if isinstance(frontier, tuple):
            return self.no_drafts(len(frontier))
        branches = len(frontier.root_S)
        nodes = self.num_nodes(branches)
        size = self.settings.rows
        if not nodes:
            return self.no_drafts(branches)
        if self.settings.is_chain:
            rule = {"draws": self.settings.draws, "accept": self.context.accept}
            return draft_chain_(self.model, frontier, self.kv, size=size, **rule)
        return draft_tree_(self.model, frontier, self.kv, size=size, nodes=nodes)
