"""N-grams: drafts are what followed the last tokens of a branch before; no model, no forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ...ops.draft.ngram import HostTree, SuffixIndex, lookup_tree
from ..drafter import DraftContext, Drafter
from ..graph.drafter_settings import Nodes, TreeSettings
from ..yaml.spec import Int

if TYPE_CHECKING:
    from ..request import Branch


class NgramSettings(TreeSettings):
    """Drafts are what followed the last tokens before: no model, no forward."""

    kind: Literal["ngram"]
    num_draft_tokens: Nodes = 6
    """drafted tokens of a tree, or {active branches: nodes}"""
    draft_depth: Int = Field(6, ge=1, le=256)
    """drafted levels of a tree"""
    longest: Int = Field(3, ge=1, le=32)
    """most context tokens that must match"""
    width: Int = Field(2, ge=1, le=64)
    """continuations side by side; 1 drafts a chain"""

    @model_validator(mode="before")
    @classmethod
    def _one_method(cls, values: Any) -> Any:
        """The former key `method` is read while it names the only method."""
        if not isinstance(values, dict) or "method" not in values:
            return values
        if values["method"] != "lookup":
            what = "must be lookup, the only method; other drafters: recycle, suffix"
            raise PydanticCustomError("method", what, {"at": "method"})
        return {key: value for key, value in values.items() if key != "method"}


class NgramDrafter(Drafter):
    """Prompt lookup: drafts from the committed tokens of a branch (`indices`)."""

    Settings = NgramSettings
    settings: NgramSettings

    def __init__(self, settings: NgramSettings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.indices: dict[int, SuffixIndex] = {}
        self.memory = (*self.memory, self.indices)

    def tree_(self, branch: Branch, nodes: int) -> HostTree:
        index = self.indices.setdefault(branch.owner, SuffixIndex(self.settings.longest))
        index.append_(branch.context(len(index.ids)))
        return lookup_tree(
            index,
            nodes=nodes,
            levels=self.settings.draft_depth,
            matches=self.settings.width,
            stop_ids=branch.request.stop_ids,
        )
