"""The block `drafter` of a graph: one model per kind."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...ops.draft.gamma_settings import GammaPolicy, GammaSettings
from ...ops.draft.static_tree import MC_SIM_7B_63, Node, fault, lay_out
from ...ops.registry import RegistryError
from ...ops.sampling.settings import Draws
from ..yaml.spec import Count, Int, Text
from .drafter_spec import ChoosingDrafter, Drafter, Nodes, Takes, TreeDrafter
from .plugins import installed_drafter


class NoDrafter(Drafter):
    """Plain decoding: one token per branch and round. The baseline, through the same machine."""

    kind: Literal["none"]

    drafts: ClassVar[bool] = False


class DynamicTree(TreeDrafter):
    """A dynamic token tree per branch: the nodes that the drafter believes in most."""

    takes: ClassVar[Takes] = "pairs"
    nodes: Nodes = Field(
        10,
        description="drafted tokens of a tree, root not counted; a map {active branches: nodes} "
        "applies the entry with the largest key that is not above the number of active branches",
    )
    levels: Int = Field(5, ge=1, le=64, description="drafted levels of a tree")
    top_k: Int = Field(4, ge=1, le=256, description="children per node while drafting")
    model: Text | None = Field(None, description="checkpoint of the head")

    @property
    def offered(self) -> int | Mapping[int, int]:
        most = super().offered
        return min(self.most_nodes, self.room[0]) if self.chooses else most

    @property
    def scratch(self) -> int:
        return self.top_k * (self.levels - 1)

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        return (2, *[min(self.top_k, nodes)] * (min(levels, nodes) - 1))

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
        MC_SIM_7B_63,
        min_length=1,
        max_length=1024,
        description="the nodes, each by its child ranks from the root on: [0, 2] is the third "
        "best child of the best first token",
    )
    draws: Literal["best", "sampled", "distinct"] = Field(
        "best",
        description="children are the best tokens, or, if the target's are drawn, independent "
        "draws or draws without their earlier siblings",
    )
    model: Text | None = Field(None, description="checkpoint of the head")

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
    def offered(self) -> int | Mapping[int, int]:
        return len(self.tree)

    @property
    def scratch(self) -> int:
        return lay_out(self.tree).inner


class DflashDrafter(TreeDrafter):
    """A DFlash model fills a block of masks per branch in one forward (arXiv 2602.06036)."""

    kind: Literal["dflash"]
    takes: ClassVar[Takes] = "features"
    loader: ClassVar[str] = "...models.load.weights:load_dflash"
    block_size: Int = Field(8, ge=2, le=1024, description="rows of a block, with its root token")
    grow: Literal["chain", "ddtree"] = Field(
        "chain", description="one path through the block, or its best tree (DDTree)"
    )
    draws: Literal["best", "sampled"] = Field(
        "best",
        description="tokens of a chain: the best, as published, or drawn, if the target's are; a "
        "DDTree is made of the best",
    )
    nodes: Nodes = Field(
        16,
        description="drafted tokens of a DDTree, or a map {active branches: nodes}; a chain has "
        "block_size - 1",
    )
    model: Text | None = Field(None, description="checkpoint of the drafter")

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.block_size - 1 if self.is_chain else super().offered

    @property
    def chooses(self) -> bool:
        return not self.is_chain and super().chooses

    @property
    def levels(self) -> int:
        """Drafted levels of a tree."""
        return self.block_size - 1

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        return (self.block_size,)

    @property
    def is_chain(self) -> bool:
        return self.grow == "chain"

    @property
    def draws_as(self) -> Draws:
        return Draws(self.draws) if self.is_chain else Draws.BEST

    @property
    def scratch(self) -> int:
        return self.block_size


class VanillaDrafter(ChoosingDrafter):
    """A small language model of the target's tokenizer drafts a chain per branch."""

    kind: Literal["vanilla"]
    takes: ClassVar[Takes] = "text"
    loader: ClassVar[str] = "...models.load.weights:load_vanilla"
    gamma: Int = Field(5, ge=0, le=1024, description="drafts per branch and round")
    gamma_policy: Literal["fixed", "egag", "heuristic", "svip", "confidence", "adaedl", "cost"] = (
        Field("fixed", description="who decides how many drafts a branch gets")
    )
    gamma_min: Int = Field(1, ge=0, le=1024, description="fewest drafts of a policy")
    gamma_max: Count | None = Field(None, description="most drafts of a policy; gamma if not given")
    gamma_limit: Annotated[float, Field(strict=True, ge=0, le=10)] | None = Field(
        None,
        description="threshold of svip (0.3 if not given), confidence (0.4) and, at the start, "
        "adaedl (0.4)",
    )
    egag_mode: Literal["linear", "seed"] = Field(
        "linear", description="from entropy to length, between the bounds or up to gamma_max"
    )
    egag_ema_beta: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        0.0, description="share of the past in EGAG's moving average"
    )
    egag_h_ref: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        None, description="entropy in nats that counts as no confidence; ln V if not given"
    )
    draws: Literal["best", "sampled"] = Field(
        "best", description="drafts are the best tokens, or drawn, if the target's are"
    )
    model: Text | None = Field(None, description="checkpoint of the small model")

    @model_validator(mode="after")
    def _lengths_are_sane(self) -> Self:
        try:
            _ = self.lengths
        except ValueError as error:
            raise PydanticCustomError("gamma", "{why}", {"why": str(error)}) from None
        return self

    @property
    def lengths(self) -> GammaSettings:
        """The draft-length policy."""
        return GammaSettings(**{f.name: getattr(self, f.name) for f in fields(GammaSettings)})

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.lengths.most

    @property
    def chooses(self) -> bool:
        return self.lengths.gamma_policy == GammaPolicy.COST

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def scratch(self) -> int:
        return max(self.lengths.most - 1, 0)


