"""EAGLE-1: a head on the target's features drafts a tree of the same shape in every round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from specsot.states.drafter import DraftContext
from specsot.states.drafters.eagle import Eagle2Drafter
from specsot.states.graph.drafter_settings import TreeSettings
from specsot.states.yaml.spec import Int, Text

from .static_tree import MC_SIM_7B_63, Node, fault, lay_out

if TYPE_CHECKING:
    from specsot.ops.draft.eagle import Frontier
    from specsot.ops.types import DraftRows, Proposal
    from specsot.states.request import Branch


def _tree(tree: tuple[Node, ...]) -> tuple[Node, ...]:
    wrong = fault(tree)
    if wrong is not None:
        raise PydanticCustomError("tree", "{why}", {"at": wrong[0], "why": wrong[1]})
    return tree


Rank = Annotated[Int, Field(ge=0, le=255)]
Ranks = Annotated[tuple[Rank, ...], Field(max_length=64)]


class Eagle1Settings(TreeSettings):
    """A head of EAGLE-1 or EAGLE-2 drafts a tree of the same shape in every round."""

    kind: Literal["eagle1"]
    has_model: ClassVar[bool] = True
    checkpoint: ClassVar[str] = "eagle2"
    tree: Annotated[tuple[Ranks, ...], AfterValidator(_tree)] = Field(
        MC_SIM_7B_63, min_length=1, max_length=1024
    )
    """the nodes, each by its child ranks from the root on: [0, 2] is the third best child of the
    best first token"""
    draws: Literal["best", "sampled", "distinct"] = "best"
    """children are the best tokens, or, if the target's are drawn, independent draws or draws
    without their earlier siblings"""
    model: Text | None = None
    """checkpoint of the head"""

    @model_validator(mode="after")
    def _draws_are_valid(self) -> Self:
        """Draws without earlier siblings need these siblings in the tree."""
        nodes = {(), *self.tree}
        for node in self.tree if self.draws == "distinct" else ():
            if any((*node[:-1], rank) not in nodes for rank in range(node[-1])):
                what = "draws: distinct needs all siblings before {node} in the tree"
                raise PydanticCustomError("draws", what, {"at": "draws", "node": str(list(node))})
        return self

    @property
    def offered(self) -> int | Mapping[int, int]:
        return len(self.tree)

    @property
    def scratch(self) -> int:
        return lay_out(self.tree).inner


class Eagle1Drafter(Eagle2Drafter):
    """Drafts the nodes of a fixed tree; only nodes with children take a forward."""

    Settings = Eagle1Settings
    settings: Eagle1Settings

    def __init__(self, settings: Eagle1Settings, context: DraftContext) -> None:
        super().__init__(settings, context)
        self.plan = lay_out(settings.tree)

    def root(self, batch: DraftRows | tuple[Branch, ...]) -> Frontier:
        from specsot.ops.draft.eagle import first_level

        assert not isinstance(batch, tuple), "this kind drafts in every round"
        return first_level(self.model, batch, self.kv, self.plan.levels[0].breadth)

    def grow(self, frontier: Frontier) -> Proposal:
        from .draft import grow_tree_

        draws = self.settings.draws
        accept = self.context.accept
        return grow_tree_(self.model, frontier, self.kv, plan=self.plan, draws=draws, accept=accept)
