"""Profiles: what goes with a target, under one name of `specsot.yaml`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ...states.graph.drafters import DRAFTERS
from ...states.graph.graph import Graph
from ...states.graph.load import Change
from ...states.graph.plugins import installed_kinds
from ...states.yaml.source import GraphError, ProblemCode, Source, hint
from ...states.yaml.spec import Spec, Text
from ..errors import LacksDrafterError, UsageError
from .options import Dtype, Kept, TokenIds

KEY = "profiles"
OWN = ("model", "dtype", "weights", "stop_ids")  # what is an option too
DRAFTER = ("drafter",)
OUTLINE = ("skeleton", "drafter")
OPTIONAL = [name for name, field in Graph.model_fields.items() if field.default is None]


def _long_form(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


class Profile(Spec):
    """A target and what suits it.

    drafters: by kind, the model or a mapping of settings of the block `drafter`, `model` among
        them. set: settings of graphs, as of `--set`.
    """

    model: Text
    drafters: dict[str, Annotated[dict[str, Any], BeforeValidator(_long_form)]] = Field(
        default_factory=dict
    )
    dtype: Dtype | None = None
    weights: Kept | None = None
    stop_ids: TokenIds | None = None
    set: dict[Text, Any] = Field(default_factory=dict)


def merged(packaged: Any, own: Any) -> Any:
    """The packaged profiles under the user's own, key by key; what is no mapping is for a check."""
    if not isinstance(packaged, Mapping) or not isinstance(own, Mapping):
        return packaged if own is None else own
    return {**packaged, **{name: merged(packaged.get(name), value) for name, value in own.items()}}


def check_drafters(profiles: Mapping[str, Profile], source: Source) -> None:
    """Raise GraphError for drafters of a kind that nobody has."""
    known = [*(kind for kind, one in DRAFTERS.items() if one.drafts), *installed_kinds()]
    problems = [
        source.problem(
            (KEY, name, "drafters", kind),
            f"no drafter {kind!r}{hint(kind, known)}; there are: {', '.join(known)}",
            ProblemCode.UNKNOWN_KIND,
            key=True,
        )
        for name, profile in profiles.items()
        for kind in profile.drafters
        if kind not in known
    ]
    if problems:
        raise GraphError(problems)


class ChosenProfile:
    """A profile by its name, with the places of what it says in `sources`, the user's file first.

    Raises:
        UsageError: there is none of that name.
    """

    def __init__(
        self, name: str, profiles: Mapping[str, Profile], sources: Sequence[Source]
    ) -> None:
        if name not in profiles:
            there = f"; there are: {', '.join(profiles)}"
            raise UsageError(f"--profile {name}: no such profile{hint(name, profiles)}{there}")
        self.name = name
        self._profile = profiles[name]
        self._sources = sources

    def options(self) -> dict[str, Any]:
        """What it says of a run's settings."""
        values = {key: getattr(self._profile, key) for key in OWN}
        return {key: value for key, value in values.items() if value is not None}

    def changes(self, source: Source, sets: Sequence[Change]) -> Iterator[Change]:
        """What it changes in a graph to which ``sets`` are applied afterwards.

        Of drafters only those of the kinds that the graph then drafts with; nothing in a block that
        graphs need not have, and this one has not.
        """
        data = source.data if isinstance(source.data, dict) else {}
        changes = [
            Change(tuple(path.split(".")), value, self._place("set", path))
            for path, value in self._profile.set.items()
            if (top := path.partition(".")[0]) in data or top not in OPTIONAL
        ]
        yield from changes
        changed = {one.path: one.value for one in (*changes, *sets)}
        for block in (DRAFTER, OUTLINE):
            here: Any = data
            for part in (*block, "kind"):
                here = here.get(part) if isinstance(here, dict) else None
            kind = str(changed.get((*block, "kind"), here))
            for key, value in self._profile.drafters.get(kind, {}).items():
                yield Change((*block, key), value, self._place("drafters", kind, key))

    def lacks(self, graph: Graph) -> LacksDrafterError:
        """It has no drafter for this graph."""
        kind = graph.drafter.kind
        there = ", ".join(self._profile.drafters)
        return LacksDrafterError(
            f"graph {graph.name!r} drafts with {kind}, profile {self.name!r} has none; it has"
            f" {there or 'no drafters'}: give --drafter-model, or --set drafter.kind=none"
        )

    def _place(self, *at: str) -> str:
        path = (KEY, self.name, *at)
        deepest = max(self._sources, key=lambda source: len(source.nearest(path)))
        file, line, column = deepest.place(path, key=True)
        return f"{file}:{line}:{column}: {KEY}.{self.name}"
