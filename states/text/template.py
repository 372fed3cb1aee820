"""Prompt templates: YAML files, checked with the place of every mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from string import Formatter
from typing import Annotated, Literal

from pydantic import Field

from ..yaml.source import GraphError, Problem, ProblemCode, Source, decode, hint
from ..yaml.spec import Bool, Int, Name, Spec, check_mapping, validated
from .outline import OutlineFormat

FOLDER = Path(__file__).parent / "templates"
SHIPPED = ("embedded", "instruct", "list")
MAX_BYTES = 100_000

Text = Annotated[str, Field(max_length=20_000)]

# Slots that differ between the branches of a request; the text before them is shared.
OF_A_BRANCH = frozenset({"id", "title", "length", "deps"})
# For each text: the slots it must have, and those it may have. Each at most once.
SLOTS = {
    "plain": ("question", ""),
    "skeleton": ("question", "max_branches tools"),
    "outline.branch": ("", "id deps title length plan"),
    "outline.direct": ("", ""),
    "prompt.branch": ("question", "id deps title length plan"),
    "prompt.direct": ("question", ""),
    "dependency": ("text", "id"),
    "combine": ("", ""),
    "plan_line": ("title", "id"),
    "document": ("text", "title"),
    "document_gap": ("", ""),
    "turns.system": ("text", ""),
    "turns.user": ("text", ""),
    "turns.assistant": ("text", ""),
    "turns.generation": ("", ""),
}


class TemplateError(GraphError):
    """A template that cannot be used; `problems` as in a graph."""


class TurnPair(Spec):
    """The turn of one part of an outline, and the turn of an answer without an outline."""

    branch: Text
    direct: Text


class Turns(Spec):
    """The format of conversations for a model without a chat template."""

    system: Text = "{text}\n\n"
    user: Text
    assistant: Text
    generation: Text


class Example(Spec):
    """A conversation before the question that shows an outline and a part."""

    question: Text
    titles: Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)]
    part: Annotated[Int, Field(ge=1, le=64)]
    text: Text


class Template(Spec):
    """The texts of a run's prompts; slots in braces are filled in, `{{` is a brace.

    `plain`, `skeleton` and `prompt` are user turns that begin a conversation, `outline` those after
    the outline, `combine` the one after the finished parts. `system` comes before all but `plain`,
    the `examples` before `skeleton`, as turns with its wording: a question, its outline, one of its
    parts. `document_gap` separates a document from the text before or after it.
    """

    version: Literal[1]
    name: Name
    doc: str = ""
    chat: Bool = True
    format: OutlineFormat = "fields"
    system: Text = ""
    examples: Annotated[tuple[Example, ...], Field(max_length=16)] = ()
    plain: Text
    skeleton: Text
    outline: TurnPair
    prompt: TurnPair
    dependency: Text
    plan_line: Text
    combine: Text = "Combine the parts."
    document: Text = "Document: {text}"
    document_gap: Text = "\n"
    turns: Turns | None = None


Piece = tuple[str, bool]  # a literal text, or (True) the name of a slot


def pieces(text: str) -> list[Piece]:
    """Cut a template's text at its slots; ValueError if its braces do not match."""
    cut: list[Piece] = []
    for literal, slot, spec, conversion in Formatter().parse(text):
        if literal and cut and not cut[-1][1]:  # a brace cuts a literal in two
            cut[-1] = (cut[-1][0] + literal, False)
        elif literal:
            cut.append((literal, False))
        if slot is not None:
            if spec or conversion or not slot.isidentifier():
                raise ValueError(f"{{{slot}...}} is not a slot; a slot is a name in braces")
            cut.append((slot, True))
    return cut


def load_template(name: str | Path) -> Template:
    """Read a shipped template by its name, or a file by its path. Raises TemplateError: no such
    file, or not a template, with the place of every problem."""
    path = FOLDER / f"{name}.yaml" if str(name) in SHIPPED else Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        known = f"there are {', '.join(SHIPPED)}, or give the path of a file"
        message = f"no template {str(name)!r} ({error.strerror}){hint(str(name), SHIPPED)}; {known}"
        problem = Problem(str(name), 0, 0, "template", message, ProblemCode.TEMPLATE_FILE)
        raise TemplateError([problem]) from None
    if len(data) > MAX_BYTES:
        message = f"more than {MAX_BYTES} bytes"
        problem = Problem(str(path), 1, 1, "template", message, ProblemCode.TOO_LARGE)
        raise TemplateError([problem])
    try:
        source = Source(decode(data, str(path)), str(path))
        check_mapping(source, "template")
        template = validated(Template, source)
        for check in (_wrong_slots, _wrong_texts):
            if problems := list(check(template, source)):
                raise GraphError(problems)
        return template
    except GraphError as error:
        found = [replace(p, where="template") if p.where == "graph" else p for p in error.problems]
        raise TemplateError(found) from None


def _slots(text: str) -> list[str]:
    return [piece for piece, is_slot in pieces(text) if is_slot]


def _wrong_slots(template: Template, source: Source) -> Iterator[Problem]:
    for name, (must, may) in SLOTS.items():
        where = tuple(name.split("."))
        needed = must.split()
        known = [*needed, *may.split()]
        if where[0] == "turns" and template.turns is None:
            continue
        try:
            slots = _slots(attrgetter(name)(template))
        except ValueError as error:
            wrong = [str(error).lower()]
        else:
            used = sorted({*slots})
            wrong = [f"no slot {{{s}}} here{hint(s, known)}" for s in used if s not in known]
            wrong += [f"the slot {{{s}}} is used twice here" for s in used if slots.count(s) > 1]
            wrong += [f"the slot {{{s}}} is missing" for s in sorted({*needed} - {*slots})]
        for message in wrong:
            yield source.problem(where, message, ProblemCode.SLOTS)


def _wrong_texts(template: Template, source: Source) -> Iterator[Problem]:
    """A part shows its number or title, and under `fields` its dependencies; prompts of outline and
    parts begin alike; conversations have a format."""
    for name in ("outline", "prompt"):
        slots = _slots(getattr(template, name).branch)
        absent = ["{deps}"] if template.format == "fields" and "deps" not in slots else []
        absent += [] if {"id", "title"} & {*slots} else ["{id} or {title}"]
        for slot in absent:
            message = f"the slot {slot} is missing"
            yield source.problem((name, "branch"), message, ProblemCode.SLOTS)
    for at, example in enumerate(template.examples):
        if example.part > len(example.titles):
            message = f"there are {len(example.titles)} titles, no part {example.part}"
            yield source.problem(("examples", at, "part"), message, ProblemCode.TEXTS)
    if not template.chat and template.turns is None:
        message = "without a chat format, 'turns' must give the format of turns"
        yield source.problem(("chat",), message, ProblemCode.TEXTS)
    opening, *others = (
        cut[: cut.index(("question", True))]
        for cut in map(pieces, (template.skeleton, template.prompt.branch, template.prompt.direct))
    )
    for where, other in zip(("branch", "direct"), others, strict=True):
        if other != opening:
            message = "the text before {question} differs from 'skeleton', so nothing is shared"
            yield source.problem(("prompt", where), message, ProblemCode.TEXTS)
