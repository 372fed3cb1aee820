"""The block `drafter` for the EAGLE family: which head, and how its tree comes about."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ...ops.draft.static_tree import MC_SIM_7B_63, Node, fault, lay_out
from ...ops.sampling.settings import Draws
from ..yaml.spec import Int, Text
from .drafter_spec import Nodes, Takes, TreeDrafter, sane_nodes


class DynamicTree(TreeDrafter):
    """A dynamic token tree per branch: the nodes that the drafter believes in most."""

    takes: ClassVar[Takes] = "pairs"
    nodes: Nodes = Field(
        default=10,
        description="drafted tokens of a tree, root not counted; a map {active branches: nodes} "
        "applies the entry with the largest key that is not above the number of active branches",
    )
    levels: Int = Field(default=5, ge=1, le=64, description="drafted levels of a tree")
    top_k: Int = Field(default=4, ge=1, le=256, description="children per node while drafting")
    model: Text | None = Field(default=None, description="checkpoint of the head")

    _nodes_are_sane = field_validator("nodes", mode="before")(sane_nodes)

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.nodes

    @property
    def scratch(self) -> int:
        return self.top_k * (self.levels - 1)

    @property
    def room(self) -> tuple[int, str]:
        most = self.top_k + (self.levels - 1) * self.top_k**2
        return most, f"levels {self.levels} and top_k {self.top_k} draft at most {most}"


class Eagle3Drafter(DynamicTree):
    """An EAGLE-3 head drafts a dynamic token tree per branch."""

    kind: Literal["eagle3"]
    loader: ClassVar[str] = "...models.load.weights:load_eagle3"


class Eagle2Drafter(DynamicTree):
    """A head of EAGLE-1 or EAGLE-2 (one format) drafts a dynamic token tree per branch."""

    kind: Literal["eagle2"]
    loader: ClassVar[str] = "...models.load.weights:load_eagle"


def _tree(tree: tuple[Node, ...]) -> tuple[Node, ...]:
    wrong = fault(tree)
    if wrong is not None:
        raise PydanticCustomError("tree", "{why}", {"at": wrong[0], "why": wrong[1]})
    return tree


Rank = Annotated[Int, Field(ge=0, le=255)]
Ranks = Annotated[tuple[Rank, ...], Field(max_length=64)]


class Eagle1Drafter(TreeDrafter):
    """A head of EAGLE-1 or EAGLE-2 drafts a tree of the same shape in every round."""

    kind: Literal["eagle1"]
    takes: ClassVar[Takes] = "pairs"
    loader: ClassVar[str] = "...models.load.weights:load_eagle"
    tree: Annotated[tuple[Ranks, ...], AfterValidator(_tree)] = Field(
        default=MC_SIM_7B_63,
        min_length=1,
        max_length=1024,
        description="the nodes, each by its child ranks from the root on: [0, 2] is the third "
        "best child of the best first token",
    )
    draws: Literal["best", "sampled", "distinct"] = Field(
        default="best",
        description="children are the best tokens, or, if the target's are drawn, independent "
        "draws or draws without their earlier siblings",
    )
    model: Text | None = Field(default=None, description="checkpoint of the head")

    @model_validator(mode="after")
    def _draws_are_sane(self) -> Self:
        """Without its earlier siblings means that these are drafted too."""
        known = {(), *self.tree}
        for node in self.tree if self.draws == "distinct" else ():
            if any((*node[:-1], rank) not in known for rank in range(node[-1])):
                what = "draws: distinct needs all siblings before {node} in the tree"
                raise PydanticCustomError("draws", what, {"at": "draws", "node": str(list(node))})
        return self

    @property
    def draws_as(self) -> Draws:
        return Draws(self.draws)

    @property
    def offered(self) -> int | Mapping[int, int]:
        return len(self.tree)

    @property
    def scratch(self) -> int:
        return lay_out(self.tree).inner
