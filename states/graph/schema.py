"""From plain data to a `Graph`; pydantic's errors become problems in plain words."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ..yaml.source import (
    MAX_PROBLEMS,
    GraphError,
    KeyPath,
    Problem,
    ProblemCode,
    Source,
    hint,
    quoted,
)
from ..yaml.spec import Spec
from .drafters import settings_class
from .graph import EXTENDS, KINDS, LAYOUTS, VERSION, Call, Graph, StateSpec
from .plugins import installed_kinds

OUTLINE_DRAFTER: KeyPath = ("skeleton", "drafter")

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
        errors = error.errors(include_url=False)[: 10 * MAX_PROBLEMS]
        rest = (schema_problem(source, e, model_at) for e in errors)
        problems += [p for p in rest if p.place not in places]
    if problems:
        raise GraphError(problems)
    return graph


def validated(model: type[Block], source: Source) -> Block:
    """A file other than a graph as a model; raises GraphError with every problem."""
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    inside = partial(_inside, model)
    raise GraphError(schema_problem(source, e, inside) for e in errors)


def _inside(model: type[BaseModel], loc: KeyPath, _: Any) -> type[BaseModel] | None:
    """The model at a path: the file's, or that of the values of one of its mappings."""
    field = model.model_fields.get(str(loc[0])) if len(loc) == 2 else None
    kinds = get_args(field.annotation) if field else ()
    inner = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Spec))
    return next(inner, None) if loc else model


def check_mapping(source: Source, what: str) -> None:
    """Raise GraphError unless the top level is a mapping."""
    if not isinstance(source.data, dict):
        empty = source.data is None
        reason = "the file is empty" if empty else f"{kind_of(source.data)} at the top"
        message = f"{reason}; a {what} is a mapping of keys"
        raise GraphError([source.problem((), message, ProblemCode.TOP)])


def flatten_edges(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, KeyPath]]:
    """A graph's data with an edge for each state under `from`, and the file's path of each edge.

    Edges are sorted by the state that they leave; those of one state keep the file's order.
    """
    edges = data.get("transitions")
    if not isinstance(edges, list):
        return dict(data), {}
    order = list(states) if isinstance(states := data.get("states"), dict) else []
    flat = sorted(_single_edges(edges), key=lambda item: _rank(order, item[0]))
    origins: dict[KeyPath, KeyPath] = {}
    for i, (_, at) in enumerate(flat):
        origins["transitions", i] = ("transitions", at[0])
        if at[1:]:
            origins["transitions", i, "from"] = ("transitions", *at)
    return {**data, "transitions": [edge for edge, _ in flat]}, origins


def _single_edges(edges: list[Any]) -> Iterator[tuple[Any, KeyPath]]:
    """Edges with one state under `from`, and the path of each, or of its state in a list."""
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
    """Raise GraphError if the file needs a later version of specsot."""
    version = source.data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        message = f"the graph needs format {quoted(version)}, this specsot reads {VERSION}: upgrade"
        newer = source.problem(("version",), f"{message} specsot", ProblemCode.VERSION)
        raise GraphError([newer])


def _nulls(source: Source, value: Any, path: KeyPath) -> Iterator[Problem]:
    """No setting of a graph may be null, except settings of ops under `with`."""
    if value is None:
        yield source.problem(path, "must not be null", ProblemCode.NULL)
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if not (key == "with" and path[:1] == ("states",)):
                yield from _nulls(source, inner, (*path, key))


def _kind_at(place: KeyPath, data: Any) -> Any:
    """The value of `kind` in a block, or None."""
    for key in (*place, "kind"):
        data = data.get(key) if isinstance(data, dict) else None
    return data


def model_at(loc: KeyPath, data: Any) -> type[BaseModel] | None:
    """The model of a mapping at `loc` of a graph."""
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
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Spec)), None)


def schema_problem(source: Source, error: Any, model_at: Any) -> Problem:
    """A pydantic error as a problem with its place in the file."""
    loc: KeyPath = error["loc"]
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
    if kind in _CODES:
        return _CODES[kind]
    return ProblemCode.WRONG_TYPE if kind in _TYPES else ProblemCode.WRONG_VALUE


def _no_kind(block: str, kind: Any) -> str:
    """The message for an unknown kind of layout or drafter."""
    known = [*KINDS[block], *(installed_kinds() if block == "drafter" else ())]
    if not isinstance(kind, str):
        return f"must be one of: {', '.join(known)}"
    return f"no {block} {quoted(kind)}{hint(kind, known)}; there are: {', '.join(known)}"


def _extra(key: str, parent: KeyPath, model_at: Any, data: Any) -> tuple[str, ProblemCode]:
    model: type[BaseModel] | None = model_at(parent, data)
    known = [f.alias or name for name, f in model.model_fields.items()] if model else []
    known += [EXTENDS] if model is Graph else []
    block = str(parent[-1]) if len(parent) == 1 or parent == OUTLINE_DRAFTER else ""
    models = KINDS.get(block, {})
    other = [kind for kind, other in models.items() if key in other.model_fields]
    if other:
        kind = _kind_at(parent, data)
        message = f"{quoted(key)} belongs to the {block} {' or '.join(other)}, this is {kind}"
        return message, ProblemCode.OTHER_KIND
    return f"unknown key {quoted(key)}{hint(key, known)}", ProblemCode.UNKNOWN_KEY


def _plain(error: Any) -> str:
    """Pydantic's message without names of Python types."""
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {kind_of(value)}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {quoted(value)}"
    for side, bound in (("at least", "ge"), ("at most", "le"), ("below", "lt"), ("above", "gt")):
        if bound in context:
            return f"must be {side} {context[bound]}, not {quoted(value)}"
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    if kind == "finite_number":
        return f"must be a finite number, not {value}"
    if kind == "string_pattern_mismatch":
        return f"{quoted(value)} must match {context['pattern']}"
    message: str = error["msg"]
    return message[:1].lower() + message[1:]


_CODES = {"state_key": ProblemCode.STATE_NAME, "drafter": ProblemCode.NO_FUNCTION}
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
}


def kind_of(value: Any) -> str:
    """A value's kind in YAML's terms, with the value itself if it is a scalar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    name = "the string" if isinstance(value, str) else "the number"
    return f"{name} {quoted(value)}"
