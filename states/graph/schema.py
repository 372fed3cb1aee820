"""From plain data to a `Graph`, with every problem of the schema said in plain words."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ..yaml.codes import ProblemCode
from ..yaml.source import MOST, GraphError, Problem, Source, hint, quoted
from ..yaml.spec import Spec
from ..yaml.yaml12 import Path
from .drafters import settings_class
from .graph import EXTENDS, KINDS, VERSION, Call, Graph, StateSpec
from .layouts import LAYOUTS
from .plugins import installed_kinds

OUTLINE_DRAFTER: Path = ("skeleton", "drafter")

Block = TypeVar("Block", bound=BaseModel)


def validate(source: Source) -> Graph:
    """Build the graph.

    Raises:
        GraphError: every problem of the schema, in file order.
    """
    check_mapping(source, "graph")
    check_version(source)
    data, source.origins = flatten_edges(source.data)
    problems = list(_nulls(source, data, ()))
    try:
        graph = Graph.model_validate(data)
    except ValidationError as error:
        places = {p.place for p in problems}
        errors = error.errors(include_url=False)[: 10 * MOST]
        rest = (schema_problem(source, e, model_at) for e in errors)
        problems += [p for p in rest if p.place not in places]
    if problems:
        raise GraphError(problems)
    return graph


def validated(model: type[Block], source: Source) -> Block:
    """A file that is no graph as its model; raises GraphError with every problem."""
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    inside = partial(_inside, model)
    raise GraphError(schema_problem(source, e, inside) for e in errors)


def _inside(model: type[BaseModel], loc: Path, _: Any) -> type[BaseModel] | None:
    """The model at a place: the file's, or one of those that a mapping of its fields holds."""
    field = model.model_fields.get(str(loc[0])) if len(loc) == 2 else None
    kinds = get_args(field.annotation) if field else ()
    inner = (one for one in kinds if isinstance(one, type) and issubclass(one, Spec))
    return next(inner, None) if loc else model


def check_mapping(source: Source, what: str) -> None:
    """Raise unless the text holds a mapping at its top."""
    if not isinstance(source.data, dict):
        empty = source.data is None
        reason = "the file is empty" if empty else f"{kind_of(source.data)} at the top"
        message = f"{reason}; a {what} is a mapping of keys"
        raise GraphError([source.problem((), message, ProblemCode.TOP)])


def flatten_edges(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Path, Path]]:
    """A graph's data with an edge for each state under `from`, and where its file has each edge.

    Edges are sorted by the state that they leave; those of one state keep the order of the file.
    """
    edges = data.get("transitions")
    if not isinstance(edges, list):
        return dict(data), {}
    order = list(states) if isinstance(states := data.get("states"), dict) else []
    flat = sorted(_single_edges(edges), key=lambda one: _rank(order, one[0]))
    origins: dict[Path, Path] = {}
    for i, (_, at) in enumerate(flat):
        origins["transitions", i] = ("transitions", at[0])
        if at[1:]:
            origins["transitions", i, "from"] = ("transitions", *at)
    return {**data, "transitions": [edge for edge, _ in flat]}, origins


def _single_edges(edges: list[Any]) -> Iterator[tuple[Any, Path]]:
    """Edges with one state under `from`, and the place of each, or of its state in a list."""
    for i, edge in enumerate(edges):
        states = edge.get("from") if isinstance(edge, dict) else None
        if isinstance(states, list) and states:
            yield from (({**edge, "from": s}, (i, "from", j)) for j, s in enumerate(states))
        else:
            yield edge, (i,)


def _rank(order: list[str], edge: Any) -> int:
    state = edge.get("from") if isinstance(edge, dict) else None
    return order.index(state) if state in order else len(order)


def check_version(source: Source) -> None:
    """Raise if a later version of specsot wrote the file."""
    version = source.data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        message = f"the graph needs format {quoted(version)}, this specsot reads {VERSION}: upgrade"
        newer = source.problem(("version",), f"{message} specsot", ProblemCode.VERSION)
        raise GraphError([newer])


def _nulls(source: Source, value: Any, path: Path) -> Iterator[Problem]:
    """No setting of a graph may be null, except what an op is given under `with`."""
    if value is None:
        yield source.problem(path, "must not be null", ProblemCode.NULL)
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if not (key == "with" and path[:1] == ("states",)):
                yield from _nulls(source, inner, (*path, key))


def _kind_at(place: Path, data: Any) -> Any:
    """What a block says under `kind`, None if it says nothing."""
    for key in (*place, "kind"):
        data = data.get(key) if isinstance(data, dict) else None
    return data


