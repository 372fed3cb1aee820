"""EAGLE-2 and EAGLE-3: a head on the target's features drafts a dynamic token tree per branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ..drafter import DraftContext, Drafter, TextRows, committed_features
from ..graph.drafter_settings import DrafterSettings, Nodes, TreeSettings
from ..yaml.spec import Int, Text

if TYPE_CHECKING:
    from torch import Tensor

    from ...ops.draft.eagle import Frontier
    from ...ops.types import DraftRows, Proposal
    from ..request import Branch
    from ..round import CommittedRows


class DynamicTreeSettings(TreeSettings):
    """A dynamic token tree per branch: the nodes with the highest probability under the drafter."""

    has_model: ClassVar[bool] = True
    num_draft_tokens: Nodes = 10
    """drafted tokens of a tree, root not counted; a map {active branches: nodes} applies the entry
    with the largest key that is not above the number of active branches"""
    draft_depth: Int = Field(5, ge=1, le=64)
    """drafted levels of a tree"""
    top_k: Int = Field(4, ge=1, le=256)
    """children per node while drafting"""
    model: Text | None = None
    """checkpoint of the head"""
    with_: tuple[Literal["recycle", "suffix", "ngram"], ...] = Field(
        (), alias="with", exclude_if=lambda kinds: not kinds
    )
    """drafters without a model whose nodes compete with the head's for the places in a tree"""

    @property
    def offered(self) -> int | Mapping[int, int]:
        return min(self.most_nodes, self.largest_tree[0]) if self.chooses else super().offered

    @property
    def scratch(self) -> int:
        return self.top_k * (self.draft_depth - 1)

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        return (2, *[min(self.top_k, nodes)] * (min(levels, nodes) - 1))

    @property
    def largest_tree(self) -> tuple[int, str]:
        if self.with_:
            return super().largest_tree
        nodes = self.top_k + (self.draft_depth - 1) * self.top_k**2
        return nodes, f"draft_depth {self.draft_depth} and top_k {self.top_k} draft at most {nodes}"


class Eagle3Settings(DynamicTreeSettings):
    """An EAGLE-3 head drafts a dynamic token tree per branch."""

    kind: Literal["eagle3"]


class Eagle2Settings(DynamicTreeSettings):
    """A head of EAGLE-1 or EAGLE-2 (one format) drafts a dynamic token tree per branch."""

    kind: Literal["eagle2"]


class EagleDrafter(Drafter):
    """Grows the trees of all branches level by level, then keeps the best nodes of each.

    Row j pairs the target's feature of token j with token j + 1, at position j. A prefix ends with
    a feature whose token is unknown; each continuation pairs it with its own first token.

    Attributes:
        last: by segment, the position and the feature [F] of its last committed row."""

    settings: DynamicTreeSettings
    lookback = 1

    def __init__(self, settings: DrafterSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.last: dict[int, tuple[int, Tensor]] = {}
        self.memory = (*self.memory, self.last)

    @classmethod
    def logits(cls, model: Any, text: TextRows) -> Tensor:
        embedding = model.embed_tokens.weight
        hidden_QH = embedding.new_zeros(text.tokens_1Q.shape[1], embedding.shape[1])
        hidden_QH = hidden_QH.to(text.kv.data.dtype)
        if text.features_QF is not None:
            hidden_QH = model.fuse(text.features_QF)
        inputs = text.tokens_1Q, hidden_QH[None], text.slots_1Q, text.slots_1Q
        out_1QH = model.forward(*inputs, attention=text.attention, kv=text.kv)
        logits_QV: Tensor = model.logits(out_1QH.flatten(0, 1))
        return logits_QV

    def observe(self, rows: CommittedRows) -> None:
        features_RF = committed_features(rows, self.columns_F)
        assert features_RF is not None, "this drafter's taps are the target's features"
        last = None if rows.is_path else self.last.get(rows.prefix)
        position = rows.position
        if last is not None and last[0] == position - 1:
            self.queue(rows.owner, position - 1, rows.tokens[:1], last[1][None])
        self.queue(rows.owner, position, [*rows.tokens[1:], *rows.following], features_RF)
        self.last[rows.owner] = position + len(rows.tokens) - 1, features_RF[-1]

    def root(self, batch: DraftRows | tuple[Branch, ...]) -> Frontier | tuple[Branch, ...]:
        from ...ops.draft.eagle import first_level

        if isinstance(batch, tuple):
            return batch
        return first_level(self.model, batch, self.kv, self.settings.top_k)

    def grow(self, frontier: Frontier | tuple[Branch, ...]) -> Proposal:
        from ...ops.draft.eagle import grow_tree_

        if isinstance(frontier, tuple):
            return self.no_drafts(len(frontier))
        branches = len(frontier.tokens_SK)
        nodes = self.num_nodes(branches)
        if not nodes:
            return self.no_drafts(branches, frontier.draft_rows.work)
        chooser = self.chooser
        return grow_tree_(
            self.model,
            frontier,
            self.kv,
            nodes=nodes,
            levels=self.settings.draft_depth if chooser is None else chooser.choice.levels,
            ranked=chooser is not None,
        )


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3: the head reads features of several layers of the target."""

    Settings = Eagle3Settings
    loader = "load_eagle3"


class Eagle2Drafter(EagleDrafter):
    """EAGLE-2: the head reads the target's last hidden state."""

    Settings = Eagle2Settings
    loader = "load_eagle"
