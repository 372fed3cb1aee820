"""Base of everything in a graph file or a configuration, and pydantic's errors as problems."""

import ast
import inspect
from collections.abc import Callable, Iterable
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
            (definition,) = ast.parse(dedent(inspect.getsource(base))).body
            for field, text in pairwise(
                definition.body if isinstance(definition, ast.ClassDef) else ()
            ):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[ast.unparse(field.target)] = " ".join(
                        ast.literal_eval(text.value).split()
                    )
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
KnownKeys = Callable[[KeyPath], Iterable[str]]
"""The keys that a mapping at a path of a file may have."""

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
        reason = (
            "the file is empty" if source.data is None else f"{kind_of(source.data)} at the top"
        )
        message = f"{reason}; a {what} is a mapping of keys"
        raise GraphError([source.problem((), message, ProblemCode.TOP)])


def keys_of(model: type[BaseModel] | None) -> list[str]:
    """The keys of a model in a file."""
    return [f.alias or name for name, f in model.model_fields.items()] if model else []


def validated(model: type[Block], source: Source, known_keys: KnownKeys | None = None) -> Block:
    """A file other than a graph as a model; raises GraphError with every problem.

    known_keys: by default those of the model, and of the values of its mappings.
    """

    def keys_at(path: KeyPath) -> list[str]:
        field = model.model_fields.get(str(path[0])) if len(path) == 2 else None
        kinds = get_args(field.annotation) if field else ()
        inner = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Spec))
        return keys_of(next(inner, None) if path else model)

    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    raise GraphError(problem_of(source, e, known_keys or keys_at) for e in errors)


def problem_of(source: Source, error: Any, known_keys: KnownKeys) -> Problem:
    """A pydantic error as a problem with its place in the file."""
    loc: KeyPath = error["loc"]
    kind: str = error["type"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        key = str(loc[-1])
        message = f"unknown key {quoted(key)}{hint(key, known_keys(source.nearest(loc[:-1])))}"
        return source.problem(loc, message, ProblemCode.UNKNOWN_KEY, key=True)
    if kind == "invalid_key":
        return source.problem(loc, f"unknown key {loc[-1]}", ProblemCode.UNKNOWN_KEY, key=True)
    if kind == "missing":
        message = f"the key {str(loc[-1])!r} is missing"
        return source.problem(loc[:-1], message, ProblemCode.MISSING_KEY)
    if kind == "union_tag_not_found":
        return source.problem(loc, "the key 'kind' is missing", ProblemCode.MISSING_KEY)
    if "at" in context:
        loc = (*loc, context["at"])
    at_key = kind.endswith("_key") or loc[-1:] == ("[key]",)
    code = ProblemCode.WRONG_TYPE if kind in _TYPES else ProblemCode.WRONG_VALUE
    return source.problem(loc, _message(error, context), _CODES.get(kind, code), key=at_key)


def _message(error: Any, context: dict[str, Any]) -> str:
    """Pydantic's message without names of Python types."""
    kind = error["type"]
    value = error["input"]
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {kind_of(value)}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {quoted(value)}"
    for bound, side in _BOUNDS.items():
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


def kind_of(value: Any) -> str:
    """A value's kind in YAML's terms, with the value itself if it is a scalar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    return f"{'the string' if isinstance(value, str) else 'the number'} {quoted(value)}"
