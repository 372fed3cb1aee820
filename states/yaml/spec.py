"""Base of everything in a graph file or a configuration, and pydantic's errors as problems."""

import ast
import inspect
from collections.abc import Callable
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from .source import GraphError, KeyPath, Problem, ProblemCode, Source, hint, quoted

Int = Annotated[int, Field(strict=True)]
Count = Annotated[Int, Field(ge=1, le=1024)]
Tokens = Annotated[Int, Field(ge=1, le=1 << 20)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[Number, Field(ge=0, le=1)]
Bool = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, Field(min_length=1)]


class Spec(BaseModel):
    """Frozen, strict, no unknown keys; the string below a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """The description of each field; read from the source, which a run has no use for."""
        texts = {name: field.description or "" for name, field in cls.model_fields.items()}
        for base in reversed(cls.__mro__[: cls.__mro__.index(Spec)]):
            definition: Any = ast.parse(dedent(inspect.getsource(base))).body[0]
            for field, text in pairwise(definition.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    words = ast.literal_eval(text.value).split()
                    texts[ast.unparse(field.target)] = " ".join(words)
        return texts

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in cls.descriptions().items():
            key = cls.model_fields[name].alias or name
            if text and key in properties:
                properties[key]["description"] = text
        return schema


Block = TypeVar("Block", bound=BaseModel)

_CODES = {"state_key": ProblemCode.STATE_NAME, "drafter": ProblemCode.NO_FUNCTION}
_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a mapping"),
}
_BOUNDS = {"ge": "at least", "le": "at most", "lt": "below", "gt": "above"}


def check_mapping(source: Source, what: str) -> None:
    """Raise GraphError unless the top level is a mapping."""
    if not isinstance(source.data, dict):
        there = "the file is empty" if source.data is None else f"{kind_of(source.data)} at the top"
        message = f"{there}; a {what} is a mapping of keys"
        raise GraphError([source.problem((), message, ProblemCode.TOP)])


def keys_of(model: type[BaseModel] | None) -> list[str]:
    """The keys of a model in a file."""
    return [f.alias or name for name, f in model.model_fields.items()] if model else []


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model of the mapping at a path in a file of `model`; None if there is none."""

    def model_in(kind: Any) -> type[BaseModel] | None:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        return next(filter(None, map(model_in, get_args(kind))), None)

    inner: type[BaseModel] | None = model
    for key in path:  # a key that the model lacks is an index, or the key of a mapping of models
        fields = inner.model_fields if inner is not None else {}
        field = next((f for name, f in fields.items() if key in (name, f.alias)), None)
        field = fields.get("root", field)  # of a model that is a list
        inner = inner if field is None else model_in(field.annotation)
    return inner


def validated(model: type[Block], source: Source) -> Block:
    """A file other than a graph as a model; raises GraphError with every problem."""
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    raise GraphError(problem_of(source, e, lambda at: keys_of(model_at(model, at))) for e in errors)


def problem_of(source: Source, error: Any, known_keys: Callable[[KeyPath], list[str]]) -> Problem:
    """A pydantic error as a problem with its place, without names of Python types. known_keys: the
    keys that the mapping at a path of the file may have."""
    loc: KeyPath = error["loc"]
    kind: str = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        key = str(loc[-1])
        message = f"unknown key {quoted(key)}{hint(key, known_keys(source.nearest(loc[:-1])))}"
        return source.problem(loc, message, ProblemCode.UNKNOWN_KEY, key=True)
    if kind == "invalid_key":
        return source.problem(loc, f"unknown key {loc[-1]}", ProblemCode.UNKNOWN_KEY, key=True)
    if kind in ("missing", "union_tag_not_found"):
        key, at = (str(loc[-1]), loc[:-1]) if kind == "missing" else ("kind", loc)
        return source.problem(at, f"the key {key!r} is missing", ProblemCode.MISSING_KEY)
    bound = next((bound for bound in _BOUNDS if bound in context), None)
    if kind in _TYPES:
        message = f"must be {_TYPES[kind]}, not {kind_of(value)}"
    elif kind == "literal_error":
        message = f"must be {context['expected']}, not {quoted(value)}"
    elif bound is not None:
        message = f"must be {_BOUNDS[bound]} {context[bound]}, not {quoted(value)}"
    elif kind in ("string_too_short", "too_short"):
        message = "must not be empty"
    elif kind == "finite_number":
        message = f"must be a finite number, not {value}"
    elif kind == "string_pattern_mismatch":
        message = f"{quoted(value)} must match {context['pattern']}"
    else:
        message = error["msg"][:1].lower() + error["msg"][1:]
    if "at" in context:
        loc = (*loc, context["at"])
    at_key = kind.endswith("_key") or loc[-1:] == ("[key]",)
    code = ProblemCode.WRONG_TYPE if kind in _TYPES else ProblemCode.WRONG_VALUE
    return source.problem(loc, message, _CODES.get(kind, code), key=at_key)


def kind_of(value: Any) -> str:
    """A value's kind in YAML's terms, with the value itself if it is a scalar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"{'the string' if isinstance(value, str) else 'the number'} {quoted(value)}"
