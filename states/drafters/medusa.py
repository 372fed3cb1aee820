"""Medusa: heads on the target's last hidden state draft one level each, in one forward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ..drafter import DraftContext, Drafter, TextRows, committed_features
from ..graph.drafter_settings import DrafterSettings, Nodes, TreeSettings
from ..yaml.spec import Int, Text

if TYPE_CHECKING:
    from torch import Tensor

    from ...ops.types import Proposal
    from ..request import Branch
    from ..round import CommittedRows


class MedusaSettings(TreeSettings):
    """Medusa's heads draft the most probable tree of their tokens (arXiv 2401.10774)."""

    kind: Literal["medusa"]
    has_model: ClassVar[bool] = True
    num_draft_tokens: Nodes = 8
    """drafted tokens of a tree, or a map {active branches: nodes}"""
    draft_depth: Int | None = Field(None, ge=1, le=64)
    """drafted levels of a tree, by default one for each head"""
    model: Text | None = None
    """checkpoint of the heads"""

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        return (1,)


class MedusaDrafter(Drafter):
    """Keeps the target's last hidden state of each branch; it has no pool.

    Attributes:
        last: by segment, the feature [F] of its last committed row."""

    Settings = MedusaSettings
    settings: MedusaSettings
    loader = "load_medusa"

    def __init__(self, settings: MedusaSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.last: dict[int, Tensor] = {}
        self.memory = (*self.memory, self.last)

    @classmethod
    def completed(cls, settings: DrafterSettings, model: Any) -> DrafterSettings:
        heads = model.config.heads
        depth = min(getattr(settings, "draft_depth", None) or heads, heads)
        return settings.model_copy(update={"draft_depth": depth})

    @classmethod
    def logits(cls, model: Any, text: TextRows) -> Tensor:
        rows = text.tokens_1Q.shape[1]
        features_QF = text.features_QF
        if features_QF is None:
            features_QF = text.kv.data.new_zeros(rows, model.config.hidden_size)
        logits_QV: Tensor = model.forward(features_QF)[:, 0]
        return logits_QV

    def observe(self, rows: CommittedRows) -> None:
        features_1F = committed_features(replace(rows, rows=rows.rows[-1:]), self.columns_F)
        assert features_1F is not None, "this drafter's tap is the target's last hidden state"
        self.last[rows.owner] = features_1F[0]

    def grow(self, frontier: tuple[Branch, ...]) -> Proposal:
        nodes = self.num_nodes(len(frontier))
        if not nodes:
            return self.no_drafts(len(frontier))
        import torch

        from ...ops.draft.dflash import tree
        from ...ops.types import DraftWork

        hidden_SF = torch.stack([self.last_of(branch) for branch in frontier])
        log_probs_SDV = self.model.forward(hidden_SF).log_softmax(-1)
        drafted = tree(log_probs_SDV[:, : self.settings.draft_depth], nodes)
        return replace(drafted, work=DraftWork(forwards=1, rows=len(frontier)))

    def last_of(self, branch: Branch) -> Tensor:
        """Of its last row, which is one of its prefix where it has no prompt of its own."""
        last_F = self.last.get(branch.owner)
        return self.last[branch.request.prefix_owner] if last_F is None else last_F
