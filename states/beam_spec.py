"""The block `beam` of a graph, and what only the whole graph can tell about it. No torch here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from ..ops.registry import OpTable
from .source import Problem, Source
from .spec import Int, Spec

if TYPE_CHECKING:
    from .graph import Graph

EarlyStopping = Annotated[
    bool | Literal["never"],
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}]}),
]


class Beam(Spec):
    """Beam search, with the words and the meaning that transformers gives them."""

    num_beams: Int = Field(default=4, ge=1, le=256, description="hypotheses that live side by side")
    length_penalty: Annotated[float, Field(strict=True)] = Field(
        default=1.0,
        ge=-5.0,
        le=5.0,
        description="a hypothesis scores its log-probability / its length to this power",
    )
    early_stopping: EarlyStopping = Field(
        default=False,
        description="true: end when num_beams hypotheses have ended; false: when no live one can "
        "get better at its present length; never: when none can at any length",
    )

    @field_validator("early_stopping", mode="before")
    @classmethod
    def _three_words(cls, value: Any) -> Any:
        if not (isinstance(value, bool) or value == "never"):
            raise PydanticCustomError("early_stopping", "must be true, false or never")
        return value


def check_beam(graph: "Graph", src: Source, table: OpTable) -> Iterator[Problem]:
    """A search writes whole answers, undrafted and undrawn; its rows must fit."""
    if graph.beam is None:
        return
    if graph.drafter.kind != "none":
        message = f"beam search takes no drafter: the kind must be none, not {graph.drafter.kind}"
        yield src.problem(("drafter", "kind"), message)
    if graph.skeleton is not None:
        message = "beam search writes one answer: a graph with the block `beam` has no skeleton"
        yield src.problem(("skeleton",), message, key=True)
    for name, field in type(graph.sampling).model_fields.items():
        usual = field.get_default(call_default_factory=True)
        if getattr(graph.sampling, name) != usual:
            message = f"beam search draws nothing: {name} must be {usual}"
            yield src.problem(("sampling", name), message)
    yield from _foreign_ops(graph, src, table)
    rows = graph.beam.num_beams * graph.limits.max_new_tokens
    if rows + 2 > graph.layout.capacity:
        size = f"1 prompt token + {graph.beam.num_beams} beams with {graph.limits.max_new_tokens}"
        message = f"{size} tokens + 1 = {rows + 2} slots, but layout.capacity is"
        yield src.problem(("beam", "num_beams"), f"{message} {graph.layout.capacity}")


def _foreign_ops(graph: "Graph", src: Source, table: OpTable) -> Iterator[Problem]:
    """Whatever else commits tokens knows nothing of hypotheses."""
    for name, state in graph.states.items():
        for i, call in enumerate(state.ops):
            entry = table.find(call.op, graph.layout.kind, graph.drafter.kind)
            if entry and entry.declared.commits and "beam" not in entry.declared.needs:
                message = f"{call.op!r} has no place in a beam search: it commits single tokens"
                yield src.problem(("states", name, "ops", i), message)