class NgramDrafter(TreeDrafter):
    """Drafts are what followed the last tokens before: no model, no forward."""

    kind: Literal["ngram"]
    takes: ClassVar[Takes] = "history"
    method: Literal["lookup", "nasd"] = Field(
        "lookup", description="prompt lookup, or count tables filled as the target speaks"
    )
    nodes: Nodes = Field(6, description="drafted tokens of a tree, or {active branches: nodes}")
    levels: Int = Field(6, ge=1, le=256, description="drafted levels of a tree")
    longest: Int = Field(3, ge=1, le=32, description="most context tokens that must match")
    width: Int = Field(2, ge=1, le=64, description="continuations side by side; 1 drafts a chain")
    scope: Literal["branch", "request", "session"] = Field(
        "request", description="whose text NASD counts together"
    )
    filler_top_k: Int = Field(
        1, ge=1, le=64, description="NASD also counts the target's best tokens, if above 1"
    )


BuiltIn = Annotated[
    NoDrafter
    | Eagle3Drafter
    | Eagle2Drafter
    | Eagle1Drafter
    | DflashDrafter
    | VanillaDrafter
    | NgramDrafter,
    Field(discriminator="kind"),
]
"""All kinds that specsot has itself."""

DRAFTERS: Mapping[str, type[Drafter]] = {
    one.kind_name(): one for one in get_args(get_args(BuiltIn)[0])
}


def drafter_class(kind: str) -> type[Drafter] | None:
    """The block of this kind, of specsot or of an installed package; None if nobody has one.

    Raises:
        RegistryError: a package has it, but it cannot be used.
    """
    return DRAFTERS.get(kind) or installed_drafter(kind)


def _by_kind(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
    """Kinds of installed packages are validated by their own class."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in DRAFTERS:
        return built_in(value)
    try:
        model = installed_drafter(kind)
    except RegistryError as error:
        context = {"at": "kind", "kind": kind, "why": str(error)}
        raise PydanticCustomError("drafter", "the drafter '{kind}': {why}", context) from None
    return model.model_validate(value) if model else built_in(value)


AnyDrafter = Annotated[SerializeAsAny[BuiltIn], WrapValidator(_by_kind)]