def model_at(loc: Path, data: Any) -> type[BaseModel] | None:
    """The model that a mapping at `loc` of a graph becomes."""
    if not loc:
        return Graph
    if loc[0] in KINDS or loc[:2] == OUTLINE_DRAFTER:
        kind = _kind_at(loc[:2] if loc[:2] == OUTLINE_DRAFTER else loc[:1], data)
        if not isinstance(kind, str):
            return None
        return LAYOUTS.get(kind) if loc[0] == "layout" else settings_class(kind)
    if loc[0] == "states":
        return StateSpec if len(loc) == 2 else Call
    field = Graph.model_fields.get(str(loc[0]))
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, Spec)), None)


def schema_problem(source: Source, error: Any, model_at: Any) -> Problem:
    """One pydantic error as a problem: where it is in the file, in plain words."""
    loc: Path = error["loc"]
    kind: str = error["type"]
    if kind == "extra_forbidden":
        parent = source.nearest(loc[:-1])
        message, code = _extra(str(loc[-1]), parent, model_at, source.data)
        return source.problem(loc, message, code, key=True)
    if kind == "missing":
        message = f"the key {str(loc[-1])!r} is missing"
        return source.problem(loc[:-1], message, ProblemCode.MISSING_KEY)
    if kind == "union_tag_not_found":
        return source.problem(loc, "the key 'kind' is missing", ProblemCode.MISSING_KEY)
    if kind == "union_tag_invalid":
        message = _no_kind(str(source.nearest(loc)[-1]), error["input"]["kind"])
        return source.problem((*loc, "kind"), message, ProblemCode.UNKNOWN_KIND)
    if kind == "invalid_key":
        message = f"unknown key {loc[-1]}"
        return source.problem(loc, message, ProblemCode.UNKNOWN_KEY, key=True)
    if "at" in error.get("ctx", {}):
        loc = (*loc, error["ctx"]["at"])
    at_key = kind.endswith("_key") or loc[-1:] == ("[key]",)
    return source.problem(loc, _plain(error), _code(kind), key=at_key)


def _code(kind: str) -> ProblemCode:
    if kind in _OWN:
        return _OWN[kind]
    return ProblemCode.WRONG_TYPE if kind in _WANTED else ProblemCode.WRONG_VALUE


def _no_kind(block: str, kind: Any) -> str:
    """About an unknown kind of layout or drafter; pydantic's own words name its internals."""
    known = [*KINDS[block], *(installed_kinds() if block == "drafter" else ())]
    if not isinstance(kind, str):
        return f"must be one of: {', '.join(known)}"
    return f"no {block} {quoted(kind)}{hint(kind, known)}; there are: {', '.join(known)}"


def _extra(key: str, parent: Path, model_at: Any, data: Any) -> tuple[str, ProblemCode]:
    model: type[BaseModel] | None = model_at(parent, data)
    known = [f.alias or name for name, f in model.model_fields.items()] if model else []
    known += [EXTENDS] if model is Graph else []
    block = str(parent[-1]) if len(parent) == 1 or parent == OUTLINE_DRAFTER else ""
    other = [kind for kind, one in KINDS.get(block, {}).items() if key in one.model_fields]
    if other:
        mine = _kind_at(parent, data)
        message = f"{quoted(key)} belongs to the {block} {' or '.join(other)}, this is {mine}"
        return message, ProblemCode.OTHER_KIND
    return f"unknown key {quoted(key)}{hint(key, known)}", ProblemCode.UNKNOWN_KEY


def _plain(error: Any) -> str:
    """Pydantic's message without Python's words for things."""
    kind = error["type"]
    given = error["input"]
    context = error.get("ctx", {})
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {kind_of(given)}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {quoted(given)}"
    for side, bound in (("at least", "ge"), ("at most", "le"), ("below", "lt"), ("above", "gt")):
        if bound in context:
            return f"must be {side} {context[bound]}, not {quoted(given)}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind == "finite_number":
        return f"must be a finite number, not {given}"
    if kind == "string_pattern_mismatch":
        return f"{quoted(given)} must match {context['pattern']}"
    message: str = error["msg"]
    return message[:1].lower() + message[1:]


_OWN = {"state_key": ProblemCode.STATE_NAME, "drafter": ProblemCode.NO_FUNCTION}
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
}


def kind_of(value: Any) -> str:
    """A value's kind in the words of YAML, with the value itself when it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    name = "the string" if isinstance(value, str) else "the number"
    return f"{name} {quoted(value)}"
