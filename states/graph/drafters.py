"""The block `drafter` of a graph: one model per kind."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    Field,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...ops.draft.gamma_settings import GammaSettings
from ...ops.registry import RegistryError
from ...ops.sampling.settings import Draws
from ..yaml.spec import Int, Text
from .drafter_spec import Drafter, Nodes, Takes, TreeDrafter, sane_nodes
from .eagle_drafters import Eagle1Drafter, Eagle2Drafter, Eagle3Drafter
from .plugins import installed_drafter


class NoDrafter(Drafter):
    """Plain decoding: one token per branch and round. The baseline, through the same machine."""

    kind: Literal["none"]

    @property
    def drafts(self) -> bool:
        return False


class DflashDrafter(TreeDrafter):
    """A DFlash model fills a block of masks per branch in one forward (arXiv 2602.06036)."""

    kind: Literal["dflash"]
    takes: ClassVar[Takes] = "features"
    loader: ClassVar[str] = "...models.load.weights:load_dflash"
    block_size: Int = Field(
        default=8, ge=2, le=1024, description="rows of a block, the root token included"
    )
    grow: Literal["chain", "ddtree"] = Field(
        default="chain", description="one path through the block, or its best tree (DDTree)"
    )
    draws: Literal["best", "sampled"] = Field(
        default="best",
        description="tokens of a chain: the best, as published, or drawn, if the target's are; a "
        "DDTree is made of the best",
    )
    nodes: Nodes = Field(
        default=16,
        description="drafted tokens of a DDTree, or a map {active branches: nodes}; a chain has "
        "block_size - 1",
    )
    model: Text | None = Field(default=None, description="checkpoint of the drafter")

    _nodes_are_sane = field_validator("nodes", mode="before")(sane_nodes)

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.block_size - 1 if self.grow == "chain" else self.nodes

    @property
    def is_chain(self) -> bool:
        return self.grow == "chain"

    @property
    def draws_as(self) -> Draws:
        return Draws(self.draws) if self.is_chain else Draws.BEST

    @property
    def scratch(self) -> int:
        return self.block_size


class VanillaDrafter(Drafter):
    """A small language model of the target's tokenizer drafts a chain per branch."""

    kind: Literal["vanilla"]
    takes: ClassVar[Takes] = "text"
    loader: ClassVar[str] = "...models.load.weights:load_vanilla"
    gamma: Int = Field(default=5, ge=0, le=1024, description="drafts per branch and round")
    gamma_policy: Literal["fixed", "egag", "heuristic", "svip", "confidence", "adaedl"] = Field(
        default="fixed", description="who decides how many drafts a branch gets"
    )
    gamma_min: Int = Field(default=1, ge=0, le=1024, description="fewest drafts of a policy")
    gamma_max: Annotated[Int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="most drafts of a policy; gamma if not given"
    )
    egag_mode: Literal["linear", "seed"] = Field(
        default="linear",
        description="from entropy to length, between the bounds or up to gamma_max",
    )
    egag_ema_beta: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0, description="share of the past in EGAG's moving average"
    )
    egag_h_ref: Annotated[float, Field(strict=True, gt=0)] | None = Field(
        default=None, description="entropy in nats that counts as no confidence; ln V if not given"
    )
    draws: Literal["best", "sampled"] = Field(
        default="best",
        description="drafts are the best tokens, or drawn, if the target's are",
    )
    model: Text | None = Field(default=None, description="checkpoint of the small model")

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
        return GammaSettings.of(
            self.gamma,
            self.gamma_policy,
            self.gamma_min,
            self.gamma_max,
            self.egag_mode,
            self.egag_ema_beta,
            self.egag_h_ref,
        )

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.lengths.most

    @property
    def is_chain(self) -> bool:
        return True

    @property
    def draws_as(self) -> Draws:
        return Draws(self.draws)

    @property
    def scratch(self) -> int:
        return max(self.lengths.most - 1, 0)


class NgramDrafter(TreeDrafter):
    """Drafts are what followed the last tokens before: no model, no forward."""

    kind: Literal["ngram"]
    takes: ClassVar[Takes] = "history"
    method: Literal["lookup", "nasd"] = Field(
        default="lookup", description="prompt lookup, or count tables filled as the target speaks"
    )
    nodes: Nodes = Field(
        default=6, description="drafted tokens of a tree, or a map {active branches: nodes}"
    )
    levels: Int = Field(default=6, ge=1, le=256, description="drafted levels of a tree")
    longest: Int = Field(default=3, ge=1, le=32, description="most context tokens that must match")
    width: Int = Field(
        default=2, ge=1, le=64, description="continuations followed side by side; 1 drafts a chain"
    )
    scope: Literal["branch", "request", "session"] = Field(
        default="request", description="whose text NASD counts together"
    )
    filler_top_k: Int = Field(
        default=1, ge=1, le=64, description="NASD also counts the target's best tokens, if above 1"
    )

    _nodes_are_sane = field_validator("nodes", mode="before")(sane_nodes)

    @property
    def offered(self) -> int | Mapping[int, int]:
        return self.nodes


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
