"""Base classes of the block `drafter` of a graph, without torch, and the sizes that the pools need:
`offered`, the drafted tokens of a branch's tree (root not counted), and `scratch`, the temporary
drafter rows of a branch in a round."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ...ops.sampling.settings import Draws
from ..yaml.spec import Int, Spec

AUTO = "auto"
MAX_NODES = 4096
MAX_SHARED = 1 << 16


def _valid_nodes(value: Any) -> Any:
    context = {"most": MAX_NODES}
    if not isinstance(value, dict):
        if value != AUTO and not _count(value):
            what = "must be auto, an integer from 1 to {most}, or a map {active branches: nodes}"
            raise PydanticCustomError("nodes", what, context)
        return value
    for key, count in value.items():
        if not _count(key, 1024):
            what = "a number of active branches is an integer from 1 to 1024"
            raise PydanticCustomError("nodes_key", what, {"at": key})
        least = 1 if key == 1 else 0
        if not _count(count, least=least):
            what = f"must be an integer from {least} to {{most}}"
            raise PydanticCustomError("nodes", what, context | {"at": key})
    if 1 not in value:
        raise PydanticCustomError("nodes", "needs an entry for 1 active branch")
    return value


def _count(value: Any, most: int = MAX_NODES, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


_TREE_SIZE = {"type": "integer", "minimum": 1, "maximum": MAX_NODES}
_BY_ACTIVE = {
    "type": "object",
    "patternProperties": {
        "^1$": _TREE_SIZE,
        "^([2-9]|[1-9][0-9]+)$": {**_TREE_SIZE, "minimum": 0},
    },
    "required": ["1"],
    "additionalProperties": False,
}
Nodes = Annotated[
    int | dict[int, int] | Literal["auto"],
    BeforeValidator(_valid_nodes),
    WithJsonSchema({"anyOf": [_TREE_SIZE, _BY_ACTIVE, {"const": "auto"}]}),
]


def largest(nodes: int | Mapping[int, int]) -> int:
    """The largest tree size in `nodes`."""
    return nodes if isinstance(nodes, int) else max(nodes.values())


def most_offered(blocks: Sequence["DrafterSettings"], branches: int) -> int | Mapping[int, int]:
    """The largest trees that any of these drafters offers, for each number of active branches."""
    if len(blocks) == 1:
        return blocks[0].offered
    counts = range(1, branches + 1)
    return {n: max(nodes_for(block.offered, n) for block in blocks) for n in counts}


def nodes_for(nodes: int | Mapping[int, int], active: int) -> int:
    """Drafted tokens per branch while `active` branches share the round; 0: it drafts nothing."""
    if isinstance(nodes, int):
        return nodes
    return nodes[max(least for least in nodes if least <= max(active, 1))]


class DrafterSettings(Spec):
    """Settings of a kind of drafter; the kind is the only value of the Literal field `kind`.
    drafts: whether it ever drafts a token. has_model: whether it has a checkpoint and a KV pool.
    checkpoint: the kind whose checkpoints it reads, if not its own."""

    drafts: ClassVar[bool] = True
    has_model: ClassVar[bool] = False
    checkpoint: ClassVar[str] = ""
    if TYPE_CHECKING:
        kind: str

    @classmethod
    def kind_name(cls) -> str:
        """The value of `kind`; empty without that field."""
        field = cls.model_fields.get("kind")
        return next(iter(get_args(field.annotation)), "") if field else ""

    @property
    def alternatives(self) -> tuple["DrafterSettings", ...]:
        """Itself and the drafters of `or`; each round has drafts of one of them."""
        return (self, *getattr(self, "or_", ()))

    @property
    def takes_turns(self) -> bool:
        return len(self.alternatives) > 1

    @property
    def offered(self) -> int | Mapping[int, int]:
        """Drafted tokens of a tree, or a map {active branches: tokens}."""
        nodes: int | Mapping[int, int] | str = getattr(self, "num_draft_tokens", 0)
        return getattr(self, "most_nodes", 0) if isinstance(nodes, str) else nodes

    @property
    def chooses(self) -> bool:
        """Whether the size of each round's drafts is chosen at run time (`ops/draft/sizes.py`)."""
        return getattr(self, "num_draft_tokens", 0) == AUTO

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        """Rows of a branch in each drafter forward of a round, for a tree of this size."""
        return ()

    @property
    def is_chain(self) -> bool:
        """Whether a tree has one path only."""
        return False

    @property
    def draws_as(self) -> Draws:
        """How the children of a node are chosen: the setting `draws`, if there is one."""
        return Draws(getattr(self, "draws", Draws.BEST))

    @property
    def shared(self) -> int | None:
        """Drafted tokens of a round over all branches; None if each tree has its own size."""
        return getattr(self, "rows_per_round", None)

    @property
    def scratch(self) -> int:
        """Temporary rows of a branch in the drafter's pool."""
        return 0

    @property
    def largest_tree(self) -> tuple[int, str]:
        """Nodes of the largest tree that can be drafted, and the settings that limit it."""
        return largest(self.offered), ""


Milliseconds = Annotated[float, Field(ge=0, le=1e7)]


class MeasuredCosts(Spec):
    """Milliseconds of forwards by rows; `overhead`: of all else in a round of the smallest tree."""

    target: Annotated[dict[int, Milliseconds], Field(min_length=1)]
    drafter: dict[int, Milliseconds] = Field(default_factory=dict)
    overhead: Milliseconds = 0.0


_OTHER = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
Other = Annotated[SerializeAsAny[DrafterSettings], _OTHER]
CANDIDATES = 8  # of the target, that recycle keeps for each context


class ChoosingSettings(DrafterSettings):
    """Settings of a drafter that can choose the size of its drafts by measured costs."""

    or_: tuple[Other, ...] = Field((), alias="or", exclude_if=lambda others: not others)
    """drafters without a model, as kinds or blocks: each round has drafts of the one, or of this
    drafter, that is expected to be fastest (docs/trees.md)"""
    filler_top_k: Annotated[Int, Field(ge=1, le=64)] = Field(1, exclude_if=lambda count: count == 1)
    """the target's best tokens that recycle keeps for each context if `with` or `or` names it;
    there 8, if not given"""
    costs: MeasuredCosts | None = None
    """what `auto` and `cost` go by: milliseconds of a forward by its rows, of the `target` and the
    `drafter`, and `overhead`; measured when a run starts if not given"""

    @model_validator(mode="before")
    @classmethod
    def _keeps_candidates(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        named = [values.get(key) for key in ("with", "with_", "or", "or_")]
        others = [name for names in named if isinstance(names, list | tuple) for name in names]
        kinds = [getattr(other, "kind", other) for other in others]
        if "recycle" in kinds and cls.model_fields["filler_top_k"].default == 1:
            return {"filler_top_k": CANDIDATES, **values}
        return values


class TreeSettings(ChoosingSettings):
    """Settings of a tree drafter, whose branches may share the rows of a round."""

    most_nodes: Annotated[Int, Field(ge=1, le=MAX_NODES)] = 32
    """most drafted tokens of a tree with `num_draft_tokens: auto`"""
    rows_per_round: Annotated[Int, Field(ge=1, le=MAX_SHARED)] | None = None
    """drafted tokens of a round, of all branches together: the most probable nodes over all their
    trees; what says how large a tree is then says how large one may be"""

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.chooses and self.rows_per_round is not None:
            what = "num_draft_tokens: auto excludes rows_per_round: both set the size of trees"
            raise PydanticCustomError("nodes", what, {"at": "rows_per_round"})
        return self
