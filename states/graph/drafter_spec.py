"""What the block `drafter` of a graph is made of, whatever its kind.

Every kind says what the pools have to hold for it: `offered`, the tokens that a branch's tree may
have (the root not counted), and `scratch`, the drafter's temporary rows of a branch in a round.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ...ops.draft.gamma_settings import GammaSettings
from ...ops.sampling.settings import Draws
from ..yaml.spec import Int, Spec

AUTO = "auto"
MAX_NODES = 4096
MAX_SHARED = 1 << 16
Takes = Literal["nothing", "pairs", "features", "text", "history"]


def _sane_nodes(value: Any) -> Any:
    """An int, `auto`, or {active branches: int} with an entry for one branch."""
    context = {"most": MAX_NODES}
    if value == AUTO:
        return value
    if not isinstance(value, dict):
        if not _count(value):
            what = "must be auto, an integer from 1 to {most}, or a map {active branches: nodes}"
            raise PydanticCustomError("nodes", what, context)
        return value
    for key, count in value.items():
        if not _count(key, 1024):
            what = "a number of active branches is an integer from 1 to 1024"
            raise PydanticCustomError("nodes_key", what, {"at": key})
        if not _count(count):
            what = "must be an integer from 1 to {most}"
            raise PydanticCustomError("nodes", what, context | {"at": key})
    if 1 not in value:
        raise PydanticCustomError("nodes", "needs an entry for 1 active branch")
    return value


def _count(value: Any, most: int = MAX_NODES) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


_ONE_SIZE = {"type": "integer", "minimum": 1, "maximum": MAX_NODES}
_BY_ACTIVE = {
    "type": "object",
    "patternProperties": {"^[1-9][0-9]*$": _ONE_SIZE},
    "required": ["1"],
    "additionalProperties": False,
}
Nodes = Annotated[
    int | dict[int, int] | Literal["auto"],
    BeforeValidator(_sane_nodes),
    WithJsonSchema({"anyOf": [_ONE_SIZE, _BY_ACTIVE, {"const": "auto"}]}),
]


def most_of(nodes: int | Mapping[int, int]) -> int:
    """The largest tree that `nodes` asks for."""
    return nodes if isinstance(nodes, int) else max(nodes.values())


class Drafter(Spec):
    """What all kinds have. A kind is known by the words of its `kind`, a Literal of one string.

    takes: what it takes in of what the target commits (`states/requests/draft_state.py`).
    drafts: whether anything is ever drafted.
    loader: the function that loads its model, "module:function", leading dots as in an import of
        the module that says so; empty without a model.
    """

    takes: ClassVar[Takes] = "nothing"
    drafts: ClassVar[bool] = True
    loader: ClassVar[str] = ""

    @classmethod
    def kind_name(cls) -> str:
        """The word of its `kind`; empty if it has none."""
        field = cls.model_fields.get("kind")
        return next(iter(get_args(field.annotation)), "") if field else ""

    @classmethod
    def load_function(cls) -> Callable[..., Any]:
        """Import what `loader` names; raises ImportError, AttributeError or ValueError."""
        home = next(one for one in cls.__mro__ if "loader" in vars(one)).__module__
        module, _, function = cls.loader.partition(":")
        loader: Callable[..., Any]
        loader = getattr(import_module(module, home.rpartition(".")[0]), function)
        return loader

    @property
    def has_model(self) -> bool:
        return bool(self.loader)

    @property
    def offered(self) -> int | Mapping[int, int]:
        """Drafted tokens of a tree, or by number of active branches: a setting `nodes`, if any."""
        nodes: int | Mapping[int, int] | str = getattr(self, "nodes", 0)
        return getattr(self, "most_nodes", 0) if isinstance(nodes, str) else nodes

    @property
    def chooses(self) -> bool:
        """Whether each round drafts what is expected to pay most (`ops/draft/choice.py`)."""
        return getattr(self, "nodes", 0) == AUTO

    def forward_rows(self, nodes: int, levels: int) -> tuple[int, ...]:
        """Rows of a branch in each of the drafter's forwards in a round, for such a tree."""
        return ()

    @property
    def is_chain(self) -> bool:
        """Whether its trees have one path only."""
        return False

    @property
    def draws_as(self) -> Draws:
        """How the children of a node are chosen: as a setting `draws` says, if there is one."""
        return Draws(getattr(self, "draws", Draws.BEST))

    @property
    def shared(self) -> int | None:
        """Drafted tokens of all branches of a round together; None if each has its own number."""
        together: int | None = getattr(self, "rows_per_round", None)
        return together

    @property
    def scratch(self) -> int:
        """Temporary rows of a branch in the drafter's pool."""
        return 0

    @property
    def lengths(self) -> GammaSettings | None:
        """How many drafts a branch gets, where that differs from round to round."""
        return None

    @property
    def room(self) -> tuple[int, str]:
        """The largest tree that can be drafted at all, and the settings that say so."""
        return most_of(self.offered), ""


Milliseconds = Annotated[float, Field(ge=0, le=1e7)]


class MeasuredCosts(Spec):
    """Milliseconds of forwards by their rows, and of all else in a round, the smallest of trees."""

    target: Annotated[dict[int, Milliseconds], Field(min_length=1)]
    drafter: dict[int, Milliseconds] = Field(default_factory=dict)
    overhead: Milliseconds = 0.0


class ChoosingDrafter(Drafter):
    """A drafter that can be asked to draft what pays most."""

    costs: MeasuredCosts | None = Field(
        None,
        description="what `auto` and `cost` go by: milliseconds of a forward by its rows, of the "
        "`target` and the `drafter`, and `overhead`; measured when a run starts if not given",
    )


class TreeDrafter(ChoosingDrafter):
    """A drafter whose branches may share the rows of a round."""

    most_nodes: Annotated[Int, Field(ge=1, le=MAX_NODES)] = Field(
        32, description="most drafted tokens of a tree with `nodes: auto`"
    )
    rows_per_round: Annotated[Int, Field(ge=1, le=MAX_SHARED)] | None = Field(
        None,
        description="drafted tokens of a round, of all branches together: the most probable nodes "
        "over all their trees; what says how large a tree is then says how large one may be",
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.chooses and self.rows_per_round is not None:
            what = "nodes: auto and rows_per_round are two ways to say how large a tree may be"
            raise PydanticCustomError("nodes", what, {"at": "rows_per_round"})
        return self
